"""Filling chunks from several devices: exact bytes, one ticket, every capture ended once, whatever fails."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck.errors import UsageError
from pccheck.state.filling import DeviceFiller, DeviceLayout, OnDevice
from pccheck.state.plan import lay_out
from tests.unit.device_arrays import Device, Memory

CHUNK = 4096


def made(lengths, on, firsts=None, chunk_bytes=CHUNK):
    """Give a layout, the memory of each piece that is on a device, and a filler over them."""
    layout = lay_out(lengths, chunk_bytes)
    rng = np.random.default_rng(len(lengths))
    firsts = firsts or [0] * len(lengths)
    sources = {
        n: Memory(device, rng.integers(0, 256, firsts[n] + lengths[n], np.uint8))
        for n, device in enumerate(on)
        if device is not None
    }
    found = [OnDevice(n, device, firsts[n]) for n, device in enumerate(on) if device is not None]
    return layout, sources, DeviceFiller(DeviceLayout(layout, found), dict(sources))


def filled(layout, filler):
    space = np.full(len(layout.chunks) * layout.chunk_bytes, 255, np.uint8)
    for n in range(len(layout.chunks)):
        if filler.has(n):
            ticket = filler.fill(n, space.ctypes.data + n * layout.chunk_bytes, layout.chunk_bytes)
            assert ticket.wait(60)
    return space


@settings(deadline=None, derandomize=True, database=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 2), st.integers(0, 500)), max_size=12),
    st.sampled_from([4096, 8192]),
)
def test_what_lies_on_devices_is_filled_and_nothing_else_is_touched(pieces, chunk_bytes):
    devices = [None, Device("a"), Device("b")]
    lengths, on = [n for n, _, _ in pieces], [devices[d] for _, d, _ in pieces]
    firsts = [first for _, _, first in pieces]
    layout, sources, filler = made(lengths, on, firsts, chunk_bytes)
    filler.begin()
    space = filled(layout, filler)
    filler.end()
    expected = np.full_like(space, 255)
    for n, source in sources.items():
        offset, length = layout.pieces[n].offset, layout.pieces[n].length
        expected[offset : offset + length] = source.memory[firsts[n] : firsts[n] + length]
    assert (space == expected).all()
    for device in set(on) - {None}:
        assert [capture.ended for capture in device.captures] == [1]


def test_a_ticket_waits_for_every_device():
    one, two = Device("one"), Device("two")
    two.open.clear()
    _, sources, filler = made([100, 100], [one, two])
    filler.begin()
    room = np.zeros(CHUNK, np.uint8)
    ticket = filler.fill(0, room.ctypes.data, CHUNK)
    assert not ticket.wait(0.02)
    assert not ticket.wait(0)
    two.open.set()
    assert ticket.wait(60)
    assert (room[128:228] == sources[1].memory).all()
    assert ticket.wait(0), "once made, always made"
    filler.end()


def test_an_error_is_told_when_no_other_copy_runs_any_more():
    one, two = Device("one"), Device("two")
    one.open.clear()
    _, sources, filler = made([100, 100], [one, two])
    filler.begin()
    room = np.zeros(CHUNK, np.uint8)
    ticket = filler.fill(0, room.ctypes.data, CHUNK)
    ticket._open[1].error = OSError("the device is gone")
    assert not ticket.wait(0.05), "the other still writes into the buffer"
    one.open.set()
    with pytest.raises(OSError, match="gone"):
        ticket.wait(60)
    assert (room[:100] == sources[0].memory).all()
    filler.end()


def test_a_copy_that_is_refused_leaves_no_other_running():
    one, two = Device("one"), Device("two")
    _, sources, filler = made([100, 100], [one, two])
    filler.begin()
    two.refuses = OSError("no")
    room = np.zeros(CHUNK, np.uint8)
    with pytest.raises(OSError, match="no"):
        filler.fill(0, room.ctypes.data, CHUNK)
    assert (room[:100] == sources[0].memory).all(), "it was waited for"
    filler.end()
    assert (one.captures[0].ended, two.captures[0].ended) == (1, 1)


def test_every_capture_is_ended_once_whatever_fails():
    one, two, three = (Device(name) for name in ("one", "two", "three"))
    _, _, filler = made([9, 9, 9], [one, two, three])
    filler.begin()
    assert len(filler.captures) == 3
    one.end_fails = two.end_fails = OSError("cannot end")
    with pytest.raises(OSError, match="cannot end"):
        filler.end()
    filler.end()
    assert [d.captures[0].ended for d in (one, two, three)] == [1, 1, 1]
    assert filler.captures == ()


def test_a_device_that_cannot_begin_ends_the_others():
    class Broken(Device):
        def begin(self):
            raise OSError("cannot begin")

    one = Device("one")
    _, _, filler = made([9, 9], [one, Broken("two")])
    with pytest.raises(OSError, match="cannot begin"):
        filler.begin()
    assert one.captures[0].ended == 1


def test_calls_out_of_order_are_refused():
    _, _, filler = made([9], [Device()])
    room = np.zeros(CHUNK, np.uint8)
    with pytest.raises(UsageError, match="between begin"):
        filler.fill(0, room.ctypes.data, CHUNK)
    filler.begin()
    with pytest.raises(UsageError, match="before begin"):
        filler.shadow([0])
    with pytest.raises(UsageError, match="once"):
        filler.begin()
    filler.end()
    with pytest.raises(UsageError, match="between begin"):
        filler.fill(0, room.ctypes.data, CHUNK)


def test_a_filler_that_is_never_begun_may_be_ended():
    device = Device()
    _, _, filler = made([9], [device])
    filler.end()
    assert device.captures == []
    assert "1 pieces on 1 device" in repr(filler)


def test_shadows_are_what_is_captured():
    one, two = Device("one"), Device("two", room=False)
    layout, sources, filler = made([100, 100, 100], [one, two, one])
    expected = sources[2].memory.copy()
    assert filler.shadow([1, 2]) == [1]
    sources[2].memory[:] = 0
    filler.begin()
    space = filled(layout, filler)
    assert (space[256:356] == expected).all()
    assert (space[:100] == sources[0].memory).all()
    filler.end()
