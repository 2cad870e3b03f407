"""The wrappers do what their scripts say: the faults that come, and the rates that are kept."""

from __future__ import annotations

import errno
import threading

import pytest

from pccheck.errors import CapacityError, MediumError
from pccheck.storage.directory import Directory
from pccheck.storage.memory import MemoryMedium
from pccheck.testing.faults import FOREVER, Fault, FaultyMedium, FaultyVolume, Script
from pccheck.testing.promises import read
from pccheck.testing.throttle import Limit, Rate, ThrottledMedium, ThrottledVolume

MIB = 1 << 20


def attempts(calls, count):
    """Call something so often, and tell for each whether it failed."""
    failed = []
    for _ in range(count):
        try:
            calls()
            failed.append(False)
        except (MediumError, CapacityError):
            failed.append(True)
    return failed


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        (Fault("write", 2), [False, True, False, False]),
        (Fault("write", 2, times=2), [False, True, True, False]),
        (Fault("write", 3, times=FOREVER), [False, False, True, True]),
        (Fault("*", 4), [False, False, False, True]),
        (Fault("sync", 1), [False] * 4),
    ],
)
def test_the_nth_fails(fault, failed):
    medium = FaultyMedium(MemoryMedium(4096), Script(fault))
    assert attempts(lambda: medium.write_from(memoryview(b"x"), 0), 4) == failed


def test_how_much_of_a_failed_write_is_done():
    for how, stored in (("before", b"----"), ("short", b"ne--"), ("after", b"new!")):
        inner = MemoryMedium(4)
        inner.write_from(memoryview(b"----"), 0)
        medium = FaultyMedium(inner, Script(Fault("write", 1, errno.EIO, how=how)))
        with pytest.raises(MediumError) as caught:
            medium.write_from(memoryview(b"new!"), 0)
        assert (caught.value.errno, caught.value.offset) == (errno.EIO, 0)
        assert read(inner, 4, 0) == stored


def everything(volume):
    """Do one of each operation."""
    assert volume.lock()
    page = volume.check_page(create=True)
    page.write(0, b"x")
    page.sync()
    page.close()
    medium = volume.create("slot-000.pcc", 8192)
    medium.allocate(16384)
    medium.write_from(memoryview(b"x" * 4096), 0)
    medium.sync()
    read(medium, 10, 0)
    medium.close()
    volume.open("slot-000.pcc").close()
    volume.link("slot-000.pcc", "kept/1-c1.pcc")
    volume.sync_names("kept")
    volume.names()
    volume.remove("kept/1-c1.pcc")


def test_every_operation_is_counted_and_can_fail(tmp_path):
    script = Script()
    everything(FaultyVolume(Directory(tmp_path / "whole", create=True, write=True), script))
    names = [operation for operation, _ in script.operations]
    assert names == [
        "lock", "check_page", "check_write", "check_sync", "create", "allocate", "write", "sync", "read", "open",
        "link", "sync_names", "names", "remove",
    ]  # fmt: skip
    assert script.count() == len(names)
    assert script.count("write") == 1
    for n, name in enumerate(names, 1):
        for how in ("before", "after"):
            for code in (errno.EIO, errno.ENOSPC):
                script = Script(Fault("*", n, code, how=how))
                volume = Directory(tmp_path / f"{n}{how}{code}", create=True, write=True)
                with pytest.raises((MediumError, CapacityError)) as caught:
                    everything(FaultyVolume(volume, script))
                assert script.operations[-1][0] == name
                assert script.failed == 1
                space = code == errno.ENOSPC and name in ("create", "allocate", "link", "check_page")
                assert isinstance(caught.value, CapacityError) == space
                if name == "create":
                    assert volume.names() == ["CHECK"]
                volume.close()


def test_a_script_can_be_armed_later():
    script = Script()
    medium = FaultyMedium(MemoryMedium(4096), script)
    for _ in range(3):
        medium.sync()
    script.arm(Fault("sync", 2))
    assert attempts(medium.sync, 3) == [False, True, False]


def test_nothing_goes_past_a_wrapper(tmp_path):
    volume = Directory(tmp_path, create=False, write=True)
    for wrapped in (FaultyVolume(volume, Script()), ThrottledVolume(volume)):
        medium = wrapped.create("slot-000.pcc", 4096)
        assert (medium.fileno(), medium.mapping(), medium.alignment) == (None, None, 1)
        medium.close()
        wrapped.remove("slot-000.pcc")


# -- rates -------------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(
    ("phases", "start", "count", "end"),
    [
        (((100, 1),), 0, 50, 0.5),
        (((100, 1),), 7.25, 1000, 17.25),
        (((100, 4), (900, 4)), 0, 400, 4),
        (((100, 4), (900, 4)), 0, 1300, 5),
        (((100, 4), (900, 4)), 3, 1000, 5),
        (((100, 4), (900, 4)), 7, 1000, 9),
        (((100, 4), (900, 4)), 0, 4000 * 5, 40),
        (((100, 4), (900, 4)), 2, 4000 * 5 + 200, 44),
    ],
)
def test_a_rate_that_changes(phases, start, count, end):
    assert Rate(phases).end(start, count) == pytest.approx(end)


@pytest.mark.parametrize("phases", [(), ((0, 1),), ((1, 0),), ((1, 1), (-1, 1))])
def test_rates_that_are_refused(phases):
    with pytest.raises(ValueError, match="phases"):
        Rate(phases)


def test_streams_below_the_total():
    """One stream has 100 of 300 bytes/s: three fill the storage, a fourth gets nothing more out of it."""
    for streams, rate in ((1, 100), (2, 200), (3, 300), (6, 300)):
        clock = Clock()
        total = Limit(Rate.steady(300), clock)
        limits = [Limit(Rate.steady(100), clock) for _ in range(streams)]
        ends = [max(total.book(10), limit.book(10)) for _ in range(200) for limit in limits]
        assert streams * 200 * 10 / (max(ends) - 100.0) == pytest.approx(rate, rel=0.02)


def test_a_throttled_medium_takes_its_time():
    clock = Clock()
    limit = Limit(Rate.steady(1000), clock)
    medium = ThrottledMedium(MemoryMedium(10_000), limit, delay_s=0.5, clock=clock, sleep=clock.sleep)
    medium.write_from(memoryview(bytes(2000)), 0)
    assert clock.now == pytest.approx(102.5)
    read(medium, 1000, 0)
    assert clock.now == pytest.approx(104.0)
    medium.sync()
    assert clock.now == pytest.approx(104.5)


def test_idle_time_is_not_saved_up():
    clock = Clock()
    limit = Limit(Rate.steady(1000), clock)
    clock.now += 50
    assert limit.book(1000) == pytest.approx(151.0)


def test_media_of_a_volume_share_the_total(tmp_path):
    """Two threads, two files, one limit: the schedule is one after the other, whoever comes first."""
    volume = ThrottledVolume(
        Directory(tmp_path, create=False, write=True), total=Rate.steady(64 * MIB), stream_bytes_per_s=1 << 40
    )
    media = [volume.create(f"slot-00{i}.pcc", MIB) for i in range(2)]
    ends = []
    media[0]._sleep = media[1]._sleep = ends.append  # what is slept is what is seen
    threads = [threading.Thread(target=m.write_from, args=(memoryview(bytes(MIB)), 0)) for m in media]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    booked = volume._total[0].book(0) - volume._total[0]._began
    assert booked >= 2 / 64
    for medium in media:
        medium.close()
