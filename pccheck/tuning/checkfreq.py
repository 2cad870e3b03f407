"""CheckFreq's choice of the interval, by the paper and as its code does it (floor 0: imports tuning.domain).

Mohan, Phanishayee, Chidambaram: CheckFreq, FAST 2021, Algorithm 1 and section on adaptive rate tuning. One checkpoint
at a time. What it calls T_w is the weight update (`update_s`), not the time to write, as in PCcheck.
"""

from __future__ import annotations

from typing import NamedTuple

from pccheck.tuning.domain import at_least, not_negative, positive, share, whole


class CheckFreq(NamedTuple):
    """What CheckFreq decides: the stall of one checkpoint in seconds (T_o), and the interval in steps (k)."""

    stall_s: float
    interval: int


def checkfreq(
    *,
    step_s: float,
    update_s: float,
    device_copy_s: float,
    host_copy_s: float,
    storage_s: float,
    device_has_room: bool,
    fraction: float,
) -> CheckFreq:
    """Give stall and interval by CheckFreq's Algorithm 1.

    T_o = max(0, T_c - (T_i - T_w)), or T_g if less and the device has room for a copy;
    k = ceil(max((T_c + T_s - T_o) / T_i, T_o / (p T_i))), at least 1: a checkpoint is done before the next begins, and
    stalls stay below the fraction p.

    Args:
        step_s: seconds of a step without checkpoints (T_i), greater than 0.
        update_s: of these, for the update of the weights (T_w), 0 to step_s.
        device_copy_s: seconds of a copy of the state within the device (T_g), 0 or more.
        host_copy_s: seconds of a copy from the device to the host (T_c), 0 or more.
        storage_s: seconds of a write to storage (T_s), 0 or more.
        device_has_room: whether the device's memory holds a second copy of the state.
        fraction: of the time that stalls may take (p), greater than 0 and less than 1; the paper reports 0.035.

    Raises OptionError for a value out of its range.
    """
    step, update = positive("step_s", step_s), not_negative("update_s", update_s)
    on_device, to_host = not_negative("device_copy_s", device_copy_s), not_negative("host_copy_s", host_copy_s)
    written = not_negative("storage_s", storage_s)
    stall = max(0.0, to_host - max(0.0, step - update))
    if device_has_room:
        stall = min(on_device, stall)
    one_at_a_time = (to_host + written - stall) / step
    return CheckFreq(stall, at_least(max(one_at_a_time, stall / (share("fraction", fraction) * step))))


def checkfreq_retuned(interval: int, measured: float, bound: float, *, least: int = 1) -> int:
    """Give the interval that brings a measured overhead to its bound: ceil(k measured / bound), up as well as down.

    A stall of measured * k steps per checkpoint, spread over k' steps, is the bound (CheckFreq, adaptive rate tuning:
    the second term of Algorithm 1 with measured values).

    Args:
        interval: steps between checkpoints when it was measured (k), 1 or more.
        measured: overhead as a fraction of the time without checkpoints; less than 0, by noise, counts as 0.
        bound: fraction that it may be (p), greater than 0 and less than 1.
        least: shortest interval that storage keeps up with (the first term of Algorithm 1), 1 or more.

    Raises OptionError for a value out of its range.
    """
    grown = whole("interval", interval) * _overhead(measured) / share("bound", bound)
    return max(whole("least", least), at_least(grown))


def checkfreq_as_coded(*, step_s: float, device_copy_s: float, host_copy_s: float, storage_s: float) -> CheckFreq:
    """Give stall and interval as CheckFreq's published code does, not as its paper says.

    The stall is the shorter copy, whole, however much of it would fit beside a step; the interval only lets a
    checkpoint finish before the next: max(1, ceil((T_c + T_s - T_o) / T_i)). The bound on stalls is not in it. The code
    takes storage at 515 MB/s for granted; here `storage_s` is the caller's.

    Args:
        step_s: seconds of a step without checkpoints, greater than 0.
        device_copy_s: seconds of a copy within the device, 0 or more.
        host_copy_s: seconds of a copy from the device to the host, 0 or more.
        storage_s: seconds of a write to storage, 0 or more.

    Raises OptionError for a value out of its range.
    """
    to_host = not_negative("host_copy_s", host_copy_s)
    stall = min(not_negative("device_copy_s", device_copy_s), to_host)
    left = to_host + not_negative("storage_s", storage_s) - stall
    return CheckFreq(stall, at_least(left / positive("step_s", step_s)))


def checkfreq_retuned_as_coded(interval: int, measured: float, bound: float = 0.05) -> int:
    """Give the interval after one window as CheckFreq's published code does: two steps more if over the bound.

    It is never lowered again.

    Args:
        interval: steps between checkpoints when it was measured, 1 or more.
        measured: overhead as a fraction of the time without checkpoints; less than 0, by noise, counts as 0.
        bound: fraction that it may be, greater than 0 and less than 1.

    Raises OptionError for a value out of its range.
    """
    now = whole("interval", interval)
    return now + 2 if _overhead(measured) > share("bound", bound) else now


def _overhead(measured: float) -> float:
    return 0.0 if measured < 0 else not_negative("measured", measured, what="a fraction")
