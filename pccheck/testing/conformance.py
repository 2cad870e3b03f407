"""Checks of backends: whether a Medium, a Volume or a Pipeline keeps its promises (beside the floors: floors 0 to 2).

Plain functions that need no test framework; each raises AssertionError that says what was promised.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from pccheck.errors import CapacityError, ClosedError, FormatError, MediumError, PccheckError
from pccheck.format import CHECK_ADDR_OFFSET, CHECK_BYTES, CHECK_NAME, PAGE, PEER_ADDR_OFFSET
from pccheck.storage.medium import Medium
from pccheck.storage.volume import CheckPage, SideFiles, Volume
from pccheck.testing.fillers import check_fillers
from pccheck.testing.pipelines import check_pipeline
from pccheck.testing.promises import check, raises, read

MIB = 1 << 20
__all__ = ["check_fillers", "check_medium", "check_pipeline", "check_volume"]
TOO_MUCH = 1 << 56  # bytes that no storage has


def check_medium(make: Callable[[int], Medium], *, grows: bool = True) -> None:
    """Check a kind of medium.

    Args:
        make: gives a new medium of at least this many bytes, all zeros; closed by the checks.
        grows: whether `allocate` can make it larger.
    """
    _check_bytes(make)
    _check_threads(make)
    _check_mapping(make, grows)
    _check_space(make, grows)
    _check_descriptor(make)
    medium = make(PAGE)
    check(medium.lock_exclusive() and medium.lock_exclusive(), "the lock of a file that nobody else has is given")
    medium.unlock()
    check(medium.lock_shared(), "an unlocked file can be locked for reading")
    medium.close()
    raises(ClosedError, medium.size, "size() of a closed medium")
    raises(ClosedError, lambda: read(medium, 1, 0), "a read of a closed medium")
    raises(ClosedError, lambda: medium.write_from(memoryview(b"x"), 0), "a write to a closed medium")
    raises(ClosedError, medium.sync, "a sync of a closed medium")


def _check_bytes(make: Callable[[int], Medium]) -> None:
    size = 3 * MIB
    medium, rng, model = make(size), random.Random(1), bytearray(size)
    check(medium.size() >= size, "a medium has at least the size it was made with")
    check(medium.links() == 1, "a new medium has one name")
    check(read(medium, size, 0) == bytes(size), "a new medium is all zeros")
    lengths = (0, 1, 511, 512, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, MIB, MIB + 77)
    for _ in range(60):
        length = rng.choice(lengths)
        offset = rng.choice((0, PAGE, 64 * 1024, rng.randrange(size - length), size - length))
        lead = rng.choice((0, 1, 64))  # memory that begins anywhere
        data = memoryview(bytes(lead) + rng.randbytes(length))[lead:]
        medium.write_from(data, offset)
        model[offset : offset + length] = data
        at = rng.randrange(size - length + 1)
        check(read(medium, length, at) == model[at : at + length], f"{length} bytes at {at} are what was written")
    medium.sync()
    medium.drop_cache()
    check(read(medium, size, 0) == model, "bytes are the same after sync and drop_cache")
    check(medium.size() >= size, "writes inside a medium do not change its size")
    raises(MediumError, lambda: read(medium, 2, medium.size() - 1), "a read beyond the end")
    raises(MediumError, lambda: read(medium, PAGE, medium.size() + PAGE), "a read behind the end")
    medium.close()


def _check_threads(make: Callable[[int], Medium]) -> None:
    """Parts of a page, and pages, written by several threads at once."""
    part, parts = 1000, 64
    medium = make(part * parts)
    errors: list[BaseException] = []

    def write(first: int) -> None:
        try:
            for index in range(first, parts, 4):
                medium.write_from(memoryview(bytes([index]) * part), index * part)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    check(not errors, f"writes of different ranges may run at once ({errors[:1]})")
    want = b"".join(bytes([i]) * part for i in range(parts))
    check(read(medium, part * parts, 0) == want, "writes of different ranges do not lose each other")
    medium.close()


def _check_mapping(make: Callable[[int], Medium], grows: bool) -> None:
    medium = make(4 * PAGE)
    mapping = medium.mapping()
    if mapping is not None:
        check(not mapping.readonly and mapping.nbytes >= 4 * PAGE, "a mapping is writable and of the medium's size")
        mapping[PAGE : PAGE + 5] = b"store"
        check(read(medium, 5, PAGE) == b"store", "a store to the mapping is a write")
        medium.write_from(memoryview(b"write"), 2 * PAGE)
        check(bytes(mapping[2 * PAGE : 2 * PAGE + 5]) == b"write", "a write is seen in the mapping")
        if grows:
            medium.allocate(64 * PAGE)
            larger = medium.mapping()
            check(larger is not None and larger.nbytes >= 64 * PAGE, "after allocate the mapping is the larger one")
            mapping[:5] = b"older"
            check(larger is not None and bytes(larger[:5]) == b"older", "the older mapping stays valid")
        medium.sync()
        medium.close()
        check(bytes(mapping[PAGE : PAGE + 5]) == b"store", "views of the mapping outlive close()")
    else:
        medium.close()


def _check_space(make: Callable[[int], Medium], grows: bool) -> None:
    medium = make(PAGE)
    medium.write_from(memoryview(b"stays"), 0)
    size = medium.size()
    raises(CapacityError, lambda: medium.allocate(TOO_MUCH), "an allocation of what nobody has")
    check(medium.size() == size and read(medium, 5, 0) == b"stays", "a failed allocation changes nothing")
    medium.allocate(PAGE // 2)
    check(medium.size() == size, "allocate never makes a file smaller")
    if grows:
        medium.allocate(MIB)
        check(medium.size() >= MIB, "allocate makes the file as large as asked for")
        check(read(medium, MIB, 0) == b"stays" + bytes(MIB - 5), "grown bytes are zeros, old ones stay")
    medium.close()


def _check_descriptor(make: Callable[[int], Medium]) -> None:
    medium = make(PAGE)
    check(medium.alignment in (1, PAGE), "the alignment is 1 or 4096")
    fd = medium.fileno()
    check(fd is None or fd >= 0, "fileno() is a descriptor or None")
    medium.close()


def check_volume(make: Callable[[], Volume], *, links: bool = True) -> None:
    """Check a kind of volume.

    Args:
        make: gives a new, empty volume, opened for writing; closed by the checks.
        links: whether a linked file is the same file, not a copy.
    """
    for part in (_check_names, _check_check_page, _check_lock, _check_side_files):
        volume = make()
        part(volume)
        volume.close()
        raises(ClosedError, volume.names, "names() of a closed volume")
    volume = make()
    _check_links(volume, links)
    volume.close()


def _check_side_files(volume: Volume) -> None:
    """Check what a volume need not offer."""
    if not isinstance(volume, SideFiles):
        return
    check(volume.read_side("note.json", 10) is None, "a side file that is not there is None")
    volume.replace_side("note.json", b"first")
    volume.replace_side("note.json", b"second, and longer")
    check(volume.read_side("note.json", 6) == b"second", "a side file is read as far as the limit")
    check(volume.read_side("note.json", PAGE) == b"second, and longer", "a side file is replaced whole")
    check(volume.names() == ["note.json"], "replacing a side file leaves no other name")


def _check_names(volume: Volume) -> None:
    check(volume.names() == [] and volume.names("kept") == [], "a new volume is empty, a missing folder too")
    volume.sync_names("kept")
    volume.remove("slot-000.pcc")
    raises(MediumError, lambda: volume.open("slot-000.pcc"), "opening a file that is not there")
    medium = volume.create("slot-000.pcc", 2 * PAGE)
    check(read(medium, 2 * PAGE, 0) == bytes(2 * PAGE), "a created file is all zeros")
    medium.write_from(memoryview(b"first"), 0)
    raises(MediumError, lambda: volume.create("slot-000.pcc", PAGE), "creating a name that is taken")
    check(read(medium, 5, 0) == b"first", "a refused create leaves the file that is there")
    raises(CapacityError, lambda: volume.create("slot-001.pcc", TOO_MUCH), "creating what there is no room for")
    check(volume.names() == ["slot-000.pcc"], "a failed create leaves no name behind")
    check(volume.free_bytes() >= 0, "free_bytes() is a number of bytes")
    volume.sync_names()
    reader = volume.open("slot-000.pcc")
    check(read(reader, 5, 0) == b"first", "a second opener reads what was written")
    raises(
        PccheckError, lambda: reader.write_from(memoryview(bytes(PAGE)), 0), "a write to a medium opened for reading"
    )
    check(reader.mapping() is None, "a medium opened for reading gives no writable mapping")
    check(medium.lock_exclusive() and not reader.lock_shared(), "a slot that is locked keeps readers from locking it")
    medium.unlock()
    check(reader.lock_shared() and not medium.lock_exclusive(), "a reader's lock keeps the writer from locking it")
    reader.close()
    check(medium.lock_exclusive(), "closing gives the lock back")
    volume.remove("slot-000.pcc")
    check(medium.links() == 0 and read(medium, 5, 0) == b"first", "a removed file lives on while it is open")
    medium.close()
    for name in ("", "/etc/passwd", "../x", "a/../x", "a/b/c", ".", "a\0b", "kept/"):
        raises((ValueError, PccheckError), lambda n=name: volume.open(n), f"{name!r} as a name")  # type: ignore[misc]


def _check_links(volume: Volume, links: bool) -> None:
    medium = volume.create("slot-000.pcc", PAGE)
    medium.write_from(memoryview(b"pinned"), 0)
    volume.link("slot-000.pcc", "kept/1-c1.pcc")
    check(volume.names("kept") == ["1-c1.pcc"], "a link is a name in its folder")
    check(volume.names() == ["slot-000.pcc"], "names() gives files, not folders")
    check(medium.links() == (2 if links else 1), "a link counts as a name")
    volume.link("slot-000.pcc", "kept/1-c1.pcc")
    check(medium.links() == (2 if links else 1), "linking again to the same name changes nothing")
    volume.sync_names("kept")
    volume.sync_names()
    raises(
        (MediumError, FormatError), lambda: volume.link("slot-009.pcc", "kept/2-c2.pcc"), "linking what is not there"
    )
    volume.remove("slot-000.pcc")
    medium.close()
    kept = volume.open("kept/1-c1.pcc", write=True)
    check(read(kept, 6, 0) == b"pinned", "a linked file outlives its first name")
    kept.close()
    volume.link("kept/1-c1.pcc", "slot-000.pcc")
    volume.remove("kept/1-c1.pcc")
    check(volume.names("kept") == [] and volume.names() == ["slot-000.pcc"], "links lead out of the folder as well")


def _check_check_page(volume: Volume) -> None:
    raises(MediumError, lambda: volume.check_page(create=False), "opening a CHECK that is not there")
    page = volume.check_page(create=True)
    check(page.read(0, CHECK_BYTES) == bytes(CHECK_BYTES), "a new CHECK is all zeros")
    check(CHECK_NAME in volume.names(), "CHECK is a file of the store")
    check(page.links() == 1, "CHECK has one name")
    check(page.load(CHECK_ADDR_OFFSET) == 0, "a new word is 0")
    largest = (1 << 64) - 1
    page.store(CHECK_ADDR_OFFSET, largest)
    check(page.load(CHECK_ADDR_OFFSET) == largest, "a word has 64 bits")
    check(page.read(CHECK_ADDR_OFFSET, 8) == b"\xff" * 8, "a word is 8 bytes of the page")
    check(not page.compare_and_swap(CHECK_ADDR_OFFSET, 1, 2), "a swap that expects something else is refused")
    check(page.load(CHECK_ADDR_OFFSET) == largest, "a refused swap changes nothing")
    check(page.compare_and_swap(CHECK_ADDR_OFFSET, largest, 0x0102030405060708), "an expected word is swapped")
    check(page.read(CHECK_ADDR_OFFSET, 8) == bytes(range(8, 0, -1)), "words are little-endian")
    page.write(0, b"superblock")
    page.sync()
    other = volume.check_page(create=True)
    check(other.read(0, 10) == b"superblock", "a CHECK that is there is left as it is")
    other.store(PEER_ADDR_OFFSET, 7)
    check(page.load(PEER_ADDR_OFFSET) == 7, "two pages of one CHECK see each other's stores")
    for bad in (lambda: page.load(4), lambda: page.load(CHECK_BYTES), lambda: page.store(CHECK_ADDR_OFFSET, 1 << 64)):
        raises((ValueError, OverflowError), bad, "a place or number that is no word")
    raises((ValueError, OverflowError), lambda: page.write(CHECK_BYTES - 1, b"ab"), "a write beyond the page")
    _check_swaps((page, other))
    volume.remove(CHECK_NAME)
    check(page.links() == 0, "a removed CHECK has no name")
    page.close()
    other.close()
    raises(ClosedError, lambda: page.load(CHECK_ADDR_OFFSET), "a load from a closed page")


def _check_swaps(pages: tuple[CheckPage, CheckPage]) -> None:
    """Two threads count together, each through its own page: no increment may be lost."""
    each = 2000
    pages[0].store(CHECK_ADDR_OFFSET, 0)

    def count(page: CheckPage) -> None:
        for _ in range(each):
            while True:
                word = page.load(CHECK_ADDR_OFFSET)
                if page.compare_and_swap(CHECK_ADDR_OFFSET, word, word + 1):
                    break

    threads = [threading.Thread(target=count, args=(p,)) for p in pages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    check(pages[0].load(CHECK_ADDR_OFFSET) == 2 * each, "no swap is lost between threads")


def _check_lock(volume: Volume) -> None:
    check(volume.lock(), "the lock of a store that nobody writes to is given")
    check(volume.lock(), "a lock that is held stays held")
    volume.unlock()
    volume.unlock()
    check(volume.lock(), "a lock that was given back can be taken again")
