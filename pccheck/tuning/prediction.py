"""What a training loop will see of its checkpoints, by what a probe measured (floor 0: imports tuning.*)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pccheck.errors import OptionError
from pccheck.tuning.machine import Machine, Options
from pccheck.tuning.storage import StorageModel, pipeline_times


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What checkpoints cost a training loop in the steady state.

    Args:
        slowdown: time of a step with checkpoints over that without, >= 1.
        stall_s: seconds of the trainer that each checkpoint costs, waits for a slot not counted.
        slot_wait_s: mean seconds that each save waits because in_flight checkpoints are under way.
        durable_s: from the beginning of a save, that wait not counted, until it is durable.
        period_s: from save to save.
        capture_s: until the last byte of the state was copied out of the trainer's memory.
        keeps_up: storage takes checkpoints as often as they come.
    """

    slowdown: float
    stall_s: float
    slot_wait_s: float
    durable_s: float
    period_s: float
    capture_s: float
    keeps_up: bool


def predict(
    machine: Machine,
    *,
    state_bytes: int,
    in_flight: int,
    interval: int,
    step_s: float,
    writers: int = 2,
    writers_per_checkpoint: int | None = None,
    chunk_bytes: int | None = None,
    buffer_bytes: int | None = None,
    snapshot: Literal["copy", "lazy"] = "lazy",
) -> Prediction:
    """Predict what a save every `interval` steps costs, and when it is durable.

    A period is as long as the work and the stall, or as storage takes for one of `in_flight` checkpoints at once,
    whichever is longer: P = max(f t + c, T_w(N) / N). What is under way at once is ceil(T_w / P), at most N, which says
    how long each takes (PCcheck, ASPLOS 2025; Little's law).

    Args:
        machine: what the probe measured.
        state_bytes: of one checkpoint.
        in_flight: checkpoints at once, >= 1.
        interval: steps from save to save, >= 1.
        step_s: seconds of a step without checkpoints, > 0.
        writers, writers_per_checkpoint, chunk_bytes: as the Checkpointer's; None of the latter = what was probed most.
        buffer_bytes: the pool; None = as many states as may be in flight.
        snapshot: "copy" waits in `save()` for one copy of the state; "lazy" only for what is not copied by the end of
            the next step.

    Raises OptionError for a value out of its range.
    """
    for name, value in (("state_bytes", state_bytes), ("in_flight", in_flight), ("interval", interval)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(name, value, "a whole number, at least 1")
    if not 0 < step_s < math.inf:
        raise OptionError("step_s", step_s, "seconds, more than 0")
    options: Options = {
        "writers": writers,
        "writers_per_checkpoint": writers_per_checkpoint,
        "chunk_bytes": chunk_bytes,
    }
    model, alone_s = machine.model(**options), machine.alone_s(state_bytes, **options)
    work_s = interval * step_s
    room = in_flight * state_bytes if buffer_bytes is None else buffer_bytes
    chunk = chunk_bytes or machine.of(**options)[0].chunk_bytes
    capture_s = _capture_s(machine, model, state_bytes, room, chunk)
    waited_s = capture_s if snapshot == "copy" else max(0.0, capture_s - step_s)
    stall_s = machine.save_s + waited_s + (machine.interference or 0.0) * alone_s
    busy_s = work_s + stall_s
    period_s = max(busy_s, model.durable_s(state_bytes, in_flight) / in_flight)
    if period_s > busy_s:
        durable_s = model.durable_s(state_bytes, in_flight)
    else:
        durable_s = alone_s if alone_s <= period_s else _overlapping_s(model, state_bytes, in_flight, period_s)
    return Prediction(
        slowdown=period_s / work_s,
        stall_s=stall_s,
        slot_wait_s=period_s - busy_s,
        durable_s=durable_s,
        period_s=period_s,
        capture_s=capture_s,
        keeps_up=period_s == busy_s,
    )


def _overlapping_s(model: StorageModel, state_bytes: int, in_flight: int, period_s: float) -> float:
    """Give the time to durable with as many at once as a period makes them."""
    for count in range(1, in_flight):
        durable_s = model.durable_s(state_bytes, count)
        if durable_s <= count * period_s:
            return durable_s
    return model.durable_s(state_bytes, in_flight)


def _capture_s(machine: Machine, model: StorageModel, state_bytes: int, room_bytes: int, chunk_bytes: int) -> float:
    """Give the seconds until the state was copied: by the slowest copy on its way, or by what writes its file."""
    copies = [machine.copy_bytes_per_s, machine.device_copy_bytes_per_s]
    times = pipeline_times(
        state_bytes, pool_bytes=room_bytes, chunk_bytes=chunk_bytes,
        copy_bytes_per_s=min(rate for rate in copies if rate), write_bytes_per_s=model.stream_bytes_per_s,
    )  # fmt: skip
    return times.capture_s
