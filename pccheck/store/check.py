"""CHECK as its one writer sees it: the word, the fence, abandoned branches (floor 2: imports floors 0 and 1).

Nothing here waits but `sync`, `abandon` and `close`: moving the word is memory, so it may be done under a lock.
"""

from __future__ import annotations

import os

from pccheck import format
from pccheck.errors import ContentError, ForkedError, MediumError, StoreTaken
from pccheck.format import Abandoned, Record
from pccheck.storage.volume import CheckPage


def write_abandoned(page: CheckPage, abandoned: Abandoned) -> None:
    """Write what roll-backs left behind, durably.

    One copy after the other, the older one first: a crash leaves at least one of them whole, and damage to one of
    them later does not undo a roll-back.
    """
    packed = format.pack_abandoned(abandoned)
    first = abandoned.sequence % 2
    for copy in (first, 1 - first):
        page.write(format.ABANDONED_OFFSETS[copy], packed)
        page.sync()


def mend_abandoned(page: CheckPage) -> tuple[Abandoned, bool]:
    """Give what roll-backs left behind; a damaged copy of it is written anew, durably. Tell whether both were damaged.

    A copy that is whole is not touched, and damaged ones follow one after the other: a crash leaves what was whole.
    """
    copies = [page.read(offset, format.PAGE) for offset in format.ABANDONED_OFFSETS]
    abandoned = format.newest_abandoned((copies[0], copies[1]))
    damaged = [
        offset
        for offset, copy in zip(format.ABANDONED_OFFSETS, copies, strict=True)
        if copy.strip(b"\0") and format.unpack_abandoned(copy) is None
    ]
    for offset in damaged:
        page.write(offset, format.pack_abandoned(abandoned))
        page.sync()
    return abandoned, len(damaged) == len(copies)


def believed(number: int) -> int:
    """Give a counter or an incarnation as CHECK has it; 0 where a flipped high bit would use up all that there are."""
    return number if number < format.MAX_COUNTER // 2 else 0


class Check:
    """The mapped CHECK of one store. Not thread-safe: the store's lock guards it.

    Args:
        page: the mapped file; owned and closed.
        path: the store, for messages.
        incarnation: of this opening; another one in the page means that somebody else took the store.
        word: what this process put there.
        abandoned: what roll-backs left behind.
        mirrored: whether PEER_ADDR follows the word at once (one rank: its own publish is the agreement).
    """

    def __init__(
        self, page: CheckPage, path: str, *, incarnation: int, word: int, abandoned: Abandoned, mirrored: bool
    ) -> None:
        self._page, self._path, self._mirrored = page, path, mirrored
        self.incarnation, self.word, self.abandoned = incarnation, word, abandoned
        self._pid = os.getpid()

    def assert_mine(self) -> None:
        """Raise ForkedError in a forked child, StoreTaken when somebody else opened the store.

        This fence works where locks do not: whoever opens a store for writing sets an incarnation of its own.
        """
        if os.getpid() != self._pid:
            raise ForkedError(f"{self._path} belongs to process {self._pid}; open another store in this child")
        if self._page.load(format.INCARNATION_OFFSET) != self.incarnation:
            raise self.taken()
        if self._page.load(format.CHECK_ADDR_OFFSET) != self.word:
            raise self.taken()

    def taken(self) -> StoreTaken:
        """Give the error that names who took the store."""
        holder = format.unpack_holder(self._page.read(format.HOLDER_OFFSET, format.SECTOR))
        return StoreTaken(self._path, holder or "another process", "This process lost the store: stop it.")

    def use_counter(self, counter: int) -> None:
        """Note that a counter is used: it survives this process in the mapped page, and power loss once synced."""
        self._page.store(format.LAST_COUNTER_OFFSET, counter)

    def move(self, record: Record) -> bool:
        """Move the word to a sealed checkpoint unless it names a newer one; tell whether it moved.

        Counters are unique and only grow, so the compare-and-swap has no ABA. A word that this process did not put
        there raises StoreTaken.
        """
        while True:
            self.assert_mine()
            if format.word_counter(self.word) > record.counter:
                return False
            if self._page.compare_and_swap(format.CHECK_ADDR_OFFSET, self.word, record.word):
                self._took(record.word)
                return True

    def point_at(self, word: int) -> None:
        """Set the word back (a restore, a deletion); not durable before `sync`."""
        self.assert_mine()
        self._page.store(format.CHECK_ADDR_OFFSET, word)
        self._took(word)

    def point_peer_at(self, word: int) -> None:
        """Set PEER_ADDR: what all ranks hold; not durable before `sync`."""
        self.assert_mine()
        self._page.store(format.PEER_ADDR_OFFSET, word)

    def _took(self, word: int) -> None:
        self.word = word
        if self._mirrored:
            self._page.store(format.PEER_ADDR_OFFSET, word)

    def abandon(self, abandoned: Abandoned) -> None:
        """Set what is left behind, durably."""
        write_abandoned(self._page, abandoned)
        self.abandoned = abandoned

    def sync(self) -> None:
        """Make the page durable."""
        self._page.sync()

    def links(self) -> int:
        """Give how many names the file has."""
        return self._page.links()

    def close(self) -> None:
        """Take this holder's name out, if it is still this process's, and close."""
        try:
            self.assert_mine()
            self._page.write(format.HOLDER_OFFSET, bytes(format.SECTOR))
        except (ForkedError, StoreTaken):
            pass  # the page is somebody else's now
        except (ContentError, MediumError):
            pass  # the name is for messages only: the lock goes with the descriptor
        finally:
            self._page.close()
