"""Stores of links, and the folders that their checkpoints live in."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import pccheck
from pccheck import format, links
from pccheck.errors import (
    CapacityError,
    ClosedError,
    DamagedError,
    DeadlineError,
    FormatError,
    MediumError,
    NoValidCheckpointError,
    RanksError,
    StepNotFoundError,
    StoreGoneError,
    UsageError,
)
from pccheck.reading.linked import LIST_NAME
from pccheck.storage.directory import Directory
from pccheck.storage.outside import NO_LINK
from pccheck.testing.faults import FOREVER, Fault, FaultyVolume, Script

CHUNK = 64 * 1024
WAIT_S = 30
WHOLE = np.arange(1200.0).reshape(120, 10)  # what two processes store the halves of


def state(step: int) -> dict[str, object]:
    return {"w": np.full(50_000, step, np.float32), "step": step}


def opened(store, **options) -> pccheck.Checkpointer:
    return pccheck.Checkpointer(store, keep=0, chunk_bytes=CHUNK, **options)


def place(root: Path, step: int, rank: int = 0) -> Path:
    (root / str(step)).mkdir(exist_ok=True)
    return root / str(step) / links.rank_name(rank)


def put(ck: pccheck.Checkpointer, root: Path, step: int) -> Path:
    """Save a step, finish its folder, and give that."""
    path = place(root, step)
    ck.save(step, state(step), metadata={"loss": step}, link=path).durable.result(WAIT_S)
    links.finish(path.parent, 1)
    return path.parent


def assert_whole(folder: Path, step: int) -> None:
    restored = links.load(folder)
    assert (restored.step, restored.metadata, restored.state["step"]) == (step, {"loss": step}, step)
    np.testing.assert_array_equal(restored.state["w"], state(step)["w"])


# -- saving ------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_lives_in_its_folder_alone(tmp_path):
    with opened(tmp_path / "s") as ck:
        folders = [put(ck, tmp_path, step) for step in range(5)]
        assert len(list((tmp_path / "s").glob("slot-*"))) <= 2
    assert sorted(os.listdir(tmp_path / "s")) == ["CHECK", "runs.json"]
    shutil.copytree(folders[1], tmp_path / "copy")
    folders[2].rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "s")
    for folder, step in ((folders[0], 0), (tmp_path / "copy", 1), (tmp_path / "moved", 2)):
        assert_whole(folder, step)
        assert (folder / "rank-00000.pcc").stat().st_nlink == 1


def test_a_slot_has_no_second_name_for_longer_than_its_save(tmp_path):
    with opened(tmp_path / "s", in_flight=1) as ck:
        path = place(tmp_path, 1)
        ck.save(1, state(1), link=str(path)).durable.result(WAIT_S)
        ck.save(2, state(2), link=place(tmp_path, 2)).durable.result(WAIT_S)
        assert path.stat().st_nlink == 1


def test_whoever_has_a_file_keeps_whole_bytes(tmp_path):
    """An open descriptor, another link and a copy: the step is deleted, and saves go on."""
    with opened(tmp_path / "s", in_flight=2) as ck:
        folder = put(ck, tmp_path, 0)
        file = folder / "rank-00000.pcc"
        held, bytes_then = os.open(file, os.O_RDONLY), file.read_bytes()
        os.link(file, tmp_path / "elsewhere.pcc")
        shutil.copytree(folder, tmp_path / "copy")
        shutil.rmtree(folder)
        for step in range(1, 8):
            shutil.rmtree(put(ck, tmp_path, step))
        assert os.pread(held, len(bytes_then), 0) == bytes_then
        os.close(held)
        assert (tmp_path / "elsewhere.pcc").read_bytes() == bytes_then
        assert_whole(tmp_path / "copy", 0)
        with pccheck.open(tmp_path / "elsewhere.pcc") as view:
            np.testing.assert_array_equal(view["w"], state(0)["w"])


def test_descriptors_and_slots_stay_bounded(tmp_path):
    with opened(tmp_path / "s", in_flight=2) as ck:
        counts = []
        for step in range(60):
            ck.save(step, {"step": step, "w": np.arange(10)}, link=place(tmp_path, step))
            if step > 5:
                ck.wait()
                counts.append(len(os.listdir("/proc/self/fd")))
                assert len(list((tmp_path / "s").glob("slot-*"))) <= 2
        assert max(counts) - min(counts) <= 4
    assert [(tmp_path / str(step) / "rank-00000.pcc").stat().st_nlink for step in range(60)] == [1] * 60


def test_a_folder_that_is_made_later_is_waited_for(tmp_path):
    made = threading.Event()

    def when_made() -> str:
        assert made.wait(WAIT_S)
        return f"{tmp_path}/late/rank-00000.pcc"

    with opened(tmp_path / "s") as ck:
        save = ck.save(1, state(1), link=when_made)
        assert save.captured.result(WAIT_S) == 1
        assert not save.durable.done()
        (tmp_path / "late").mkdir()
        made.set()
        assert save.durable.result(WAIT_S) == 1
        assert save.outcome == "committed"
    links.finish(tmp_path / "late", 1)
    assert links.load(tmp_path / "late").step == 1


def test_a_larger_state_later(tmp_path):
    with opened(tmp_path / "s", in_flight=1) as ck:
        put(ck, tmp_path, 1)
        path = place(tmp_path, 2)
        ck.save(2, {"w": np.arange(500_000)}, link=path).durable.result(WAIT_S)
    assert_whole(tmp_path / "1", 1)
    links.finish(path.parent, 1)
    np.testing.assert_array_equal(links.load(path.parent).state["w"], np.arange(500_000))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_asked_of_it(tmp_path):
    with opened(tmp_path / "s") as ck:
        with pytest.raises(UsageError, match="needs link="):
            ck.save(1, state(1))
        for wrong in (7, b"bytes", "", "a\0b"):
            with pytest.raises(UsageError, match="link="):
                ck.save(1, state(1), link=wrong)
        put(ck, tmp_path, 2)
        calls = (ck.steps, ck.latest, ck.restore, lambda: ck.pin(2), lambda: ck.unpin(2), lambda: ck.delete(2))
        for call in calls:
            with pytest.raises(UsageError, match=r"pccheck\.links\.load"):
                call()
        inside = ck.save(3, state(3), link=tmp_path / "s/slot-077.pcc", report=False)
        with pytest.raises(UsageError, match="a folder of its own"):
            inside.durable.result(WAIT_S)
    with pccheck.Checkpointer(tmp_path / "kept") as ck, pytest.raises(UsageError, match="keep=0"):
        ck.save(1, state(1), link="/x")
    with pytest.raises(UsageError, match="coordinator"):
        opened(tmp_path / "job", coordinator=pccheck.SharedDirectory(tmp_path / "ranks", rank=0, world=2))


def test_a_store_is_of_one_kind(tmp_path):
    with pccheck.Checkpointer(tmp_path / "kept") as ck:
        ck.save(1, state(1))
    before = (tmp_path / "kept/slot-000.pcc").read_bytes()
    with pytest.raises(UsageError, match="would give away"):
        opened(tmp_path / "kept")
    assert (tmp_path / "kept/slot-000.pcc").read_bytes() == before
    with pccheck.Checkpointer(tmp_path / "kept") as ck:
        assert ck.restore().step == 1
    opened(tmp_path / "s").close()
    with pytest.raises(UsageError, match="is a store of links"):
        pccheck.Checkpointer(tmp_path / "s")
    opened(tmp_path / "s").close()


def test_a_path_that_is_taken_fails_that_save_alone(tmp_path):
    with opened(tmp_path / "s", in_flight=1) as ck:
        folder = put(ck, tmp_path, 1)
        again = ck.save(2, state(2), link=folder / "rank-00000.pcc", report=False)
        with pytest.raises(MediumError) as caught:
            again.durable.result(WAIT_S)
        assert caught.value.errno == errno.EEXIST
        put(ck, tmp_path, 3)
    assert_whole(folder, 1)
    assert_whole(tmp_path / "3", 3)


def test_a_function_that_fails_fails_that_save_alone(tmp_path):
    def broken():
        raise KeyError("no folder today")

    with opened(tmp_path / "s") as ck:
        for link, error in ((broken, KeyError), (lambda: 7, UsageError), (lambda: tmp_path / "not/there", MediumError)):
            with pytest.raises(error):
                ck.save(1, state(1), link=link, report=False).durable.result(WAIT_S)
        put(ck, tmp_path, 2)
        ck.save(3, state(3), link=broken).durable.exception(WAIT_S)
        with pytest.raises(KeyError):
            ck.wait()
    assert_whole(tmp_path / "2", 2)


def test_a_function_that_does_not_return_ends_with_its_saves_deadline(tmp_path):
    go_on = threading.Event()
    with opened(tmp_path / "s", write_timeout_s=1.0) as ck:
        put(ck, tmp_path, 1)
        late = ck.save(2, state(2), link=lambda: go_on.wait(WAIT_S), report=False)
        with pytest.raises(DeadlineError, match="the path"):
            late.durable.result(WAIT_S)
        put(ck, tmp_path, 3)
    go_on.set()
    assert_whole(tmp_path / "3", 3)
    with pytest.raises(ClosedError):
        ck.save(4, state(4), link="/x/y")


@pytest.mark.parametrize("number", sorted(NO_LINK))
def test_where_no_link_can_be_a_copy_is_made(tmp_path, number):
    volume = Directory(tmp_path / "s", create=True, write=True)
    with opened(FaultyVolume(volume, Script(Fault("link_out", errno=number, times=FOREVER))), in_flight=1) as ck:
        put(ck, tmp_path, 1)
        slot = (tmp_path / "s/slot-000.pcc").stat().st_ino
        put(ck, tmp_path, 2)
        assert (tmp_path / "s/slot-000.pcc").stat().st_ino == slot, "the slot is nobody else's, and is used again"
    for step in (1, 2):
        assert_whole(tmp_path / str(step), step)
        assert os.listdir(tmp_path / str(step)).sort() == ["pccheck.json", "rank-00000.pcc"].sort()


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        ((Fault("sync_out"),), MediumError),
        ((Fault("sync_out", how="after"),), MediumError),
        ((Fault("link_out", how="after"),), MediumError),
        ((Fault("link_out", errno=errno.EXDEV), Fault("copy_out", errno=errno.EIO)), MediumError),
    ],
)  # fmt: skip
def test_a_link_that_fails_leaves_no_checkpoint_and_a_slot_that_is_not_written_again(tmp_path, faults, error):
    script = Script()
    with opened(FaultyVolume(Directory(tmp_path / "s", create=True, write=True), script), in_flight=1) as ck:
        put(ck, tmp_path, 1)
        script.arm(*faults)
        path = place(tmp_path, 2)
        with pytest.raises(error):
            ck.save(2, state(2), link=path, report=False).durable.result(WAIT_S)
        held = path.read_bytes() if path.exists() else b""
        with pytest.raises(RanksError):
            links.finish(path.parent, 1)
        put(ck, tmp_path, 3)
        assert (path.read_bytes() if path.exists() else b"") == held
    for step in (1, 3):
        assert_whole(tmp_path / str(step), step)


def test_a_sync_that_fails_takes_the_name_back(tmp_path, monkeypatch):
    from pccheck.storage import fileio

    real = fileio.sync_folder

    def failing(fd, path):
        if path == str(tmp_path / "2"):
            raise MediumError("sync of names", path, OSError(errno.EIO, "broken"))
        real(fd, path)

    monkeypatch.setattr(fileio, "sync_folder", failing)
    with opened(tmp_path / "s", in_flight=1) as ck:
        with pytest.raises(MediumError):
            ck.save(2, state(2), link=place(tmp_path, 2), report=False).durable.result(WAIT_S)
        assert os.listdir(tmp_path / "2") == []
        put(ck, tmp_path, 3)
    assert_whole(tmp_path / "3", 3)


def test_any_operation_that_fails_costs_no_link(tmp_path):
    """Each operation of three saves fails in turn: what became durable is whole, and the store opens again."""
    script = Script()

    def run(root: Path) -> set[int]:
        durable: set[int] = set()
        volume = FaultyVolume(Directory(root / "s", create=True, write=True), script)
        with opened(volume, in_flight=1, on_error="warn", lock_timeout_s=0) as ck:
            for step in (1, 2, 3):
                try:
                    save = ck.save(step, state(step), metadata={"loss": step}, link=place(root, step), report=False)
                except (MediumError, CapacityError):
                    continue
                if save.durable.exception(WAIT_S) is None:
                    durable.add(step)
        return durable

    (tmp_path / "0").mkdir()
    assert run(tmp_path / "0") == {1, 2, 3}
    total, failed = len(script.operations), 0
    for nth in range(1, total + 1, 3):
        root = tmp_path / str(nth)
        root.mkdir()
        script.arm(Fault("*", nth))
        try:
            durable = run(root)
        except MediumError:  # opening, or closing
            durable = set()
        failed += len(durable) < 3
        for step in durable:
            links.finish(root / str(step), 1)
            assert_whole(root / str(step), step)
        script.arm()
        with opened(root / "s") as ck:
            put(ck, root, 9)
        assert_whole(root / "9", 9)
    assert failed > 3


def test_a_file_that_another_process_put_under_the_slots_name_is_not_linked(tmp_path):
    volume = Directory(tmp_path / "s", create=True, write=True)
    mine = volume.create("slot-000.pcc", 4096)
    os.unlink(tmp_path / "s/slot-000.pcc")
    volume.create("slot-000.pcc", 4096).close()
    path = str(place(tmp_path, 1))
    for verb in (volume.link_out, volume.copy_out):
        with pytest.raises(StoreGoneError):
            verb("slot-000.pcc", mine, path)
        assert os.listdir(tmp_path / "1") == []
    mine.close()
    volume.close()


def test_opening_gives_up_what_a_crash_left(tmp_path):
    """Every state that a slot can be left in: no name of it stays, no link is touched, no counter is used again."""
    held = {}

    def at(point: str) -> None:
        held.setdefault(point, {p.name: p.read_bytes() for p in (tmp_path / "s").iterdir()})

    with opened(tmp_path / "s", in_flight=1, _at=at) as ck:
        put(ck, tmp_path, 5)
    for point in ("written", "sealed", "linked", "link-synced", "released"):
        root = tmp_path / f"at-{point}"
        root.mkdir()
        for name, data in held[point].items():
            (root / name).write_bytes(data)
        assert "slot-000.pcc" in held[point]
        with opened(root) as ck:
            assert not list(root.glob("slot-*"))
            save = ck.save(6, state(6), link=place(root, 6))
            save.durable.result(WAIT_S)
            assert save.counter > 1
    assert_whole(tmp_path / "5", 5)


# -- linked folders ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path) -> Path:
    """Two processes' parts of one array, and something of each one's own."""
    folder = tmp_path / "7"
    for rank in range(2):
        rows = pccheck.Shard(WHOLE[rank * 60 : rank * 60 + 60], shape=WHOLE.shape, offsets=(60 * rank, 0))
        with opened(tmp_path / f"s{rank}") as ck:
            ck.save(7, {"w": rows, "rank": rank}, metadata={"rank": rank}, link=place(tmp_path, 7, rank))
    links.finish(folder, 2)
    return folder


def test_parts_of_all_processes_are_put_together(pair):
    for rank in range(5):
        restored = links.load(pair, rank=rank)
        assert restored.state["rank"] == rank % 2 == restored.metadata["rank"]
        np.testing.assert_array_equal(restored.state["w"], WHOLE)
    asked = pccheck.Shard(np.empty((50, 10)), shape=(120, 10), offsets=(30, 0))
    part = links.load(pair, like={"w": asked, "rank": 0}).state["w"]
    np.testing.assert_array_equal(part.array, WHOLE[30:80])


def test_a_folder_is_a_view_and_has_an_outline(pair):
    for folder in (pair, shutil.copytree(pair, pair.parent / "copy")):
        with pccheck.open(folder) as view:
            assert (view.steps(), view.latest(), view.keys()) == ([7], 7, ["w", "rank"][: len(view)])
            np.testing.assert_array_equal(view["w"], WHOLE)
            assert [e.step for e in view.checkpoints] == [7]
            assert view.restore().state["rank"] == 0
            with pytest.raises(StepNotFoundError):
                view.restore(8)
        for outline in (pccheck.outline(folder), links.outline(folder, rank=1)):
            assert (outline.step, outline.world) == (7, 2)
            assert outline.trees[1]["w"].spec.shape == (120, 10)
            np.testing.assert_array_equal(outline.restore(rank=1).state["w"], WHOLE)
        assert links.outline(folder, rank=1).metadata == {"rank": 1}
        with pytest.raises(StepNotFoundError):
            pccheck.outline(folder, step=8)


def test_finishing_names_whose_file_is_missing(tmp_path, pair):
    with pytest.raises(RanksError) as caught:
        links.finish(pair, 4)
    assert caught.value.ranks == (2, 3)
    with opened(tmp_path / "s1") as ck:
        other = tmp_path / "other"
        other.mkdir()
        shutil.copy(pair / "rank-00000.pcc", other)
        ck.save(8, {}, link=other / links.rank_name(1)).durable.result(WAIT_S)
    with pytest.raises(RanksError, match="of step 8, others of step 7") as caught:
        links.finish(other, 2)
    assert caught.value.ranks == (1,)
    (other / "rank-00001.pcc").write_bytes(bytes(70_000))
    with pytest.raises(RanksError, match="no whole checkpoint"):
        links.finish(other, 2)
    assert LIST_NAME not in os.listdir(other)
    for world in (0, -1, True, 1.0, 1 << 21):
        with pytest.raises(UsageError):
            links.finish(other, world)
    links.finish(pair, 2)
    links.finish(pair, 2)
    assert links.load(pair).step == 7


def test_a_folder_that_was_not_finished_is_refused(tmp_path, pair):
    (pair / LIST_NAME).unlink()
    with pytest.raises(UsageError, match="never finished"):
        links.load(pair)
    with pytest.raises(UsageError, match="never finished"):
        pccheck.open(pair)
    with pytest.raises(UsageError, match=r"holds no pccheck\.json"):
        links.load(tmp_path / "s0")
    with pytest.raises(MediumError):
        links.load(tmp_path / "nowhere")


def test_what_is_not_what_was_listed_is_found(tmp_path, pair):
    whole = (pair / "rank-00001.pcc").read_bytes()
    with opened(tmp_path / "s1") as ck:
        ck.save(7, {"w": 1, "rank": 1}, link=place(tmp_path, 99, 1)).durable.result(WAIT_S)
    damaged = bytearray(whole)
    damaged[70_000] ^= 1
    for data, error, text in (
        ((tmp_path / "99/rank-00001.pcc").read_bytes(), FormatError, "several saves were mixed"),
        (bytes(damaged), DamagedError, "fails its digest"),
        (whole[:70_000], FormatError, "claims a manifest"),
        (bytes(len(whole)), FormatError, "no whole checkpoint"),
        (None, FormatError, "is missing"),
    ):
        (pair / "rank-00001.pcc").unlink()
        if data is not None:
            (pair / "rank-00001.pcc").write_bytes(data)
        with pytest.raises(error, match=text):
            links.load(pair)
        (pair / "rank-00001.pcc").write_bytes(whole)
        assert links.load(pair).step == 7


def test_a_manifest_that_is_damaged_is_passed_over_as_in_a_store(pair):
    file = pair / "rank-00000.pcc"
    data = bytearray(file.read_bytes())
    record = format.unpack_record(bytes(data[: format.RECORD_BYTES]))
    data[record.manifest_offset] ^= 1
    file.write_bytes(data)
    with pccheck.open(pair) as view:
        assert (view.steps(), view.latest(), view.checkpoints) == ([7], 7, [])
        with pytest.raises(NoValidCheckpointError, match="the manifest fails its digest"):
            view.checkpoint()
        with pytest.raises(DamagedError, match="the manifest fails its digest"):
            view.restore()


def test_a_hostile_list(pair):
    good = json.loads((pair / LIST_NAME).read_text())
    wrong = [
        b"", b"{", b"[]", b"[" * 100_000, json.dumps({**good, "version": 2}).encode(),
        json.dumps({**good, "ranks": []}).encode(), json.dumps({**good, "ranks": good["ranks"][::-1]}).encode(),
        json.dumps({**good, "step": 8}).encode(), json.dumps({**good, "step": "7"}).encode(),
        json.dumps({**good, "ranks": [{**good["ranks"][0], "file": "../7/rank-00000.pcc"}]}).encode(),
        json.dumps({**good, "ranks": [{**good["ranks"][0], "store_id": "00"}]}).encode(),
    ]  # fmt: skip
    for data in wrong:
        (pair / LIST_NAME).write_bytes(data)
        with pytest.raises(FormatError) as told:
            links.load(pair)
        if b'"version": 2' not in data:  # what a later release wrote is not to be written over
            assert "restore another step" in str(told.value)
            assert f"pccheck.links.finish({str(pair)!r}, world)" in str(told.value)
            links.finish(pair, 2)
            assert links.load(pair).step == 7
    (pair / LIST_NAME).unlink()
    (pair / LIST_NAME).symlink_to("/etc/passwd")
    with pytest.raises(UsageError):
        links.load(pair)


@pytest.mark.parametrize("rank", [-1, 1.0, True, 1 << 20, "0"])
def test_names_of_files(rank):
    assert links.rank_name(3) == "rank-00003.pcc"
    assert links.rank_name(123_456) == "rank-123456.pcc"
    with pytest.raises(UsageError):
        links.rank_name(rank)


# -- what a crash left in temporary folders ----------------------------------------------------------------------------


def test_stale_links_are_dropped_and_nothing_else(tmp_path):
    temporary = tmp_path / "9.tmp"
    (temporary / "item.tmp").mkdir(parents=True)
    (temporary / "other.tmp").mkdir()
    for name in ("s", "t"):
        with opened(tmp_path / name) as ck:
            folder = temporary / ("item.tmp" if name == "s" else "other.tmp")
            ck.save(9, state(9), link=folder / links.rank_name(0)).durable.result(WAIT_S)
            if name == "s":
                ck.save(9, state(9), link=folder / links.rank_name(1)).durable.result(WAIT_S)
                put(ck, tmp_path, 8)
    shutil.copy(temporary / "item.tmp/rank-00000.pcc", temporary / ".rank-00000.pcc.half")
    (temporary / "rank-00000.pcc").symlink_to(tmp_path / "8/rank-00000.pcc")
    (temporary / "away").symlink_to(tmp_path / "8")
    (temporary / "notes").mkdir()
    (temporary / "notes/rank-00000.pcc").write_bytes(b"mine")
    assert links.drop_stale(temporary, tmp_path / "s") == 1
    left = sorted(str(p.relative_to(temporary)) for p in temporary.rglob("*") if p.is_file() and not p.is_symlink())
    assert left == ["item.tmp/rank-00001.pcc", "notes/rank-00000.pcc", "other.tmp/rank-00000.pcc"]
    assert_whole(tmp_path / "8", 8)
    assert links.drop_stale(temporary, tmp_path / "s", rank=1) == 1
    assert links.drop_stale(tmp_path / "nowhere", tmp_path / "s") == 0
    assert links.drop_stale(temporary, tmp_path / "nowhere") == 0
    assert links.drop_stale(temporary / "away", tmp_path / "s") == 0


@pytest.mark.parametrize("cut", [1, 2])
def test_a_list_goes_before_the_file_that_it_lists(tmp_path, monkeypatch, cut):
    """A kill between the two removals leaves what was never finished, not a list of what is missing."""
    folder = tmp_path / "9.tmp/item"
    folder.mkdir(parents=True)
    (tmp_path / "9.tmp/other").mkdir()
    with opened(tmp_path / "s") as ck, opened(tmp_path / "t") as other:
        ck.save(9, state(9), link=folder / links.rank_name(0)).durable.result(WAIT_S)
        elsewhere = tmp_path / "9.tmp/other" / links.rank_name(0)
        other.save(9, state(9), metadata={"loss": 9}, link=elsewhere).durable.result(WAIT_S)
    for each in (folder, tmp_path / "9.tmp/other"):
        links.finish(each, 1)
    removals, unlink = [], os.unlink

    def dies(name, **where):
        unlink(name, **where)
        removals.append(name)
        if len(removals) == cut:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "unlink", dies)
    with pytest.raises(KeyboardInterrupt):
        links.drop_stale(tmp_path / "9.tmp", tmp_path / "s")
    monkeypatch.undo()
    assert removals == [LIST_NAME, links.rank_name(0)][:cut]
    assert links.drop_stale(tmp_path / "9.tmp", tmp_path / "s") == 2 - cut
    assert os.listdir(folder) == []
    assert_whole(tmp_path / "9.tmp/other", 9)


def test_the_list_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    from pccheck.storage import fileio, outside

    done: list[str] = []
    real = {name: getattr(fileio, name) for name in ("sync_file", "sync_folder")}
    for name, call in real.items():
        monkeypatch.setattr(fileio, name, lambda *a, name=name, call=call: (done.append(name), call(*a))[1])
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *a, **k: (done.append("rename"), rename(*a, **k))[1])
    outside.write_synced(str(tmp_path / "list"), b"text")
    assert done == ["sync_file", "rename", "sync_folder"]
    assert (tmp_path / "list").read_bytes() == b"text"
    assert os.listdir(tmp_path) == ["list"]
