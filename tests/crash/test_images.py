"""What the simulated disk may leave after a crash: each rule of `pccheck.testing.disk`, by small examples."""

from __future__ import annotations

import pytest

from pccheck.errors import CapacityError, MediumError
from pccheck.format import PAGE, SECTOR
from pccheck.testing.disk import SimulatedDisk
from pccheck.testing.images import Enumerator, describe
from pccheck.testing.simulated import SimulatedVolume


class WholeView:
    """Recovery that looks at everything."""

    def extents(self, name: str, head: bytes, size: int):
        return ((0, size),)

    def identity(self, name: str, head: bytes) -> bytes:
        return head


def volume_with(name: str = "f", size: int = 2 * PAGE):
    volume = SimulatedVolume(SimulatedDisk())
    medium = volume.create(name, size)
    medium.sync()
    volume.sync_names()
    return volume, medium


def contents(volume, name="f", **options) -> set[bytes | None]:
    """Give what a file may hold after a power loss; None where its name may be gone."""
    found: set[bytes | None] = set()
    for _, image in Enumerator(WholeView(), **options).disks(volume.disk):
        inode = image.names.get(name)
        if inode is None:
            found.add(None)
        else:
            file = image.files[inode]
            found.add(b"".join(file.sectors.get(i, bytes(SECTOR)) for i in range(file.size // SECTOR)))
    return found


def write(medium, data: bytes, offset: int) -> None:
    medium.write_from(memoryview(data), offset)


def test_an_unsynced_write_of_one_sector_is_there_or_not():
    volume, medium = volume_with(size=SECTOR)
    write(medium, b"a" * SECTOR, 0)
    assert contents(volume) == {bytes(SECTOR), b"a" * SECTOR}
    medium.sync()
    assert contents(volume) == {b"a" * SECTOR}


def test_a_page_is_torn_between_any_sectors_and_in_any_order():
    volume, medium = volume_with(size=PAGE)
    write(medium, b"a" * PAGE, 0)
    assert len(contents(volume)) == 2 ** (PAGE // SECTOR)


def test_a_sector_holds_one_of_its_versions():
    volume, medium = volume_with(size=SECTOR)
    write(medium, b"a" * 8, 0)
    write(medium, b"b" * 8, 8)
    assert {c[:16] for c in contents(volume)} == {bytes(16), b"a" * 8 + bytes(8), b"a" * 8 + b"b" * 8}


def test_beyond_the_limit_each_page_and_each_sector_is_lost_and_kept_once():
    volume, medium = volume_with(size=4 * PAGE)
    write(medium, b"a" * 4 * PAGE, 0)
    found = contents(volume, samples=10)
    a, zero = b"a" * PAGE, bytes(PAGE)
    for number in range(16):  # 2^32 by sectors, all 2^4 by pages
        assert b"".join(a if number >> i & 1 else zero for i in range(4)) in found
    for sector in range(4 * PAGE // SECTOR):
        at = sector * SECTOR
        assert b"a" * at + bytes(SECTOR) + b"a" * (4 * PAGE - at - SECTOR) in found
        assert bytes(at) + b"a" * SECTOR + bytes(4 * PAGE - at - SECTOR) in found
    assert len(found) < 250, "a sample, not all of 2^32"


def test_a_sync_covers_its_own_file_only():
    volume, medium = volume_with(size=SECTOR)
    other = volume.create("g", SECTOR)
    write(medium, b"a" * SECTOR, 0)
    other.sync()
    assert len(contents(volume)) == 2


def test_a_name_is_durable_once_its_folder_was_synced():
    volume, _ = volume_with()
    volume.create("g", SECTOR).sync()
    assert contents(volume, "g") == {None, bytes(SECTOR)}
    volume.sync_names("kept")
    assert None in contents(volume, "g")
    volume.sync_names()
    assert contents(volume, "g") == {bytes(SECTOR)}
    volume.link("g", "kept/g")
    volume.remove("g")
    assert contents(volume, "g") == {None, bytes(SECTOR)}
    assert contents(volume, "kept/g") == {None, bytes(SECTOR)}
    both_gone = [i for _, i in Enumerator(WholeView()).disks(volume.disk) if not {"g", "kept/g"} & i.names.keys()]
    assert both_gone, "two folders are independent"


def test_a_size_is_durable_once_the_file_was_synced():
    volume, _ = volume_with()
    medium = volume.create("g", SECTOR)
    volume.sync_names()
    assert contents(volume, "g") == {b"", bytes(SECTOR)}
    medium.sync()
    medium.allocate(2 * SECTOR)
    assert contents(volume, "g") == {bytes(SECTOR), bytes(2 * SECTOR)}


def test_process_death_loses_nothing_and_reopening_syncs_nothing():
    volume, medium = volume_with(size=SECTOR)
    write(medium, b"a" * SECTOR, 0)
    again = SimulatedVolume(SimulatedDisk.replay(volume.disk.log))
    data = bytearray(SECTOR)
    again.open("f").read_into(memoryview(data), 0)
    assert data == b"a" * SECTOR
    assert contents(again) == {bytes(SECTOR), b"a" * SECTOR}
    again.open("f").sync()
    assert contents(again) == {b"a" * SECTOR}


def test_a_mapped_store_may_reach_the_disk_by_itself_and_a_long_one_by_halves():
    volume = SimulatedVolume(SimulatedDisk())
    page = volume.check_page(create=True)
    page.sync()
    volume.sync_names()
    page.write(0, b"ab" * 8)
    assert {c[:16] for c in contents(volume, "CHECK")} == {bytes(16), b"ab" * 4 + bytes(8), b"ab" * 8}
    page.sync()
    assert page.compare_and_swap(4096, 0, 7)
    assert not page.compare_and_swap(4096, 0, 8)
    page.store(4104, 9)
    words = {(c[4096:4104], c[4104:4112]) for c in contents(volume, "CHECK")}
    seven, nine = (7).to_bytes(8, "little"), (9).to_bytes(8, "little")
    assert words == {(bytes(8), bytes(8)), (seven, bytes(8)), (seven, nine)}


def test_a_dropped_sync_is_recorded_and_does_nothing():
    disk = SimulatedDisk(classify=lambda info: info.kind, drop=lambda info, purpose: purpose == "file")
    volume = SimulatedVolume(disk)
    medium = volume.create("f", SECTOR)
    volume.sync_names()
    write(medium, b"a" * SECTOR, 0)
    medium.sync()
    assert [op.dropped for op in disk.log if op.purpose] == [False, True]
    assert b"" in contents(volume)


def test_what_was_lost_is_told():
    volume, medium = volume_with(size=PAGE)
    write(medium, b"a" * PAGE, 0)
    volume.create("g", SECTOR)
    texts = [describe(volume.disk, image) for _, image in Enumerator(WholeView()).disks(volume.disk)]
    assert ["nothing was lost"] in texts
    assert any("the name g is gone" in line for lines in texts for line in lines)
    assert any("f lost writes of sectors [0, 1, 2, 3, 4, 5, 6, 7]" in lines for lines in texts)


def test_the_volume_refuses_what_a_file_system_refuses():
    volume = SimulatedVolume(SimulatedDisk(capacity_bytes=10 * PAGE))
    medium = volume.create("f", 9 * PAGE)
    with pytest.raises(CapacityError):
        volume.create("g", 2 * PAGE)
    with pytest.raises(CapacityError):
        medium.allocate(11 * PAGE)
    with pytest.raises(MediumError, match="create"):
        volume.create("f", 0)
    with pytest.raises(MediumError, match="open"):
        volume.open("missing")
    with pytest.raises(MediumError, match="ends sooner"):
        medium.read_into(memoryview(bytearray(8)), 9 * PAGE)
    with pytest.raises(MediumError, match="not open for writing"):
        write(volume.open("f"), b"a", 0)
    other = SimulatedVolume(volume.disk)
    assert volume.lock()
    assert not other.lock()
    volume.close()
    assert other.lock()
    with pytest.raises(MediumError):
        volume.remove("f")


def test_slot_locks():
    volume, first = volume_with()
    second = volume.open("f")
    assert first.lock_shared()
    assert second.lock_shared()
    assert not first.lock_exclusive()
    second.close()
    assert first.lock_exclusive()
    first.unlock()
    assert volume.open("f").lock_exclusive()
