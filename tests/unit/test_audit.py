"""The audit: facts about stores, never a change to them."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pccheck
from pccheck import format, judging
from pccheck.audit import audit
from pccheck.errors import UsageError
from pccheck.format import Abandoned, SlotState
from pccheck.reports import StoreReport, exit_code, world_reports
from pccheck.testing.slotfiles import check_file, slot_file

STATE = {"model": {"w": np.arange(3000.0), "b": np.ones(5)}, "step": 3}


def put(folder: Path, name: str, data: bytes | bytearray) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return folder / name


def flipped(data: bytes | bytearray, *places: int) -> bytearray:
    changed = bytearray(data)
    for place in places:
        changed[place] ^= 1
    return changed


def one(path: Path, **options: Any) -> StoreReport:
    (report,) = audit(path, **options)
    return report


def fingerprint(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        str(p): (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest())
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def test_every_state_has_its_name(tmp_path: Path) -> None:
    put(tmp_path, "CHECK", check_file(word=format.pack_word(5, 1), abandoned=Abandoned().adding(3, 4), holder="me"))
    put(tmp_path, "slot-000.pcc", slot_file(STATE, counter=2, slot=0, metadata={"loss": 1}))
    put(tmp_path, "slot-001.pcc", slot_file(STATE, counter=5, slot=1, step=50, incarnation=2, base=2))
    put(tmp_path, "slot-002.pcc", slot_file(STATE, counter=6, slot=2, state=SlotState.FILLING))
    put(tmp_path, "slot-003.pcc", slot_file(STATE, counter=1, slot=3, state=SlotState.WITHDRAWN))
    put(tmp_path, "slot-004.pcc", bytes(70_000))
    put(tmp_path, "slot-005.pcc", slot_file(STATE, counter=4, slot=5))
    put(tmp_path, "kept/7-c1.pcc", slot_file(STATE, counter=1, slot=3, step=7))
    report = one(tmp_path)
    assert {slot.name: slot.state for slot in report.slots} == {
        "slot-000.pcc": "sealed",
        "slot-001.pcc": "published",
        "slot-002.pcc": "filling",
        "slot-003.pcc": "withdrawn",
        "slot-004.pcc": "free",
        "slot-005.pcc": "abandoned",
        "kept/7-c1.pcc": "kept",
    }
    assert [slot.verdict for slot in report.slots] == ["ok", "ok", "-", "-", "-", "ok", "ok"]
    published = report.published
    assert published is not None
    assert (published.step, published.counter, published.incarnation, published.base) == (50, 5, 2, 2)
    assert published.leaves == 2
    assert report.slots[0].metadata == {"loss": 1}
    assert report.check is not None
    assert report.check.holder == "me"
    assert report.check.abandoned.ranges == ((3, 4),)
    assert (report.valid, report.damaged, exit_code([report])) == (4, 0, 0)
    assert not any(slot.verified for slot in report.slots)
    assert all(slot.verified for slot in one(tmp_path, verify=True).slots if slot.verdict == "ok")


def test_damage_is_found_only_where_it_is(tmp_path: Path) -> None:
    good, bad = slot_file(STATE, counter=1, slot=0), slot_file(STATE, counter=2, slot=1)
    put(tmp_path, "CHECK", check_file())
    put(tmp_path, "slot-000.pcc", good)
    put(tmp_path, "slot-001.pcc", flipped(bad, 65536 + 9, 65536 * 6 + 9))
    assert exit_code([one(tmp_path)]) == 0
    report = one(tmp_path, verify=True)
    assert exit_code([report]) == 1
    assert (report.valid, report.damaged) == (1, 1)
    assert [(d.offset, d.length, d.leaves) for d in report.slots[1].damages] == [
        (65536, 4096, ("model/w",)),
        (65536 * 6, 4096, ("model/w", "model/b")),
    ]


@pytest.mark.parametrize("verify", [False, True])
def test_a_sealed_record_with_a_bad_manifest_is_damage(tmp_path: Path, verify: bool) -> None:
    data = slot_file(STATE)
    record = format.unpack_record(bytes(data[:512]))
    assert record is not None
    put(tmp_path, "slot-000.pcc", flipped(data, record.manifest_offset + 5))
    report = one(tmp_path, verify=verify)
    assert (report.valid, report.damaged, exit_code([report])) == (0, 1, 1)
    (damage,) = report.slots[0].damages
    assert (damage.offset, damage.length) == (record.manifest_offset, record.manifest_bytes)


def test_unreadable_records_and_misplaced_files_are_damage(tmp_path: Path) -> None:
    put(tmp_path, "CHECK", check_file())
    put(tmp_path, "slot-000.pcc", slot_file(STATE))
    put(tmp_path, "slot-001.pcc", flipped(slot_file(STATE, slot=1), 60))
    put(tmp_path, "slot-002.pcc", b"something else")
    put(tmp_path, "slot-003.pcc", slot_file(STATE, slot=3, store_id=b"0123456789abcdef"))
    put(tmp_path, "slot-004.pcc", slot_file(STATE, slot=7))
    (tmp_path / "slot-005.pcc").symlink_to(tmp_path / "slot-000.pcc")
    report = one(tmp_path)
    assert [s.verdict for s in report.slots] == ["ok", *["damaged"] * 4]
    assert [s.state for s in report.slots] == ["sealed", *["unreadable"] * 4]
    reasons = [slot.damages[0].reason for slot in report.slots[1:]]
    for reason, part in zip(reasons, ("checksum", "inside its record", "another store", "slot 7"), strict=True):
        assert part in reason
    assert exit_code([report]) == 1


@pytest.mark.parametrize(
    ("data", "damaged", "text"),
    [
        (None, False, "missing"),
        (b"", False, "never written"),
        (bytes(65536), False, "never written"),
        (flipped(check_file(), 3), True, "magic"),
        (flipped(check_file(), 20), True, "checksum"),
        (bytes(check_file())[:8192] + b"PCCABAND" + b"\xff" * 4088 + b"x" * 4096, True, "abandoned"),
        (bytes(check_file())[:8192] + b"PCCABAND" + b"\xff" * 4088, False, None),
    ],
    ids=["missing", "empty", "zeros", "magic", "checksum", "both copies", "one copy torn"],
)
def test_check_is_judged_apart(tmp_path: Path, data: bytes | None, damaged: bool, text: str | None) -> None:
    put(tmp_path, "slot-000.pcc", slot_file(STATE))
    if data is not None:
        put(tmp_path, "CHECK", data)
    report = one(tmp_path)
    assert report.check is not None
    assert report.check.damaged is damaged
    assert text is None or text in str(report.check.problem)
    assert (text is None) == (report.check.problem is None)
    assert (report.valid, exit_code([report])) == (1, int(damaged))


def test_what_a_crash_leaves_is_no_damage(tmp_path: Path) -> None:
    """Empty and short slot files, records of what was being filled, a half copy."""
    put(tmp_path, "CHECK", check_file(word=format.pack_word(8, 3)))
    put(tmp_path, "slot-000.pcc", b"")
    put(tmp_path, "slot-001.pcc", bytes(100))
    put(tmp_path, "slot-002.pcc", slot_file(STATE, counter=9, slot=2, state=SlotState.FILLING))
    put(tmp_path, "slot-003.pcc", slot_file(STATE, counter=8, slot=3))
    put(tmp_path, "kept/.7-c1.pcc.half", b"half")
    report = one(tmp_path, verify=True)
    assert (report.valid, report.damaged, exit_code([report])) == (1, 0, 0)
    assert report.published is not None
    assert report.published.counter == 8


@pytest.mark.parametrize("slot", [0, 2, 7])
def test_a_word_that_names_none_is_damage(tmp_path: Path, slot: int) -> None:
    """No crash leaves that: the checkpoint that was published is gone (an empty slot, another one, no file)."""
    put(tmp_path, "CHECK", check_file(word=format.pack_word(9, slot)))
    put(tmp_path, "slot-000.pcc", b"")
    put(tmp_path, "slot-002.pcc", slot_file(STATE, counter=8, slot=2))
    report = one(tmp_path)
    assert (report.damaged, exit_code([report])) == (1, 1)
    assert [s.name for s in report.slots if s.verdict == "damaged"] == [format.slot_name(slot)]


def test_nothing_valid_is_exit_1(tmp_path: Path) -> None:
    put(tmp_path, "CHECK", check_file())
    assert exit_code(audit(tmp_path)) == 1
    put(tmp_path, "slot-000.pcc", slot_file(STATE, state=SlotState.FILLING))
    assert exit_code(audit(tmp_path)) == 1


def test_ranks_have_a_report_each(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        put(tmp_path, f"rank-{rank:05d}/slot-000.pcc", slot_file(STATE, rank=rank, world=3))
    put(tmp_path, "rank-00012/slot-000.pcc", slot_file(STATE, rank=12, world=13, counter=9))
    reports = audit(tmp_path)
    assert [Path(r.path).name for r in reports] == ["rank-00000", "rank-00001", "rank-00002", "rank-00012"]
    assert [(r.rank, r.slots[0].rank) for r in reports] == [(0, 0), (1, 1), (2, 2), (12, 12)]
    old, whole = world_reports(reports)
    assert (old.world, old.counter, old.state, old.missing) == (13, 9, "incomplete", tuple(range(12)))
    assert (whole.world, whole.counter, whole.state, whole.missing) == (3, 1, "complete", ())
    assert exit_code(reports) == 0
    put(tmp_path, "rank-00001/slot-000.pcc", bytes(70_000))
    assert exit_code(audit(tmp_path)) == 1


def test_a_checkpoint_counts_only_if_all_ranks_hold_it(tmp_path: Path) -> None:
    for rank, counters in enumerate([(5, 7), (5, 6)]):
        for slot, counter in enumerate(counters):
            data = slot_file(STATE, rank=rank, world=2, counter=counter, slot=slot, step=counter)
            put(tmp_path, f"rank-{rank:05d}/slot-{slot:03d}.pcc", data)
    reports = audit(tmp_path)
    assert [(w.counter, w.state, w.missing) for w in world_reports(reports)] == [
        (7, "incomplete", (1,)),
        (6, "incomplete", (0,)),
        (5, "complete", ()),
    ]
    assert exit_code(reports) == 0, "a crash in the middle of a commit is no damage"
    put(tmp_path, "rank-00001/slot-000.pcc", flipped(slot_file(STATE, rank=1, world=2, counter=5, step=5), 65536))
    reports = audit(tmp_path, verify=True)
    assert [(w.counter, w.state, w.damaged) for w in world_reports(reports)][2] == (5, "damaged", (1,))
    assert exit_code(reports) == 1
    put(tmp_path, "rank-00001/slot-000.pcc", slot_file(STATE, rank=1, world=2, counter=4, step=5))
    assert exit_code(audit(tmp_path)) == 1, "no checkpoint of all ranks is left"
    put(tmp_path, "rank-00000/slot-002.pcc", slot_file(STATE, rank=1, world=2, counter=4, step=5, slot=2))
    assert exit_code(audit(tmp_path)) == 1, "another rank's file in the wrong folder makes none"


def test_a_branch_that_one_rank_knows_to_be_abandoned_is(tmp_path: Path) -> None:
    for rank in (0, 1):
        put(tmp_path, f"rank-{rank:05d}/slot-000.pcc", slot_file(STATE, rank=rank, world=2, counter=3))
    left = Abandoned(sequence=1, ranges=((3, 4),))
    put(tmp_path, "rank-00001/CHECK", check_file(word=format.pack_word(3, 0), abandoned=left))
    assert [w.state for w in world_reports(audit(tmp_path))] == ["abandoned"]


def test_a_single_file(tmp_path: Path) -> None:
    path = put(tmp_path, "model.bin", slot_file(STATE, slot=4))
    report = one(path, verify=True)
    assert report.check is None
    assert (report.valid, report.slots[0].name, report.slots[0].state) == (1, "model.bin", "sealed")
    for name, data in (("text.bin", b"hello"), ("empty.bin", b"")):
        with pytest.raises(UsageError):
            audit(put(tmp_path, name, data))


def test_a_kept_link_is_read_once(tmp_path: Path) -> None:
    path = put(tmp_path, "slot-000.pcc", slot_file(STATE))
    (tmp_path / "kept").mkdir()
    os.link(path, tmp_path / "kept" / "10-c1.pcc")
    seen: list[str] = []
    report = one(tmp_path, verify=True, progress=lambda name, count, total: seen.append(name))
    assert [(s.name, s.verdict, s.verified) for s in report.slots] == [
        ("slot-000.pcc", "ok", True),
        ("kept/10-c1.pcc", "ok", True),
    ]
    assert set(seen) == {"slot-000.pcc"}
    assert report.valid == 1


def test_progress_adds_up(tmp_path: Path) -> None:
    put(tmp_path, "slot-000.pcc", slot_file(STATE))
    counts: list[tuple[int, int]] = []
    one(tmp_path, verify=True, progress=lambda name, count, total: counts.append((count, total)))
    assert sum(count for count, _ in counts) == counts[0][1] == 6 * 4096


def test_progress_of_ranks_tells_their_files_apart(tmp_path: Path) -> None:
    for rank in (0, 1):
        put(tmp_path, f"rank-{rank:05d}/slot-000.pcc", slot_file(STATE, rank=rank, world=2))
    names: set[str] = set()
    audit(tmp_path, verify=True, progress=lambda name, count, total: names.add(name))
    assert names == {"rank-00000/slot-000.pcc", "rank-00001/slot-000.pcc"}


def test_looking_changes_nothing(tmp_path: Path) -> None:
    put(tmp_path, "CHECK", flipped(check_file(), 20))
    put(tmp_path, "slot-000.pcc", flipped(slot_file(STATE), 65536))
    put(tmp_path, "slot-001.pcc", b"")
    before = fingerprint(tmp_path)
    one(tmp_path, verify=True)
    assert fingerprint(tmp_path) == before


def test_a_slot_refilled_meanwhile_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time the payload is read, a writer has already given the slot to another checkpoint."""
    put(tmp_path, "CHECK", check_file())
    path = put(tmp_path, "slot-000.pcc", slot_file(STATE))
    real, counter = judging.verify, [1]

    def verify(*arguments: Any) -> Any:
        counter[0] += 1
        path.write_bytes(slot_file([np.zeros(9)], counter=counter[0]))
        return real(*arguments)

    monkeypatch.setattr(judging, "verify", verify)
    report = one(tmp_path, verify=True)
    assert (report.slots[0].verdict, report.damaged) == ("reused", 0)
    assert counter[0] > 2


def test_auditing_while_a_checkpointer_saves(tmp_path: Path) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def save() -> None:
        try:
            with pccheck.Checkpointer(tmp_path / "s", in_flight=2, keep=2, chunk_bytes=4096) as ck:
                step = 0
                while not stop.is_set():
                    step += 1
                    ck.save(step, {"w": np.full(3000, step)}).durable.result(30)
        except BaseException as error:
            errors.append(error)

    writer = threading.Thread(target=save)
    writer.start()
    try:
        while not (tmp_path / "s" / "slot-000.pcc").exists() and not errors:
            stop.wait(0.01)
        for _ in range(25):
            (report,) = audit(tmp_path / "s", verify=True)
            assert report.damaged == 0, report
    finally:
        stop.set()
        writer.join()
    assert not errors
    assert exit_code(audit(tmp_path / "s", verify=True)) == 0


def test_what_a_process_alone_left_beside_the_stores_of_ranks_is_not_shown(tmp_path):
    for rank in range(2):
        with pccheck.Checkpointer(tmp_path / f"rank-0000{rank}") as ck:
            ck.save(1, {"a": np.arange(4)})
    (tmp_path / "CHECK").write_bytes(b"")
    assert [os.path.basename(r.path) for r in audit(tmp_path)] == ["rank-00000", "rank-00001"]
