"""`pccheck inspect` of linked folders, of what holds them, and of stores of links."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pccheck
from pccheck import links
from pccheck.audit import audit
from pccheck.errors import UsageError
from pccheck.reading.linkplaces import find_linked
from pccheck.reports import exit_code

CHUNK = 64 * 1024
STORE = ".pccheck/params/process-00000"


def save(ck: pccheck.Checkpointer, folder: Path, step: int, *, finish: bool = True) -> None:
    folder.mkdir(parents=True)
    state = {"w": np.full(30_000, step)}
    ck.save(step, state, metadata={"loss": step}, link=folder / links.rank_name(0)).durable.result(30)
    if finish:
        links.finish(folder, 1)


@pytest.fixture
def root(tmp_path) -> Path:
    """Two steps of one item as Orbax lays them out, and a third that was not finished."""
    root = tmp_path / "ckpt"
    with pccheck.Checkpointer(root / STORE, keep=0, chunk_bytes=CHUNK) as ck:
        for step in (9, 10):
            save(ck, root / f"{step}/params", step)
        save(ck, root / "11.orbax-checkpoint-tmp/params.orbax-checkpoint-tmp", 11, finish=False)
    (root / "descriptor").mkdir()
    (root / "10/_CHECKPOINT_METADATA").write_text("{}")
    (root / "away").symlink_to(root / "9")
    return root


def names(path: Path, **options):
    folders, *stores = audit(path, **options)
    return folders, stores, {slot.name: (slot.state, slot.verdict) for slot in folders.slots}


def test_steps_items_and_stores(root):
    for deep in (False, True):
        folders, stores, slots = names(root, verify=deep)
        assert slots == {
            "9/params/rank-00000.pcc": ("linked", "ok"),
            "10/params/rank-00000.pcc": ("linked", "ok"),
            "11.orbax-checkpoint-tmp/params.orbax-checkpoint-tmp/rank-00000.pcc": ("unfinished", "-"),
        }
        assert next(iter(slots)).startswith("9/"), "in the order of their numbers"
        assert [slot.step for slot in folders.slots] == [9, 10, 11]
        assert [slot.metadata for slot in folders.slots] == [{"loss": 9}, {"loss": 10}, None]
        assert [slot.verified for slot in folders.slots] == [deep, deep, False]
        assert (folders.valid, folders.damaged, exit_code([folders, *stores])) == (2, 0, 0)
        (store,) = stores
        assert store.path == str(root / STORE)
        assert (store.is_of_links, store.valid, store.slots) == (True, 0, ())


@pytest.mark.parametrize(("path", "name"), [("10", "params/rank-00000.pcc"), ("10/params", "rank-00000.pcc")])
def test_a_step_and_an_item_on_their_own(root, path, name):
    folders, stores, slots = names(root / path)
    assert (slots, stores, folders.kind) == ({name: ("linked", "ok")}, [], "folders")
    assert exit_code([folders]) == 0


def test_what_is_wrong_is_found(root):
    file = root / "9/params/rank-00000.pcc"
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[100_000] ^= 1
    other = (root / "10/params/rank-00000.pcc").read_bytes()
    for data, deep, reason in (
        (bytes(damaged), True, "a chunk fails its digest"),
        (other, False, "not what pccheck.json lists"),
        (bytes(len(whole)), False, "no whole checkpoint"),
        (whole[:1000], False, "the file has 1000"),
        (b"x" * 1000, False, "magic"),
        (None, False, "No such file"),
    ):
        file.unlink()
        if data is not None:
            file.write_bytes(data)
        folders, stores, slots = names(root, verify=deep)
        assert slots["9/params/rank-00000.pcc"][1] == "damaged", reason
        assert reason in folders.slots[0].damages[0].reason
        assert (folders.valid, folders.damaged, exit_code([folders, *stores])) == (1, 1, 1)
        file.write_bytes(whole)
    (root / "9/params/pccheck.json").write_text("{")
    folders, _, slots = names(root)
    assert slots["9/params/pccheck.json"] == ("unreadable", "damaged")
    assert folders.valid == 1


@pytest.mark.parametrize("left", [["pccheck.json", "rank-00000.pcc"], ["rank-00000.pcc"], ["pccheck.json"]])
def test_what_orbax_never_committed_is_unfinished_whatever_is_left_of_it(root, left):
    """A kill may come between the list and the rename, or while somebody clears the folder away."""
    folder = root / "12.orbax-checkpoint-tmp-whole/params"
    shutil.copytree(root / "10/params", folder)
    for name in set(os.listdir(folder)) - set(left):
        (folder / name).unlink()
    whole = [f"12.orbax-checkpoint-tmp-whole/params/{name}" for name in left if name.endswith(".pcc")]
    for deep in (False, True):
        folders, stores, slots = names(root, verify=deep)
        found = {name: told for name, told in slots.items() if name.startswith("12.")}
        assert found == dict.fromkeys(whole, ("unfinished", "-"))
        assert (folders.valid, folders.damaged, exit_code([folders, *stores])) == (2, 0, 0)
    told = find_linked(root).how_to_open()
    assert "2 linked folder(s)" in told
    assert told.endswith(f"such as {root}/10/params")
    alone, *_ = audit(folder)
    assert (alone.valid, alone.damaged, [slot.state for slot in alone.slots]) == (0, 0, ["unfinished"] * len(whole))


def test_one_file_of_several_that_is_missing_costs_the_folder(tmp_path):
    for rank in range(3):
        with pccheck.Checkpointer(tmp_path / f"s{rank}", keep=0) as ck:
            (tmp_path / "5").mkdir(exist_ok=True)
            ck.save(5, {"rank": rank}, link=tmp_path / "5" / links.rank_name(rank)).durable.result(30)
    links.finish(tmp_path / "5", 3)
    folders, _, _ = names(tmp_path / "5")
    assert (folders.valid, len(folders.slots)) == (1, 3)
    (tmp_path / "5/rank-00001.pcc").unlink()
    folders, _, slots = names(tmp_path / "5")
    assert (folders.valid, folders.damaged) == (0, 1)
    assert slots["rank-00001.pcc"][1] == "damaged"


def test_only_what_was_not_finished_is_nothing_valid(tmp_path):
    with pccheck.Checkpointer(tmp_path / "s", keep=0) as ck:
        save(ck, tmp_path / "steps/1", 1, finish=False)
    folders, _, _ = names(tmp_path / "steps")
    assert (folders.valid, folders.damaged, exit_code([folders])) == (0, 0, 1)


def test_a_store_of_links_at_each_point_of_a_save(tmp_path):
    """A slot is "linked" from its link to the end of the save, and judged; before and after that it is none."""
    seen: dict[str, tuple[str, str, int]] = {}

    def at(point: str) -> None:
        (report,) = audit(tmp_path / "s", verify=True)
        (slot,) = report.slots
        seen[point] = (slot.state, slot.verdict, exit_code([report]))

    with pccheck.Checkpointer(tmp_path / "s", keep=0, in_flight=1, chunk_bytes=CHUNK, _at=at) as ck:
        save(ck, tmp_path / "1", 1)
        ck.wait()
    assert seen["written"] == ("filling", "-", 0)
    assert seen["record-synced"] == ("free", "-", 0)
    assert seen["linked"] == seen["link-synced"] == seen["released"] == ("linked", "ok", 0)
    (report,) = audit(tmp_path / "s")
    assert (report.check.links, report.slots, exit_code([report])) == (True, (), 0)


def test_a_folder_that_is_deleted_meanwhile_is_no_damage(root, monkeypatch):
    from pccheck import linkaudit

    real = linkaudit.read_list

    def deleting(where):
        found = real(where)
        if where.endswith("9/params") and os.path.exists(where):
            shutil.rmtree(where)
        return found

    monkeypatch.setattr(linkaudit, "read_list", deleting)
    folders, _, slots = names(root)
    assert next(iter(slots)) == "10/params/rank-00000.pcc"
    assert folders.damaged == 0


def test_nothing_of_the_kind(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file.txt").write_text("x")
    with pytest.raises(UsageError, match="not a pccheck store"):
        audit(tmp_path)


def test_the_command(root):
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pccheck.cli", "inspect", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "80"})

    done = run(root)
    assert done.returncode == 0, done.stderr
    for text in ("9/params/rank-00000", "unfinished", "a store of links", "2 valid checkpoints, nothing damaged"):
        assert text in done.stdout
    assert "without a valid checkpoint" not in done.stdout
    told = json.loads(run("--json", root).stdout)
    assert [store["kind"] for store in told["stores"]] == ["folders", "store"]
    assert told["stores"][1]["check"]["links"] is True
    assert told["exit_code"] == 0
    assert "jax" not in told
    (root / "10/params/rank-00000.pcc").unlink()
    assert run(root).returncode == 1


def orbax_item(folder: Path, name: str) -> None:
    """What a handler of Orbax's own leaves of an item: `_METADATA` of a tree, `metadata` of JSON."""
    folder.mkdir(parents=True)
    (folder / name).write_text("{}")
    (folder / "d").mkdir()
    (folder.parent / "_CHECKPOINT_METADATA").write_text("{}")


def inspected(path: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pccheck", "inspect", str(path), *options], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_what_orbax_saved_itself_is_listed_and_not_judged(root):
    orbax_item(root / "8/params", "_METADATA")
    orbax_item(root / "10/data", "metadata")
    orbax_item(root / "12.orbax-checkpoint-tmp/params.orbax-checkpoint-tmp", "_METADATA")
    folders, stores, slots = names(root, verify=True)
    assert {name: found for name, found in slots.items() if found[0] == "of Orbax"} == {
        "8/params": ("of Orbax", "-"),
        "10/data": ("of Orbax", "-"),
    }
    assert [slot.step for slot in folders.slots if slot.state == "of Orbax"] == [8, 10]
    assert (folders.valid, folders.damaged, exit_code([folders, *stores])) == (2, 0, 0)
    status, text = inspected(root, "--json")
    found = {slot["file"]: slot for slot in json.loads(text)["stores"][0]["slots"]}
    assert status == 0
    assert (found["10/data"]["state"], found["10/data"]["verdict"]) == ("of Orbax", "-")


def test_steps_of_orbax_alone_are_called_that(tmp_path):
    orbax_item(tmp_path / "root/3/params", "_METADATA")
    orbax_item(tmp_path / "root/3/data", "metadata")
    for path, shown in (("root", "3/data"), ("root/3", "params"), ("root/3/params", ".")):
        status, text = inspected(tmp_path / path)
        assert status == 1
        assert "steps of Orbax's own handlers" in text
        assert f"\n{shown} " in text
        assert "not a pccheck store" not in text
        assert "0 valid checkpoints, nothing damaged" in text
        with pytest.raises(UsageError, match="Orbax's own handlers"):
            pccheck.open(tmp_path / path)


def test_a_stray_check_hides_no_steps(root):
    before = names(root)[2]
    with pccheck.Checkpointer(root.parent / "stray"):
        pass
    shutil.copy(root.parent / "stray/CHECK", root / "CHECK")
    folders, stores, slots = names(root)
    assert slots == before
    assert [store.path for store in stores] == [str(root / STORE)]
    assert exit_code([folders, *stores]) == 0
    newest = str(root / "10/params")
    with pytest.raises(UsageError, match=f"<root>/<step>/<item>, such as {newest}$"):
        pccheck.open(root)
    with pccheck.open(newest) as view:
        assert view.steps() == [10]


def test_checkpoints_of_a_checkpointer_among_steps_are_shown_too(root):
    with pccheck.Checkpointer(root.parent / "own") as ck:
        ck.save(77, {"a": 1}).durable.result(30)
    shutil.copytree(root.parent / "own", root, dirs_exist_ok=True)
    folders, _, own = audit(root)
    assert (folders.valid, own.path, own.valid) == (2, str(root), 1)
    assert pccheck.open(root).steps() == [77]


def test_no_checkpointer_saves_among_steps_of_orbax(root):
    before = sorted(os.listdir(root))
    for keep in (0, 1):
        with pytest.raises(UsageError, match=r"pccheck_orbax\.CheckpointManager.* another directory"):
            pccheck.Checkpointer(root, keep=keep)
    ranks = pccheck.SharedDirectory(root.parent / "agree", rank=0, world=1)
    with pytest.raises(UsageError, match=r"pccheck_orbax\.CheckpointManager"):
        pccheck.Checkpointer(root, coordinator=ranks)
    assert sorted(os.listdir(root)) == before
    with pccheck.Checkpointer(root / STORE, keep=0, chunk_bytes=CHUNK) as ck:
        save(ck, root / "12/params", 12)


def test_what_adapters_note_for_themselves_is_not_shown(root):
    noted = {"shardings": {"kinds": [], "of": []}, "step_name": "ckpt_12", "custom_metadata": {"by": "me"}}
    with pccheck.Checkpointer(root / STORE, keep=0, chunk_bytes=CHUNK) as ck:
        folder = root / "12/params"
        folder.mkdir(parents=True)
        ck.save(12, {"a": 1}, metadata=noted, link=folder / links.rank_name(0)).durable.result(30)
        links.finish(folder, 1)
    status, text = inspected(root)
    assert status == 0
    assert "shardings" not in text
    assert "step_name" not in text
    assert '{"by": "me"}' in text
    assert links.load(folder).metadata == noted
