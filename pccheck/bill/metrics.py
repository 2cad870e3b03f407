"""Metrics for Prometheus, of Checkpointers that are open and of bills (floor 4: imports bill; `prometheus_client`).

    pccheck.bill.metrics.register(ck)                      # in the training process
    pccheck.bill.metrics.register("/ckpt/a", "/ckpt/b")    # anywhere: what `pccheck report` says of stores

`prometheus_client` is imported when something is registered or written, and not before.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, Protocol, final

from pccheck import events
from pccheck.bill.bills import Report
from pccheck.bill.report import report
from pccheck.errors import MediumError, UsageError

_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Live(Protocol):
    """What is asked of a Checkpointer."""

    @property
    def path(self) -> str:
        """Its store."""

    def stats(self) -> Any:
        """Give its `pccheck.Stats`."""

    def subscribe(self, observer: Callable[[events.Event], object]) -> None:
        """Call an observer with each event."""

    def unsubscribe(self, observer: Callable[[events.Event], object]) -> None:
        """Undo that."""


def register(*sources: Live | str | os.PathLike[str], registry: Any = None) -> Collector:
    """Have a registry collect metrics of Checkpointers, and of stores by their paths, each with a label `store`.

    Args:
        sources: all that this registry is to tell of: the names of metrics are the same for each.
        registry: a `prometheus_client.CollectorRegistry`; None = the one that its servers use.

    Raises:
        UsageError: `prometheus_client` is not installed, or a path leads to no store.
        ValueError: the registry has these metrics already; `unregister` the collector that gave them first.
    """
    client = _client()
    collector = Collector(*sources)
    try:
        (client.REGISTRY if registry is None else registry).register(collector)
    except BaseException:
        collector.close()
        raise
    return collector


def write(found: Report, path: str | os.PathLike[str]) -> None:
    """Write a bill's metrics to a file, whole, as node_exporter's textfile collector reads it.

    Raises UsageError where its name does not end in `.prom`, its folder is not there, or `prometheus_client` is not
    installed; MediumError where it cannot be written.
    """
    place, folder = os.fspath(path), os.path.dirname(os.path.abspath(path))
    if not place.endswith(".prom"):
        raise UsageError(f"{place}: node_exporter's textfile collector reads only files whose names end in .prom")
    if not os.path.isdir(folder):
        raise UsageError(f"{place} cannot be written: there is no folder {folder}; make it first")
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(_Fixed(found))
    try:
        client.write_to_textfile(place, registry)
    except OSError as error:
        raise MediumError("writing the metrics", place, error) from error


@final
class Collector:
    """Gives the metrics of its sources, as they are when a registry asks. Thread-safe."""

    def __init__(self, *sources: Live | str | os.PathLike[str]) -> None:
        self._live = [_Watched(one) for one in sources if not isinstance(one, (str, os.PathLike))]
        self._paths = [one for one in sources if isinstance(one, (str, os.PathLike))]

    def collect(self) -> Iterator[Any]:
        """Give one family of samples for each metric."""
        families = _Families()
        for watched in self._live:
            watched.tell(families)
        for path in self._paths:
            _tell(report(path), families)
        return iter(families.made.values())

    def describe(self) -> Iterator[Any]:
        """Give what a registry holds the names of; a path that leads to no store is told of when it is registered."""
        return self.collect()

    def close(self) -> None:
        """Hear no more events of Checkpointers."""
        for watched in self._live:
            watched.close()


@final
class _Fixed:
    def __init__(self, found: Report) -> None:
        self._found = found

    def collect(self) -> Iterator[Any]:
        families = _Families()
        _tell(self._found, families)
        return iter(families.made.values())


@final
class _Families:
    """Families of samples, made when the first sample of each is told."""

    def __init__(self) -> None:
        self._core = importlib.import_module("prometheus_client.core")
        self.made: dict[str, Any] = {}

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        """Tell a number that only grows; its name ends in `_total`."""
        self._family("CounterMetricFamily", name, text, labels).add_metric(list(labels.values()), value)

    def gauge(self, name: str, text: str, value: float | None, **labels: str) -> None:
        """Tell a number; None is not told."""
        if value is not None:
            self._family("GaugeMetricFamily", name, text, labels).add_metric(list(labels.values()), value)

    def histogram(self, name: str, text: str, counts: Iterable[int], total: float, **labels: str) -> None:
        """Tell counts for _BOUNDS and one beyond, and the sum."""
        seen, buckets = 0, []
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family = self._family("HistogramMetricFamily", name, text, labels)
        family.add_metric(list(labels.values()), buckets=buckets, sum_value=total)

    def _family(self, kind: str, name: str, text: str, labels: dict[str, str]) -> Any:
        if name not in self.made:
            self.made[name] = getattr(self._core, kind)(f"pccheck_{name}", text, labels=list(labels))
        return self.made[name]


@final
class _Watched:
    """One Checkpointer, and what its events told since it was registered."""

    def __init__(self, checkpointer: Live) -> None:
        self._checkpointer = checkpointer
        self._lock = threading.Lock()
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum_s, self._bytes = 0.0, 0
        self._step: int | None = None
        self._saved_s = 0.0
        checkpointer.subscribe(self._hear)

    def close(self) -> None:
        self._checkpointer.unsubscribe(self._hear)

    def _hear(self, event: events.Event) -> None:
        with self._lock:
            if isinstance(event, events.Persisted):
                self._bytes += event.payload_bytes
            elif isinstance(event, (events.Published, events.Superseded)):
                self._counts[sum(event.seconds > bound for bound in _BOUNDS)] += 1
                self._sum_s += event.seconds
                if isinstance(event, events.Published):
                    self._step, self._saved_s = event.step, time.time() - event.seconds

    def tell(self, families: _Families) -> None:
        stats, store = self._checkpointer.stats(), self._checkpointer.path
        other_s = max(0.0, stats.save_s - stats.copy_wait_s - stats.slot_wait_s)
        _tell_saves(families, store, stats)
        _tell_waits(
            families, store, (stats.copy_wait_s, stats.slot_wait_s, stats.gate_wait_s, other_s), stats.pool_wait_s
        )
        with self._lock:
            families.counter("written_bytes", "Bytes of checkpoints written.", self._bytes, store=store)
            text = "Seconds from save() to durable."
            families.histogram("durable_seconds", text, self._counts, self._sum_s, store=store)
            if self._step is not None:
                _tell_newest(families, store, self._step, time.time() - self._saved_s)


def _tell(found: Report, families: _Families) -> None:
    """Tell what a bill says: of all runs, and of the newest."""
    store = found.path
    families.counter("uptime_seconds", "Uptime of all runs that are noted.", found.uptime_s, store=store)
    families.counter("failures", "Runs that never said that they ended.", found.failures, store=store)
    families.counter("lost_steps", "Steps lost by failures.", found.steps_lost, store=store)
    families.gauge("mtbf_seconds", "Uptime per failure.", found.mtbf_s, store=store)
    families.gauge("restart_seconds", "Median seconds of a restart after a failure.", found.restart_s, store=store)
    run = found.last
    if run is None:
        return
    cost, durable = run.cost, run.durable
    per_step = None if cost.ms_per_step is None else cost.ms_per_step / 1e3
    _tell_saves(families, store, run.saves)
    _tell_waits(families, store, (cost.copy_wait_s, cost.slot_wait_s, cost.gate_wait_s, cost.other_s), cost.pool_wait_s)
    families.counter("written_bytes", "Bytes of checkpoints written.", run.written_bytes, store=store)
    families.gauge("cost_seconds_per_step", "What checkpoints cost a training step.", per_step, store=store)
    text = "Seconds from save() to durable, by quantile."
    for part, seconds in (("0.5", durable.median_s), ("0.9", durable.p90_s), ("1", durable.worst_s)):
        families.gauge("durable_quantile_seconds", text, seconds, store=store, quantile=part)
    families.gauge("loss_seconds_per_failure", "What one failure takes, restart included.", run.loss.total_s,
                   store=store)  # fmt: skip
    families.gauge("running", "Whether the newest run goes on.", float(run.state == "running"), store=store)
    if run.durable_step is not None:
        _tell_newest(families, store, run.durable_step, run.age.now_s)


def _tell_saves(families: _Families, store: str, saves: Any) -> None:
    for outcome in ("committed", "superseded", "skipped", "failed"):
        families.counter("saves", "Saves that are over.", getattr(saves, outcome), store=store, outcome=outcome)
    families.counter("retries", "Writes that were tried again.", saves.retries, store=store)


def _tell_waits(families: _Families, store: str, waits: tuple[float, float, float, float], pool_s: float) -> None:
    for cause, seconds in zip(("copy", "slot", "gate", "other"), waits, strict=True):
        text = "Seconds that the trainer waited for checkpoints."
        families.counter("trainer_wait_seconds", text, seconds, store=store, cause=cause)
    families.counter("pool_wait_seconds", "Seconds that captures waited for buffers.", pool_s, store=store)


def _tell_newest(families: _Families, store: str, step: int, age_s: float | None) -> None:
    families.gauge("newest_durable_step", "Step of the newest durable checkpoint.", step, store=store)
    families.gauge("newest_durable_age_seconds", "Age of the newest durable checkpoint.", age_s, store=store)


def _client() -> ModuleType:
    try:
        return importlib.import_module("prometheus_client")
    except ImportError:
        raise UsageError("metrics need prometheus_client: pip install 'pccheck[metrics]'") from None
