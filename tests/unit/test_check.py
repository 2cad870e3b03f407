"""CHECK as its writer sees it: the word moves forward only, and a stranger's hand is noticed."""

import pytest

from pccheck import errors, format
from pccheck.format import Abandoned, Record, SlotState
from pccheck.storage.directory import Directory
from pccheck.store.check import Check, mend_abandoned


def record(counter: int, slot: int = 0) -> Record:
    return Record(store_id=bytes(16), slot=slot, state=SlotState.SEALED, incarnation=1, counter=counter, step=counter)


@pytest.fixture
def page(tmp_path):
    volume = Directory(tmp_path, create=True, write=True)
    page = volume.check_page(create=True)
    page.store(format.INCARNATION_OFFSET, 1)
    yield page
    volume.close()


@pytest.fixture
def check(page):
    check = Check(page, "here", incarnation=1, word=0, abandoned=Abandoned(), mirrored=True)
    yield check
    check.close()


def test_the_word_moves_forward_only(check, page):
    assert check.move(record(5, slot=2))
    assert page.load(format.CHECK_ADDR_OFFSET) == page.load(format.PEER_ADDR_OFFSET) == (5 << 16 | 2)
    assert not check.move(record(4, slot=1))
    assert format.word_counter(page.load(format.CHECK_ADDR_OFFSET)) == 5
    assert check.move(record(6, slot=1))


@pytest.mark.parametrize("offset", [format.CHECK_ADDR_OFFSET, format.INCARNATION_OFFSET])
def test_a_strangers_hand_is_store_taken(check, page, offset):
    assert check.move(record(5))
    page.write(format.HOLDER_OFFSET, format.pack_holder("pid 42, on the moon"))
    page.store(offset, 99 << 16)
    for call in (lambda: check.move(record(6)), lambda: check.point_at(0), check.assert_mine):
        with pytest.raises(errors.StoreTaken, match="pid 42, on the moon"):
            call()
    assert page.load(offset) == 99 << 16


def test_a_full_64_bit_word_is_compared_and_swapped(check, page):
    """Defect D5 of the artifact: its swap was four bytes wide."""
    assert check.move(record(1 << 40, slot=7))
    page.store(format.CHECK_ADDR_OFFSET, (1 << 40 | 1 << 30) << 16 | 7)  # differs in the upper half only
    with pytest.raises(errors.StoreTaken):
        check.move(record((1 << 40) + 1))


def test_abandoned_ranges_are_in_both_copies_afterwards(check, page, monkeypatch):
    """One copy is always whole: a crash between the two writes leaves the older set, or already the newer one."""
    for low in (10, 20, 30, 40):
        check.abandon(check.abandoned.adding(low, low + 2))

    def copies():
        return tuple(format.unpack_abandoned(page.read(o, format.PAGE)) for o in format.ABANDONED_OFFSETS)

    assert copies()[0] == copies()[1] == check.abandoned
    assert check.abandoned.ranges == ((10, 12), (20, 22), (30, 32), (40, 42))
    assert 21 in check.abandoned
    assert 23 not in check.abandoned
    monkeypatch.setattr(page, "sync", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        check.abandon(check.abandoned.without(21))
    assert {c.ranges[1:3] for c in copies()} == {((20, 22), (30, 32)), ((20, 20), (22, 22))}


def test_a_crash_while_copies_are_mended_leaves_what_was_whole(check, page, monkeypatch):
    """A whole copy is never written over; where none was, one after the other becomes whole."""
    check.abandon(check.abandoned.adding(10, 12))
    known, (first, second) = check.abandoned, format.ABANDONED_OFFSETS
    synced = page.sync
    for damaged in ((first,), (second,), (first, second)):
        for offset in damaged:
            page.write(offset, b"?" * format.PAGE)
        monkeypatch.setattr(page, "sync", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mend_abandoned(page)
        copies = [format.unpack_abandoned(page.read(o, format.PAGE)) for o in (first, second)]
        known = known if len(damaged) == 1 else Abandoned()
        assert copies == [known, known if len(damaged) == 1 else None]
        monkeypatch.setattr(page, "sync", synced)
        assert mend_abandoned(page) == (known, False)
        assert page.read(first, format.PAGE) == page.read(second, format.PAGE) == format.pack_abandoned(known)


def test_closing_takes_the_holders_name_out_unless_it_is_anothers(page, tmp_path):
    page.write(format.HOLDER_OFFSET, format.pack_holder("me"))
    check = Check(page, "here", incarnation=2, word=0, abandoned=Abandoned(), mirrored=True)
    check.close()
    raw = (tmp_path / "CHECK").read_bytes()
    assert format.unpack_holder(raw[format.HOLDER_OFFSET : format.HOLDER_OFFSET + format.SECTOR]) == "me"
