"""CheckFreq's Algorithm 1 and re-tuning, by the paper and by its code."""

from __future__ import annotations

import pytest

from pccheck import tuning


def decided(step, update, device, host, storage, room, fraction):
    return tuning.checkfreq(
        step_s=step,
        update_s=update,
        device_copy_s=device,
        host_copy_s=host,
        storage_s=storage,
        device_has_room=room,
        fraction=fraction,
    )


@pytest.mark.parametrize(
    ("measured", "stall", "interval"),
    [
        ((1, 0, 1, 2, 0, False, 0.05), 1, 20),  # the paper's example: cost = step, 5 %
        ((0.3, 0.02, 0.01, 0.2, 1.7, True, 0.035), 0, 7),
        ((0.3, 0.02, 0.01, 0.5, 1.7, False, 0.035), 0.22, 21),
        ((0.3, 0.02, 0.01, 0.5, 1.7, True, 0.035), 0.01, 8),
        ((1, 0, 9, 3, 2.5, False, 0.9), 2, 4),  # one at a time: what did not stall remains
        ((1, 0, 1, 1, 0, True, 0.05), 0, 1),  # all of it fits beside a step
    ],
)
def test_vectors(measured, stall, interval):
    found = decided(*measured)
    assert found.stall_s == pytest.approx(stall, abs=1e-12)
    assert found.interval == interval


def test_an_update_as_long_as_the_step_leaves_no_room_for_the_copy():
    assert decided(1, 1, 5, 2, 0, False, 0.5).stall_s == 2
    assert decided(1, 3, 5, 2, 0, False, 0.5).stall_s == 2


def test_retuning_goes_up_and_down_but_not_below_what_storage_keeps_up_with():
    assert tuning.checkfreq_retuned(10, 0.35, 0.05) == 70
    assert tuning.checkfreq_retuned(70, 0.05, 0.05) == 70
    assert tuning.checkfreq_retuned(70, 0.051, 0.05) == 72
    assert tuning.checkfreq_retuned(70, 0.01, 0.05) == 14
    assert tuning.checkfreq_retuned(70, 0.01, 0.05, least=20) == 20
    assert tuning.checkfreq_retuned(70, 0, 0.05) == 1
    assert tuning.checkfreq_retuned(70, -0.01, 0.05, least=3) == 3  # noise


def test_retuning_reaches_its_fixed_point_at_once():
    """A stall of c seconds per checkpoint is measured as c / (k t), whatever the interval was."""
    stall, step, bound = 0.22, 0.3, 0.035
    for interval in (1, 5, 21, 400):
        retuned = tuning.checkfreq_retuned(interval, stall / (interval * step), bound)
        assert retuned == tuning.stall_interval(stall, step_s=step, fraction=bound) == 21


def test_as_coded():
    """No bound on stalls, nothing hidden beside a step, two steps more at a time and never fewer."""
    found = tuning.checkfreq_as_coded(step_s=0.3, device_copy_s=1, host_copy_s=0.5, storage_s=1.7)
    assert found == tuning.CheckFreq(stall_s=0.5, interval=6)
    assert tuning.checkfreq_as_coded(step_s=9, device_copy_s=0.1, host_copy_s=0.5, storage_s=1.7).interval == 1
    assert tuning.checkfreq_retuned_as_coded(10, 0.35) == 12
    assert tuning.checkfreq_retuned_as_coded(10, 0.05) == 10
    assert tuning.checkfreq_retuned_as_coded(10, 0.0) == 10
