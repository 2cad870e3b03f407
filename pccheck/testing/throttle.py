"""Storage with a rate of its own on any machine (beside the floors: imports floors 0 and 1 only).

Network storage gives each stream less than it gives all of them together; shared storage changes its rate over time.
Both decide whether several checkpoints in flight pay, and both can be had here on any disk:

    ThrottledVolume(Directory(...), total=Rate.steady(400 << 20), stream_bytes_per_s=100 << 20)
    ThrottledVolume(Directory(...), total=Rate(((200 << 20, 4.0), (900 << 20, 4.0))))

Accounting is by schedule, not by measuring: a transfer of n bytes ends when a device of that rate, which serves
transfers in the order of their calls, would have ended it, or when the real one does if that is later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from pccheck.storage.medium import Medium
from pccheck.storage.volume import CheckPage, Volume
from pccheck.testing.delayed_page import DelayedPage


@dataclass(frozen=True)
class Rate:
    """Bytes per second that change in turn, for ever.

    Args:
        phases: `(bytes per second, seconds)` of each phase, both above 0.
    """

    phases: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.phases or any(rate <= 0 or seconds <= 0 for rate, seconds in self.phases):
            raise ValueError(f"phases={self.phases} are not allowed: at least one, with rate and seconds above 0")

    @classmethod
    def steady(cls, bytes_per_s: float) -> Rate:
        """Give a rate that does not change."""
        return cls(((bytes_per_s, 1.0),))

    def end(self, start_s: float, count: float) -> float:
        """Give when a transfer of `count` bytes ends that begins at `start_s`, seconds since the first phase began."""
        period_s = sum(seconds for _, seconds in self.phases)
        period_bytes = sum(rate * seconds for rate, seconds in self.phases)
        periods = count // period_bytes
        count -= periods * period_bytes
        now = start_s + periods * period_s
        while True:
            within = now % period_s
            for rate, seconds in self.phases:
                if within < seconds:
                    room = rate * (seconds - within)
                    if count <= room:
                        return now + count / rate
                    count -= room
                    now += seconds - within
                    within = 0.0
                else:
                    within -= seconds


@final
class Limit:
    """A device that serves one transfer after the other at a rate. Thread-safe.

    Args:
        rate: its rate; the first phase begins now.
        clock: seconds, monotonic.
    """

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._began = clock()
        self._free_at = 0.0
        self._lock = threading.Lock()

    def book(self, count: int) -> float:
        """Take a transfer of `count` bytes into the schedule and give when it ends, on the clock."""
        with self._lock:
            start = max(self._free_at, self._clock() - self._began)
            self._free_at = self._rate.end(start, count)
            return self._began + self._free_at


@final
class ThrottledMedium:
    """A medium behind limits; it hides descriptor and mapping, so that every byte goes through them.

    Args:
        inner: where the bytes go.
        limits: each is booked for every read and write; the last to end counts.
        delay_s: added to every operation.
        clock, sleep: of the machine, or of a test.
    """

    def __init__(
        self,
        inner: Medium,
        *limits: Limit,
        delay_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inner, self.path = inner, inner.path
        self._limits = limits
        self._delay_s = delay_s
        self._clock, self._sleep = clock, sleep

    @property
    def alignment(self) -> int:
        """Always 1: there is no descriptor."""
        return 1

    def size(self) -> int:
        """Give the size in bytes."""
        return self.inner.size()

    def links(self) -> int:
        """Give how many names the file has."""
        return self.inner.links()

    def allocate(self, size: int) -> None:
        """Allocate after the delay."""
        self._wait(0)
        self.inner.allocate(size)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Read at the limited rate."""
        ends = self._book(buffer.nbytes)
        self.inner.read_into(buffer, offset)
        self._until(ends)

    def write_from(self, buffer: memoryview, offset: int) -> None:
        """Write at the limited rate."""
        ends = self._book(buffer.nbytes)
        self.inner.write_from(buffer, offset)
        self._until(ends)

    def sync(self) -> None:
        """Sync after the delay."""
        self._wait(0)
        self.inner.sync()

    def drop_cache(self) -> None:
        """Drop the cache."""
        self.inner.drop_cache()

    def fileno(self) -> int | None:
        """None."""
        return None

    def mapping(self) -> memoryview | None:
        """None."""
        return None

    def lock_shared(self) -> bool:
        """Lock for reading."""
        return self.inner.lock_shared()

    def lock_exclusive(self) -> bool:
        """Lock for writing."""
        return self.inner.lock_exclusive()

    def unlock(self) -> None:
        """Unlock."""
        self.inner.unlock()

    def close(self) -> None:
        """Close."""
        self.inner.close()

    def _book(self, count: int) -> float:
        return max((limit.book(count) for limit in self._limits), default=self._clock()) + self._delay_s

    def _until(self, ends: float) -> None:
        left = ends - self._clock()
        if left > 0:
            self._sleep(left)

    def _wait(self, count: int) -> None:
        if self._delay_s:
            self._until(self._clock() + self._delay_s)


def _inner(medium: Medium) -> Medium:
    return medium.inner if isinstance(medium, ThrottledMedium) else medium


@final
class ThrottledVolume:
    """A volume whose media share one limit and have one each; CHECK and names are delayed only.

    Args:
        inner: where the bytes go.
        total: rate of all media together; None = not limited.
        stream_bytes_per_s: rate of each medium by itself; None = not limited.
        delay_s: added to every operation on media, on names and on CHECK's sync.
    """

    def __init__(
        self,
        inner: Volume,
        *,
        total: Rate | None = None,
        stream_bytes_per_s: float | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.inner, self.path = inner, inner.path
        self._total = (Limit(total),) if total else ()
        self._stream_bytes_per_s = stream_bytes_per_s
        self._delay_s = delay_s

    def names(self, folder: str = "") -> list[str]:
        """List."""
        return self.inner.names(folder)

    def create(self, name: str, size: int) -> Medium:
        """Create a throttled medium."""
        time.sleep(self._delay_s)
        return self._throttled(self.inner.create(name, size))

    def open(self, name: str, *, write: bool = False) -> Medium:
        """Open a throttled medium."""
        return self._throttled(self.inner.open(name, write=write))

    def link(self, name: str, new_name: str) -> None:
        """Link after the delay."""
        time.sleep(self._delay_s)
        self.inner.link(name, new_name)

    def link_out(self, name: str, medium: Medium, path: str) -> None:
        """Link outside of the store after the delay."""
        time.sleep(self._delay_s)
        self.inner.link_out(name, _inner(medium), path)

    def copy_out(self, name: str, medium: Medium, path: str) -> None:
        """Copy to outside of the store after the delay, at the speed of the inner volume."""
        time.sleep(self._delay_s)
        self.inner.copy_out(name, _inner(medium), path)

    def sync_out(self, path: str) -> None:
        """Sync names outside of the store after the delay."""
        time.sleep(self._delay_s)
        self.inner.sync_out(path)

    def remove(self, name: str) -> None:
        """Remove after the delay."""
        time.sleep(self._delay_s)
        self.inner.remove(name)

    def is_named(self, name: str, medium: Medium) -> bool:
        """Tell whether a name leads to a medium."""
        return self.inner.is_named(name, _inner(medium))

    def sync_names(self, folder: str = "") -> None:
        """Sync names after the delay."""
        time.sleep(self._delay_s)
        self.inner.sync_names(folder)

    def check_page(self, *, create: bool) -> CheckPage:
        """Open CHECK, whose sync is delayed."""
        page = self.inner.check_page(create=create)
        return DelayedPage(page, self._delay_s) if self._delay_s else page

    def lock(self) -> bool:
        """Lock."""
        return self.inner.lock()

    def unlock(self) -> None:
        """Unlock."""
        self.inner.unlock()

    def free_bytes(self) -> int:
        """Give the free bytes."""
        return self.inner.free_bytes()

    def close(self) -> None:
        """Close."""
        self.inner.close()

    def _throttled(self, medium: Medium) -> Medium:
        limits = self._total
        if self._stream_bytes_per_s:
            limits = (*limits, Limit(Rate.steady(self._stream_bytes_per_s)))
        return ThrottledMedium(medium, *limits, delay_s=self._delay_s)
