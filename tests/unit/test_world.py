"""Checkpoints of several ranks: which are complete, and what comes back of them, whatever ranks read them."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pccheck
from pccheck import Shard, format
from pccheck.errors import (
    DamagedError,
    FormatError,
    MismatchError,
    NoValidCheckpointError,
    ReusedError,
    StepNotFoundError,
    UsageError,
)
from pccheck.format import Abandoned, SlotState
from pccheck.reading import gathering
from pccheck.reading.loading import load_world
from pccheck.reading.world import WorldIdentity, look_at_world, world_candidates
from pccheck.state.boxes import Box
from pccheck.testing.slotfiles import check_file, slot_file


class Part(NamedTuple):
    """What one rank stores of a global array."""

    array: np.ndarray
    box: Box


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]


def file_of(state: Mapping[str, Any], **how: Any) -> bytes:
    """Give a slot file of a flat dict whose values are Parts, arrays and Python values."""
    parts = {key: value for key, value in state.items() if isinstance(value, Part)}
    local = {k: np.ascontiguousarray(cut(*v)) if isinstance(v, Part) else v for k, v in state.items()}
    edit = how.pop("edit", lambda manifest: None)

    def add_boxes(manifest: dict[str, Any]) -> None:
        for leaf in manifest["leaves"]:
            if leaf["path"] in parts:
                array, box = parts[leaf["path"]]
                leaf.update(shape=array.shape, box=(box.offsets, box.sizes))
        edit(manifest)

    return bytes(slot_file(local, edit=add_boxes, **how))


def put(root: Path, rank: int, data: bytes, slot: int = 0) -> Path:
    path = root / f"rank-{rank:05d}" / f"slot-{slot:03d}.pcc"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def save(root: Path, states: list[Mapping[str, Any]], *, counter: int = 1, slot: int = 0, **how: Any) -> None:
    for rank, state in enumerate(states):
        data = file_of(state, rank=rank, world=len(states), counter=counter, step=10 * counter, slot=slot, **how)
        put(root, rank, data, slot)


def identity(world: int, counter: int = 1) -> WorldIdentity:
    return WorldIdentity(1, counter, 10 * counter, world)


def load(root: Path, world: int, home: int = 0, counter: int = 1, **how: Any) -> Any:
    return load_world(root, identity(world, counter), home, **how).restored.state


def asked(array: np.ndarray, box: Box) -> Shard:
    return Shard(np.empty(box.sizes, array.dtype), shape=array.shape, offsets=box.offsets)


def damage(path: Path, *places: int) -> None:
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 1
    path.write_bytes(data)


# -- any partition to any boxes ----------------------------------------------------------------------------------------


@st.composite
def box_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


@st.composite
def partition(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> list[Box]:
    """Cut an array into as many boxes as there are ranks (some may be empty), and deal them out."""
    boxes = [Box.whole(shape)]
    while len(boxes) < world:
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[axis]))
        for first, size in ((0, at), (at, box.sizes[axis] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis] += first
            sizes[axis] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return draw(st.permutations(boxes))


DTYPES = ["u1", "<i2", "<f4", "<f8", "<c16", "S3", "V24"]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[dict[str, Part]], dict[str, np.ndarray]]:
    world, arrays = draw(st.integers(1, 4)), {}
    states: list[dict[str, Part]] = [{} for _ in range(world)]
    for name in "abc"[: draw(st.integers(1, 3))]:
        shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        count = int(np.prod(shape)) * dtype.itemsize
        array = np.frombuffer(np.random.default_rng(count).bytes(count), dtype).reshape(shape)
        arrays[name] = array
        for state, box in zip(states, draw(partition(shape, world)), strict=True):
            state[name] = Part(array, box)
    return states, arrays


@settings(max_examples=60, deadline=None)
@given(worlds(), st.data())
def test_any_partition_comes_back_as_any_boxes(made: Any, data: st.DataObject) -> None:
    states, arrays = made
    with tempfile.TemporaryDirectory() as folder:
        root, world = Path(folder), len(states)
        save(root, states, chunk_bytes=data.draw(st.sampled_from([4096, 65536])))
        for home in range(world):
            whole = load(root, world, home)
            assert all(whole[name].tobytes() == array.tobytes() for name, array in arrays.items())
        for rank in range(data.draw(st.integers(1, 3))):
            boxes = {name: data.draw(box_in(array.shape)) for name, array in arrays.items()}
            like = {name: asked(array, boxes[name]) for name, array in arrays.items()}
            threads = data.draw(st.sampled_from([1, 4]))
            found = load(root, world, rank % world, like=like, threads=threads)
            for name, array in arrays.items():
                assert found[name].offsets == boxes[name].offsets
                assert found[name].array.tobytes() == cut(array, boxes[name]).tobytes()


@settings(max_examples=40, deadline=None)
@given(worlds(), st.data())
def test_a_lost_part_is_found_as_a_hole_and_a_double_one_as_an_overlap(made: Any, data: st.DataObject) -> None:
    states, arrays = made
    name = data.draw(st.sampled_from(sorted(arrays)))
    holders = [rank for rank, state in enumerate(states) if state[name].box.elements]
    rank = data.draw(st.sampled_from(holders))
    if len(states) == 1:
        return  # alone it has all
    with tempfile.TemporaryDirectory() as folder:
        root, array = Path(folder), arrays[name]
        box = states[rank][name].box
        states[rank][name] = Part(array, Box(box.offsets, (0, *box.sizes[1:])))
        save(root, states)
        with pytest.raises(FormatError, match=rf"^{name}: .*stored by no rank"):
            load(root, len(states))
        states[rank][name] = Part(array, box)
        other = data.draw(st.sampled_from([r for r in range(len(states)) if r != rank]))
        one = Box(tuple(box.offsets), (1,) * len(box.sizes))
        states[other][name] = Part(array, one)
        save(root, states)
        if other not in holders and box in (one, Box.whole(array.shape)):
            return  # nothing lost: a copy, or taken from the rank that has all of it
        with pytest.raises(FormatError, match=rf"^{name}: .*(both store|stored by no rank)"):
            load(root, len(states))


def test_equal_parts_of_several_ranks_are_copies(tmp_path: Path) -> None:
    """As far as its ranks know, a parameter on one axis of a mesh is nowhere else: each row of ranks stores it."""
    array = np.arange(7 * 3, dtype="<i4").reshape(7, 3)
    upper, lower = Part(array, Box((0, 0), (4, 3))), Part(array, Box((4, 0), (3, 3)))
    save(tmp_path, [{"w": part} for part in (upper, lower, upper, lower)])
    assert load(tmp_path, 4)["w"].tobytes() == array.tobytes()
    like = {"w": asked(array, Box((3, 0), (2, 3)))}
    assert load(tmp_path, 4, 3, like=like)["w"].array.tobytes() == array[3:5].tobytes()
    save(tmp_path, [{"w": part} for part in (upper, lower, upper, upper)])
    assert load(tmp_path, 4)["w"].tobytes() == array.tobytes()
    save(tmp_path, [{"w": upper}, {"w": upper}])
    with pytest.raises(FormatError, match="stored by no rank"):
        load(tmp_path, 2)


@pytest.mark.parametrize("cut_in", [1, 2])
def test_different_arrays_under_one_path_are_no_copies(tmp_path: Path, cut_in: int) -> None:
    """Two stages of a pipeline that call their layers alike: each gets its own again, and nobody a wrong one."""
    one = np.arange(4 * 512, dtype="<f8").reshape(4, 512)
    other = one.copy()
    other[-1, -1] += 1
    boxes = [Box((0, 0), (4, 512))] if cut_in == 1 else [Box((0, 0), (2, 512)), Box((2, 0), (2, 512))]
    states = [{"w": Part(array, box)} for array in (one, other) for box in boxes]
    save(tmp_path, states)
    world = len(states)
    for rank, state in enumerate(states):
        part = state["w"]
        found = load(tmp_path, world, rank, like={"w": asked(part.array, part.box)})
        assert found["w"].array.tobytes() == cut(part.array, part.box).tobytes()
    with pytest.raises(FormatError, match=r"^w: ranks .* store different values of the same part"):
        load(tmp_path, world, like={"w": asked(one, Box((1, 0), (3, 512)))})


# -- what is read ------------------------------------------------------------------------------------------------------

ROWS = np.arange(64 * 512, dtype="<f8").reshape(64, 512)  # a row is one chunk of 4096 bytes


def halves(array: np.ndarray) -> list[Part]:
    n = len(array) // 2
    return [Part(array, Box((0, 0), (n, 512))), Part(array, Box((n, 0), (n, 512)))]


def test_only_chunks_with_needed_bytes_are_read(tmp_path: Path) -> None:
    save(tmp_path, [{"w": part, "rank": rank} for rank, part in enumerate(halves(ROWS))])
    for rank, kept in ((0, {31}), (1, {0, 1})):
        path = tmp_path / f"rank-{rank:05d}/slot-000.pcc"
        damage(path, *(format.PAYLOAD_OFFSET + 65536 * i for i in range(32) if i not in kept))
    box = Box((31, 100), (3, 7))
    found = load(tmp_path, 2, like={"w": asked(ROWS, box), "rank": 0})
    np.testing.assert_array_equal(found["w"].array, cut(ROWS, box))
    with pytest.raises(DamagedError) as caught:
        load(tmp_path, 2, like={"w": asked(ROWS, Box((30, 0), (2, 1))), "rank": 0})
    assert caught.value.leaves == ("w",)
    assert "rank-00000" in caught.value.path


def test_a_narrow_column_leaves_out_the_chunks_between(tmp_path: Path) -> None:
    wide = np.arange(8 * 2048, dtype="<f8").reshape(8, 2048)  # a row is four chunks
    save(tmp_path, [{"w": Part(wide, Box((0, 0), (4, 2048)))}, {"w": Part(wide, Box((4, 0), (4, 2048)))}])
    for rank in (0, 1):
        path = tmp_path / f"rank-{rank:05d}/slot-000.pcc"
        damage(path, *(format.PAYLOAD_OFFSET + 65536 * i for i in range(16) if i % 4 != 2))
    box = Box((1, 1100), (6, 300))
    np.testing.assert_array_equal(load(tmp_path, 2, like={"w": asked(wide, box)})["w"].array, cut(wide, box))


def test_the_own_store_is_enough_where_the_parts_are_the_same(tmp_path: Path) -> None:
    states = [{"w": part, "rank": rank} for rank, part in enumerate(halves(ROWS))]
    save(tmp_path, states)
    put(tmp_path, 0, b"\xff" * 70_000)
    loaded = load_world(tmp_path, identity(2), 1, like={"w": asked(ROWS, states[1]["w"].box), "rank": 0})
    np.testing.assert_array_equal(loaded.restored.state["w"].array, ROWS[32:])
    assert loaded.restored.state["rank"] == 1
    assert (loaded.whole, loaded.name, loaded.record.rank) == (True, "slot-000.pcc", 1)
    assert loaded.store == str(tmp_path / "rank-00001")
    with pytest.raises(ReusedError, match="rank 0 does not hold step 10"):
        load(tmp_path, 2, 1)


def test_a_like_that_is_asked_is_asked_once(tmp_path: Path) -> None:
    asked_for: list[Any] = []

    class Asking:
        def __pccheck_like__(self, stored: Any) -> Any:
            asked_for.append(stored)
            return {"w": asked(ROWS, Box.whole(ROWS.shape)), "rank": 0}

    save(tmp_path, [{"w": part, "rank": rank} for rank, part in enumerate(halves(ROWS))])
    np.testing.assert_array_equal(load(tmp_path, 2, like=Asking())["w"].array, ROWS)
    assert len(asked_for) == 1


def test_a_part_of_the_own_store_is_not_all_of_it(tmp_path: Path) -> None:
    save(tmp_path, [{"w": ROWS, "b": np.zeros(9)}])
    whole = load_world(tmp_path, identity(1), 0)
    assert whole.whole
    assert not load_world(tmp_path, identity(1), 0, like={"b": np.zeros(9)}, partial=True).whole


def test_memory_is_the_destination_and_a_bounded_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, [{"w": part, "own": np.zeros(100_000)} for part in halves(ROWS)])
    taken: list[int] = []
    allocate = gathering.allocate

    def counting(length: int, path: str) -> memoryview:
        taken.append(length)
        return allocate(length, path)

    monkeypatch.setattr(gathering, "allocate", counting)
    box = Box((0, 0), (64, 40))
    found = load(tmp_path, 2, like={"w": asked(ROWS, box), "own": np.zeros(0)}, partial=True)
    np.testing.assert_array_equal(found["w"].array, ROWS[:, :40])
    assert sum(taken) <= 64 * 40 * 8 + 2 * 4 * 4096


def test_leaves_that_are_tied_on_all_ranks_come_back_tied(tmp_path: Path) -> None:
    def tie(manifest: dict[str, Any]) -> None:
        first, second = manifest["leaves"]
        second["offset"] = first["offset"]

    n = 4
    boxes = [Box((0, 0), (0, 512)), Box((0, 0), (64, 512))][::-1]
    save(tmp_path, [{"a": Part(ROWS, box), "b": Part(ROWS, box)} for box in boxes], edit=tie)
    for home in (0, 1):  # rank 1 has nothing of them, and cannot tell by itself
        found = load(tmp_path, 2, home)
        assert found["a"] is found["b"]
        part = asked(ROWS, Box((n, 0), (n, 512)))
        found = load(tmp_path, 2, home, like={"a": part, "b": part})
        assert found["a"].array is found["b"].array
        found = load(tmp_path, 2, home, like={"a": part, "b": asked(ROWS, Box((0, 0), (n, 512)))})
        np.testing.assert_array_equal(found["b"].array, ROWS[:n])


def test_what_is_not_stored_in_parts_is_the_home_ranks(tmp_path: Path) -> None:
    save(tmp_path, [{"w": part, "rng": np.full(3, rank), "at": rank} for rank, part in enumerate(halves(ROWS))])
    for home in (0, 1):
        found = load(tmp_path, 2, home)
        assert found["at"] == home
        np.testing.assert_array_equal(found["rng"], np.full(3, home))
        part = load(tmp_path, 2, home, like={"w": ROWS, "rng": asked(np.full(3, 0), Box((1,), (2,))), "at": 0})
        np.testing.assert_array_equal(part["rng"].array, np.full(2, home))
    with pytest.raises(UsageError, match="home_rank=2"):
        load(tmp_path, 2, 2)


# -- what does not go together -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Part(ROWS.astype("<i8"), Box((32, 0), (32, 512))), "dtype is <f8 for rank 0, <i8 for rank 1"),
        (Part(ROWS[:50], Box((32, 0), (18, 512))), r"shape is \(64, 512\) for rank 0, \(50, 512\) for rank 1"),
        (ROWS[32:], "rank 0 stores a part of it, rank 1 an array of its own"),
        (Part(ROWS, Box((31, 0), (33, 512))), "ranks 0 and 1 both store elements"),
        (Part(ROWS, Box((33, 0), (31, 512))), "512 of 32,768 elements .* are stored by no rank"),
    ],
)
def test_clashes_name_path_and_ranks(tmp_path: Path, other: Any, text: str) -> None:
    save(tmp_path, [{"w": halves(ROWS)[0]}, {"w": other}])
    with pytest.raises(FormatError, match=rf"^w: {text}|^w: its {text}"):
        load(tmp_path, 2)


def test_another_kind_and_another_size_of_elements_are_clashes(tmp_path: Path) -> None:
    for name, value, text in (("kind", "torch", "kind is numpy for rank 0"), ("dtype", "V8", "dtype is <f8")):
        save(tmp_path, [{"w": part} for part in halves(ROWS)])

        def change(manifest: dict[str, Any], name: str = name, value: str = value) -> None:
            manifest["leaves"][0][name] = value

        put(tmp_path, 1, file_of({"w": halves(ROWS)[1]}, rank=1, world=2, step=10, edit=change))
        with pytest.raises(FormatError, match=text):
            load(tmp_path, 2)


def test_a_leaf_that_a_rank_lacks_is_a_hole_not_a_crash(tmp_path: Path) -> None:
    save(tmp_path, [{"w": halves(ROWS)[0], "v": 1}, {"v": 1}])
    with pytest.raises(FormatError, match="rank 0 stored any of it, of 1 asked"):
        load(tmp_path, 2)


def test_packed_elements_come_whole_or_not_at_all(tmp_path: Path) -> None:
    def pack(manifest: dict[str, Any]) -> None:
        manifest["leaves"][0].update(dtype="<f4", shape=(100_000,))  # 262,144 bytes

    save(tmp_path, [{"w": ROWS}], edit=pack)
    with pytest.raises(FormatError, match="stored packed, so that"):
        load(tmp_path, 1, like={"w": Shard(np.zeros(4, "<f4"), shape=(100_000,), offsets=(0,))})
    with pytest.raises(FormatError, match="262144 bytes do not make"):
        load(tmp_path, 1, like={"w": np.zeros(100_000, "<f4")})


# -- which are complete ------------------------------------------------------------------------------------------------


def tiny(rank: int, world: int, counter: int, slot: int = 0, **how: Any) -> bytes:
    state = {"w": np.full(3, counter), "rank": rank}
    return file_of(state, rank=rank, world=world, counter=counter, step=10 * counter, slot=slot, **how)


def test_complete_is_what_all_ranks_of_its_own_world_and_incarnation_hold(tmp_path: Path) -> None:
    for rank, counters in enumerate([(5, 7), (5, 6)]):
        for slot, counter in enumerate(counters):
            put(tmp_path, rank, tiny(rank, 2, counter, slot), slot)
    put(tmp_path, 1, tiny(1, 2, 7, 2, incarnation=2), 2)  # the same counter of another life is another checkpoint
    put(tmp_path, 0, tiny(1, 2, 6, 2), 2)  # another rank's file
    listing = look_at_world(tmp_path)
    found = {(c.identity.incarnation, c.identity.counter): (c.complete, c.missing) for c in listing.checkpoints}
    assert found == {(1, 7): (False, (1,)), (2, 7): (False, (0,)), (1, 6): (False, (0,)), (1, 5): (True, ())}
    assert [c.identity for c in world_candidates(tmp_path)] == [identity(2, 5)]
    assert [(s.rank, len(s.listing.files)) for s in listing.stores] == [(0, 3), (1, 3)]


def test_a_root_that_is_a_store_is_the_one_rank_of_its_world(tmp_path: Path) -> None:
    for rank in (0, 1):
        put(tmp_path, rank, tiny(rank, 2, 3))
    (tmp_path / "slot-000.pcc").write_bytes(tiny(0, 1, 4))
    assert [c.identity for c in world_candidates(tmp_path)] == [identity(1, 4), identity(2, 3)]
    with pccheck.open(tmp_path) as seen:
        assert seen.steps() == [30, 40]
        assert seen["w"][0] == 4
    with pytest.raises(OSError, match="missing"):
        look_at_world(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert look_at_world(tmp_path / "empty").checkpoints == ()


def test_filling_and_withdrawn_records_do_not_count(tmp_path: Path) -> None:
    put(tmp_path, 0, tiny(0, 2, 1))
    for state in (SlotState.FILLING, SlotState.WITHDRAWN):
        data = bytearray(tiny(1, 2, 1))
        record = format.unpack_record(data[: format.RECORD_BYTES])
        assert record is not None
        data[: format.RECORD_BYTES] = format.pack_record(replace(record, state=state))
        put(tmp_path, 1, bytes(data))
        assert world_candidates(tmp_path) == []


# -- the view ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two ranks, steps 10 and 20 of both, and step 30 of rank 0 alone: a crash in the middle of its commit."""
    for counter in (1, 2):
        states = [{"w": part, "rank": rank, "b": np.full(3, rank)} for rank, part in enumerate(halves(ROWS + counter))]
        save(tmp_path, states, counter=counter, slot=counter - 1, metadata={"loss": counter})
    data = file_of({"w": halves(ROWS)[0]}, rank=0, world=2, counter=3, step=30, slot=2)
    put(tmp_path, 0, data, 2)
    for rank in (0, 1):
        (tmp_path / f"rank-{rank:05d}" / "CHECK").write_bytes(check_file(word=format.pack_word(2, 1)))
    return tmp_path


@pytest.fixture
def seen(job: Path) -> Iterator[pccheck.View]:
    with pccheck.open(job) as opened:
        yield opened


def test_a_view_of_all_ranks_is_a_view(seen: pccheck.View, job: Path) -> None:
    assert isinstance(seen, pccheck.View)
    assert (seen.steps(), seen.latest(), seen.path) == ([10, 20], 20, str(job))
    assert seen.keys() == list(seen) == ["w", "b"]
    assert "w" in seen
    assert len(seen) == 2
    newest, oldest = seen.checkpoints
    assert (newest.step, newest.metadata, newest.name) == (20, {"loss": 2}, "slot-001.pcc")
    assert oldest.step == 10
    np.testing.assert_array_equal(seen["w"], ROWS + 2)
    np.testing.assert_array_equal(seen["b"], np.zeros(3))
    one = seen.checkpoint(10)
    assert (one.step, one.counter, one.paths(), one.metadata) == (10, 1, ["w", "b"], {"loss": 1})
    np.testing.assert_array_equal(one.state()["w"], ROWS + 1)
    b, w = one.read(["b", "w"])
    np.testing.assert_array_equal(w, ROWS + 1)
    assert b.tolist() == [0, 0, 0]
    assert "2 ranks" in repr(one)
    with pytest.raises(KeyError, match="has no leaf 'W'"):
        one["W"]
    with pytest.raises(UsageError, match="mapped"):
        one.mapped()
    with pytest.raises(StepNotFoundError):
        seen.checkpoint(30)
    with pytest.raises(StepNotFoundError):
        seen.restore(30)


def test_single_leaves_read_only_their_chunks_of_all_ranks(job: Path, seen: pccheck.View) -> None:
    for rank in (0, 1):
        damage(job / f"rank-{rank:05d}/slot-001.pcc", format.PAYLOAD_OFFSET + 32 * 65536)  # where b lies
    np.testing.assert_array_equal(seen["w"], ROWS + 2)
    with pytest.raises(DamagedError):
        seen["b"]


def test_an_array_that_rank_0_has_no_part_of_is_found(tmp_path: Path) -> None:
    first, second = halves(ROWS)
    save(tmp_path, [{"r": 0}, {"stage1": first, "r": 1}, {"stage1": second, "r": 2}])
    with pccheck.open(tmp_path) as seen:
        assert seen.keys() == ["stage1"]
        np.testing.assert_array_equal(seen["stage1"], ROWS)


def test_restore_falls_back_and_says_so(job: Path, seen: pccheck.View) -> None:
    restored = seen.restore()
    assert restored is not None
    assert (restored.step, restored.skipped) == (20, ())
    damage(job / "rank-00001/slot-001.pcc", format.PAYLOAD_OFFSET)
    restored = seen.restore()
    assert restored is not None
    assert restored.step == 10
    np.testing.assert_array_equal(restored.state["w"], ROWS + 1)
    (skipped,) = restored.skipped
    assert (skipped.counter, skipped.step) == (2, 20)
    assert "rank-00001" in skipped.reason
    for how in ({"fallback": False}, {"step": 20}):
        with pytest.raises(DamagedError):
            seen.restore(**how)
    with pytest.raises(MismatchError):
        seen.restore(like={"w": ROWS})
    damage(job / "rank-00000/slot-000.pcc", format.PAYLOAD_OFFSET)
    with pytest.raises(NoValidCheckpointError, match="rank-00000"):
        seen.restore()


def test_what_was_agreed_and_is_lost_is_an_error_or_is_told(job: Path, seen: pccheck.View) -> None:
    (job / "rank-00001/slot-001.pcc").unlink()
    restored = seen.restore()
    assert restored is not None
    assert restored.step == 10
    assert [(s.counter, s.reason) for s in restored.skipped if s.counter == 2 and "lack" in s.reason] == [
        (2, "rank 1 lacks it")
    ]
    (job / "rank-00001/slot-000.pcc").unlink()
    with pytest.raises(NoValidCheckpointError):
        seen.restore()
    for path in job.rglob("CHECK"):
        path.unlink()
    assert seen.restore() is None, "nothing tells that any of these was ever agreed"


def test_an_abandoned_branch_is_had_by_step_only(job: Path, seen: pccheck.View) -> None:
    left = check_file(word=format.pack_word(2, 1), abandoned=Abandoned(sequence=1, ranges=((2, 3),)))
    (job / "rank-00001/CHECK").write_bytes(left)
    assert seen.steps() == [10]
    restored = seen.restore()
    assert restored is not None
    assert restored.step == 10
    by_step = seen.restore(20)
    assert by_step is not None
    assert by_step.step == 20


def test_a_kept_copy_stands_in_for_a_damaged_slot(job: Path, seen: pccheck.View) -> None:
    kept = job / "rank-00001" / format.kept_name(20, 2)
    kept.parent.mkdir()
    kept.write_bytes((job / "rank-00001/slot-001.pcc").read_bytes())
    damage(job / "rank-00001/slot-001.pcc", format.PAYLOAD_OFFSET)
    restored = seen.restore()
    assert restored is not None
    assert restored.step == 20


def test_one_ranks_store_shows_its_parts(job: Path) -> None:
    with pccheck.open(job / "rank-00001") as one:
        part = one["w"]
        assert type(part) is Shard
        assert (part.shape, part.offsets) == ((64, 512), (32, 0))
        np.testing.assert_array_equal(part.array, ROWS[32:] + 2)
        restored = one.restore()
        assert restored is not None
        assert restored.state["w"].box == Box((32, 0), (32, 512))
        inner = one.restore(like={"w": asked(ROWS, Box((40, 3), (2, 5))), "rank": 0, "b": np.zeros(3, int)})
        assert inner is not None
        np.testing.assert_array_equal(inner.state["w"].array, (ROWS + 2)[40:42, 3:8])
        with pytest.raises(MismatchError, match=r"w: part is \[32:64, 0:512\] in the checkpoint, \[0:64, 0:512\]"):
            one.restore(like={"w": ROWS, "rank": 0, "b": np.zeros(3, int)})
        with pytest.raises(UsageError, match="parts of arrays cannot be mapped"):
            one.checkpoint().mapped(like={"w": asked(ROWS, Box((40, 3), (2, 5))), "rank": 0, "b": np.zeros(3, int)})


def test_an_array_in_another_order_that_one_rank_stores_for_all(tmp_path: Path) -> None:
    """Divided arrays that are not in C order are whole on one rank: box and strides together."""
    array = np.arange(24.0).reshape(2, 3, 4)
    stored = np.ascontiguousarray(array.transpose(2, 0, 1))  # how its bytes lie

    def as_one(manifest: dict[str, Any]) -> None:
        manifest["leaves"][0].update(shape=(2, 3, 4), box=((0, 0, 0), (2, 3, 4)), extra={"stride": [3, 1, 6]})

    for rank in (0, 1):
        state = {"w": stored} if rank else {"w": Part(array, Box((0, 0, 0), (0, 0, 0)))}
        edit = as_one if rank else lambda manifest: None
        put(tmp_path, rank, file_of(state, rank=rank, world=2, step=10, edit=edit))
    box = Box((1, 0, 1), (1, 2, 3))
    for home in (0, 1):
        np.testing.assert_array_equal(load(tmp_path, 2, home)["w"], array)
        np.testing.assert_array_equal(load(tmp_path, 2, home, like={"w": array})["w"], array)
        found = load(tmp_path, 2, home, like={"w": asked(array, box)})["w"]
        np.testing.assert_array_equal(found.array, cut(array, box))
    with pccheck.open(tmp_path) as seen:
        np.testing.assert_array_equal(seen["w"], array)
    with pccheck.open(tmp_path / "rank-00001") as one:
        np.testing.assert_array_equal(one["w"], array)
        np.testing.assert_array_equal(one.checkpoint().state()["w"], array)
        np.testing.assert_array_equal(one.checkpoint().state(like={"w": array})["w"], array)
        whole = one.checkpoint().state(like={"w": asked(array, Box.whole(array.shape))})
        np.testing.assert_array_equal(whole["w"].array, array)
    with pccheck.open(tmp_path / "rank-00000") as one:
        assert one["w"].array.shape == (0, 0, 0)


# -- one store, of which a part is wanted ------------------------------------------------------------------------------


def test_like_reads_only_what_it_asks_for(tmp_path: Path) -> None:
    (tmp_path / "slot-000.pcc").write_bytes(file_of({"w": ROWS, "b": np.arange(600.0), "c": np.arange(3.0)}))
    damage(tmp_path / "slot-000.pcc", *(format.PAYLOAD_OFFSET + 65536 * i for i in range(64) if i not in (5, 6)))
    with pccheck.open(tmp_path) as seen:
        restored = seen.restore(like={"b": np.zeros(600), "c": np.zeros(3)}, partial=True)
        assert restored is not None
        np.testing.assert_array_equal(restored.state["b"], np.arange(600.0))
        assert [m.path for m in restored.mismatches] == ["w"]
        rows = asked(ROWS, Box((5, 0), (2, 512)))
        restored = seen.restore(like={"w": rows, "b": np.zeros(600), "c": np.zeros(3)})
        assert restored is not None
        np.testing.assert_array_equal(restored.state["w"].array, ROWS[5:7])
        with pytest.raises(NoValidCheckpointError):
            seen.restore()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_boxes_of_arrays_that_are_in_another_order(tmp_path: Path, order: tuple[int, int, int]) -> None:
    array = np.arange(9 * 70 * 11, dtype="<f4").reshape(9, 70, 11)
    with pccheck.Checkpointer(tmp_path, chunk_bytes=4096) as ck:
        stored = np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))
        ck.save(1, {"w": stored}).durable.result()
        box = Box((2, 5, 3), (6, 60, 4))
        restored = ck.restore(like={"w": asked(array, box)})
        assert restored is not None
        np.testing.assert_array_equal(restored.state["w"].array, cut(array, box))
        whole = ck.restore(like={"w": Shard(array, shape=array.shape, offsets=(0, 0, 0))})
        assert whole is not None
        np.testing.assert_array_equal(whole.state["w"].array, array)


@pytest.mark.parametrize("partial", [True, False])
def test_what_was_restored_in_part_does_not_count_as_verified(tmp_path: Path, partial: bool) -> None:
    """Its unread half is damaged: the older checkpoint, which is whole, must not be overwritten for it."""
    state = {"a": np.zeros(4096), "b": np.zeros(4096)}
    with pccheck.Checkpointer(tmp_path, in_flight=1, keep=1, chunk_bytes=4096) as ck:
        for step in (1, 2):
            ck.save(step, state).durable.result()
    with pccheck.open(tmp_path) as seen:
        name = seen.checkpoints[0].name
    damage(tmp_path / name, format.PAYLOAD_OFFSET + 65536 * 10)  # in b
    with pccheck.Checkpointer(tmp_path, in_flight=1, keep=1, chunk_bytes=4096) as ck:
        restored = ck.restore(like={"a": np.zeros(4096)}, partial=True) if partial else ck.restore()
        assert restored is not None
        assert restored.step == (2 if partial else 1)
        ck.save(3, state).durable.result()
    with pccheck.open(tmp_path) as seen:
        assert seen.steps() == [1, 3]
