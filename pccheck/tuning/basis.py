"""The rates that advice rests on: a probe's, a user's, or assumed ones (floor 0: imports tuning.machine and below)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from pccheck.errors import OptionError
from pccheck.options import MIB
from pccheck.tuning.machine import Machine, Options, Sample
from pccheck.tuning.units import bytes_text, rate_text
from pccheck.tuning.wanted import MOST_IN_FLIGHT, Wanted
from pccheck.version import __version__

# A cloud SSD of moderate size; the machine of PCcheck's evaluation (ASPLOS 2025) wrote at about this rate, too.
ASSUMED_DISK = 500e6
ASSUMED_COPY = 10e9  # one device to pinned host memory over PCIe, or host memory to host memory: 10 to 15 as a rule
ASSUMED_COMMIT_S = 0.01
ASSUMED_SAVE_S = 0.005  # save() of some thousand tensors: 3 to 6 ms (docs/benchmarks.md, table "trainers")
ASSUMED_RESTART_S = 60.0  # until a process runs again, before it reads its state


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates told by hand, in bytes per second; what is None is assumed.

    Args:
        disk: what storage takes, all writers, checkpoints and ranks together; None = 500 MB/s.
        stream: what one checkpoint's file of one rank reaches alone; None = all that `disk` gives.
        copy: from where the state of one rank lives to host memory; None = 10 GB/s.
        read: at which a restart reads the state, all ranks together; None = as `disk`, of each rank at most `stream`.

    Raises OptionError for a rate below one byte per second, and for a stream above `disk`.
    """

    disk: float | None = None
    stream: float | None = None
    copy: float | None = None
    read: float | None = None

    def __post_init__(self) -> None:
        for name in ("disk", "stream", "copy", "read"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 1e15:
                raise OptionError(name, value, "bytes per second, from 1 to 10**15")
        if self.stream is not None and self.stream > (self.disk or ASSUMED_DISK):
            raise OptionError("stream", self.stream, f"at most the disk's {rate_text(self.disk or ASSUMED_DISK)}")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Options of a Checkpointer that are up for choice, apart from `in_flight` and the pool."""

    writers: int = 2
    writers_per_checkpoint: int | None = None
    chunk_bytes: int = 16 * MIB

    @property
    def cut(self) -> Options:
        """The options by which samples of a Machine are told apart."""
        return {
            "writers": self.writers,
            "writers_per_checkpoint": self.writers_per_checkpoint,
            "chunk_bytes": self.chunk_bytes,
        }

    def of(self, in_flight: int) -> Setting:
        """Give the same for a number of checkpoints at once: where each has one stream, there is a writer for each."""
        if self.writers_per_checkpoint == 1:
            return Setting(writers=in_flight, writers_per_checkpoint=1, chunk_bytes=self.chunk_bytes)
        return self


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What is known of a machine, and how.

    Args:
        machine: its rates, as one rank sees them while all ranks save: its share of what they have in common.
        source: "probe", "rates" (at least one told by hand), or "assumed".
        settings: options that were measured, the default ones first.
        memory_bytes: of the host, the share of one rank; None = not known.
        free_bytes: of the file system; None = not known.
        restart_s: from a failure until the first new step.
        assumptions: what was taken for granted, and how to replace it, one sentence each.
    """

    machine: Machine
    source: Literal["probe", "rates", "assumed"]
    settings: tuple[Setting, ...]
    memory_bytes: int | None
    free_bytes: int | None
    restart_s: float
    assumptions: tuple[str, ...]

    def doubt(self, setting: Setting) -> float:
        """Give by how much the rate of a setting that is not the default may be luck, as a share; 0 = it was told.

        A disk that takes bytes in bursts may begin or end the few saves of its trial with one: one save more or less.
        """
        if self.source != "probe" or setting == Setting():
            return 0.0
        return 1 / min(sample.saves for sample in self.machine.of(**setting.cut))


def basis_of(wanted: Wanted, machine: Machine | Rates | None) -> Basis:
    """Give what advice for a job can rest on."""
    if isinstance(machine, Machine):
        return _of_probe(wanted, machine)
    return _of_rates(wanted, machine or Rates())


def _of_probe(wanted: Wanted, machine: Machine) -> Basis:
    assumptions = _of_ranks(wanted, "that the probe's one process reached")
    largest = max(sample.state_bytes for sample in machine.samples)
    if wanted.state_bytes > 4 * largest:
        assumptions.append(
            f"the probe wrote checkpoints of {bytes_text(largest)}; {bytes_text(wanted.state_bytes)} go at the same "
            "rate (many cloud disks slow down when their burst credit is spent: probe for longer)"
        )
    if machine.device_copy_bytes_per_s is None:
        assumptions.append(
            f"the state is copied at the {rate_text(machine.copy_bytes_per_s)} of host memory (of a GPU: `--copy`, "
            "or device_copy_bytes_per_s in the probe's file)"
        )
    else:
        copies = min(machine.copy_bytes_per_s, machine.device_copy_bytes_per_s)
        assumptions.append(f"the state is copied to host memory at {rate_text(copies)} (`--copy`, or the probe's file)")
    assumptions.append(_interference(machine))
    restart_s = _restart_s(wanted, machine.read_bytes_per_s, f"the probe read{_how_read(machine)}", assumptions)
    # Where each checkpoint has one stream, the writers follow in_flight: they make no setting of their own.
    settings = {
        Setting(writers=s.writers, writers_per_checkpoint=s.writers_per_checkpoint, chunk_bytes=s.chunk_bytes).of(1)
        for s in machine.samples
    }
    return Basis(
        machine=_shared(machine, wanted.ranks),
        source="probe",
        settings=tuple(sorted(settings, key=_need)),
        memory_bytes=machine.memory_bytes // wanted.ranks,
        free_bytes=machine.free_bytes,
        restart_s=restart_s,
        assumptions=tuple(assumptions),
    )


def _how_read(machine: Machine) -> str:
    """Say what the rate at which a probe read is."""
    came = machine.fresh_memory_bytes_per_s
    fresh = "" if came is None else f", which came at {rate_text(came)} there,"
    how = reads_text(machine, f"; fresh memory{fresh} is not counted")
    return f"{'' if machine.read_past_cache else ' through the page cache'} ({how})"


def reads_text(machine: Machine, fresh: str) -> str:
    """Say of which reads a probe's rate of reading back is, and then `fresh` where fresh memory is not in the rate."""
    if not machine.reads or machine.worst_read_bytes_per_s is None:
        return "an older probe, fresh memory may be in it: probe anew"
    worst = rate_text(machine.worst_read_bytes_per_s)
    return ("once" if machine.reads == 1 else f"median of {machine.reads}, {worst} at worst") + fresh


def _shared(machine: Machine, ranks: int) -> Machine:
    """Give a machine as one of several ranks sees it: in the same times it writes and reads its part."""
    if ranks == 1:
        return machine
    samples = (msgspec.structs.replace(s, state_bytes=max(1, s.state_bytes // ranks)) for s in machine.samples)
    read = machine.read_bytes_per_s
    return msgspec.structs.replace(
        machine, samples=tuple(samples), read_bytes_per_s=None if read is None else read / ranks
    )


def _of_ranks(wanted: Wanted, rate: str) -> list[str]:
    if wanted.ranks == 1:
        return [
            "one process saves all of the state (`--ranks N` where N save a part each; `--nodes` tells only how often "
            "the job fails)"
        ]
    return [
        f"{wanted.ranks:,} ranks save equal parts, each copying its own; they share one storage, with the rate {rate} "
        "(a disk in each machine: give the state and the ranks of one machine)"
    ]


def _interference(machine: Machine) -> str:
    if machine.interference is None:
        return (
            "training runs no slower while a checkpoint is under way, its copies apart (measure yours, and enter it as "
            "`interference` in a probe's file)"
        )
    return (
        f"training runs {machine.interference:.1%} slower while a checkpoint is under way (the probe's `interference`)"
    )


def _need(setting: Setting) -> tuple[bool, bool, int, int]:
    """Give the order in which settings are preferred where they are as good: the default first."""
    streams = setting.writers_per_checkpoint is not None
    return streams, setting != Setting(), setting.writers, setting.chunk_bytes


def _of_rates(wanted: Wanted, rates: Rates) -> Basis:
    assumptions = _of_ranks(wanted, "below" if rates.disk is None else "that was told")
    disk, copy = rates.disk or ASSUMED_DISK, rates.copy or ASSUMED_COPY
    stream = rates.stream or disk
    own_disk = disk / wanted.ranks
    own_stream = min(stream, own_disk)
    if rates.disk is None:
        assumptions.append(
            f"storage takes {rate_text(disk)}, as a cloud SSD of moderate size; measure yours: "
            "`pccheck probe DIR --json probe.json`, then `--probe probe.json`; or tell it: `--disk 2GB/s`"
        )
    if rates.stream is None:
        assumptions.append("a single file reaches all of that rate, written and read (`--stream`)")
    if rates.copy is None:
        assumptions.append(
            f"the state is copied to host memory at {rate_text(copy)}, as from one GPU over PCIe (`--copy`: of one "
            "process; ranks copy side by side)"
        )
    if wanted.dram_bytes is None or wanted.storage_bytes is None:
        assumptions.append("there is memory for the pool and room for the slots (`--dram`, `--storage`)")
    read = rates.read or min(disk, wanted.ranks * stream)
    whose = (
        "storage gives" if read >= disk else "one file gives" if wanted.ranks == 1 else "one file of each rank gives"
    )
    restart_s = _restart_s(wanted, read, whose, assumptions)
    settings = (Setting(),) if own_stream >= own_disk else (Setting(), Setting(writers=1, writers_per_checkpoint=1))
    machine = Machine(
        path="",
        filesystem="",
        time_s=0.0,
        pccheck=__version__,
        pipeline="native",
        cpus=2,
        memory_bytes=1,
        free_bytes=0,
        seconds=0.0,
        copy_bytes_per_s=copy,
        read_bytes_per_s=read / wanted.ranks,
        commit_s=ASSUMED_COMMIT_S,
        save_s=ASSUMED_SAVE_S,
        samples=_samples(wanted.part_bytes, own_stream, own_disk),
    )
    assumptions.append(_interference(machine))
    return Basis(
        machine=machine,
        source="assumed" if rates == Rates() else "rates",
        settings=settings,
        memory_bytes=None,
        free_bytes=None,
        restart_s=restart_s,
        assumptions=tuple(assumptions),
    )


def _restart_s(wanted: Wanted, read: float | None, whose: str, assumptions: list[str]) -> float:
    if wanted.restart_s is not None:
        return wanted.restart_s
    reading = wanted.state_bytes / read if read else 0.0
    at = f", and reading the state at the {rate_text(read)} that {whose}" if read else ""
    assumptions.append(f"a restart takes a minute until the program runs{at} (`--restart`)")
    return ASSUMED_RESTART_S + reading


def _samples(state_bytes: int, stream: float, disk: float) -> tuple[Sample, ...]:
    """Give the samples that a probe of such storage would have taken: one at a time, and several side by side."""
    part = max(1, state_bytes // 8)  # a second size tells the fixed cost and the rate apart
    several = Setting(writers_per_checkpoint=1 if stream < disk else None)
    wanted = [(state_bytes, 1, Setting())] + [(part, 1, Setting())] * (part < state_bytes)
    wanted += [(state_bytes, count, several.of(count)) for count in range(2, MOST_IN_FLIGHT + 1)]
    found = []
    for size, in_flight, setting in wanted:
        durable_s = ASSUMED_COMMIT_S + max(size / stream, in_flight * size / disk)
        found.append(
            Sample(
                state_bytes=size,
                in_flight=in_flight,
                writers=setting.writers,
                writers_per_checkpoint=setting.writers_per_checkpoint,
                chunk_bytes=setting.chunk_bytes,
                buffer_bytes=in_flight * size,
                saves=1,
                durable_s=durable_s,
                worst_durable_s=durable_s,
                period_s=durable_s / in_flight,
            )
        )
    return tuple(found)
