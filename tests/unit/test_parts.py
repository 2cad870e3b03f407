"""Leaves of several parts: planned, stored, put together, and asked for as any boxes."""

from __future__ import annotations

import gc
import itertools
import weakref

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pccheck
from pccheck import Shard, format
from pccheck.errors import FormatError, MismatchError, UnsupportedLeafError, UsageError
from pccheck.leaves import StoredLeaf
from pccheck.reading import gathering
from pccheck.reading.loading import load_world
from pccheck.reading.restoring import assemble, fitting, load_newest
from pccheck.reading.world import WorldIdentity
from pccheck.state import manifest
from pccheck.state.assigning import Assigning
from pccheck.state.boxes import Box
from pccheck.state.owning import NOBODY
from pccheck.state.planner import Planner
from pccheck.testing.slotfiles import check_file
from tests.unit.captured import slot_of, space_of
from tests.unit.split_arrays import Abstract, Bag, Split, Table, cut

CHUNK = 4096
ROWS = np.arange(64 * 48, dtype="<f4").reshape(64, 48)
TOP, BOTTOM = Box((0, 0), (32, 48)), Box((32, 0), (32, 48))
QUARTERS = [Box((r, c), (32, 24)) for r in (0, 32) for c in (0, 24)]


def prepared(state, table=None, **how):
    return Planner(table or Table(), CHUNK, **how).prepare(state, step=10)


def put(folder, state, table=None, rank=0, world=1):
    folder.mkdir(exist_ok=True)
    (folder / "slot-000.pcc").write_bytes(slot_of(prepared(state, table, rank=rank, world=world), rank, world))
    (folder / "CHECK").write_bytes(check_file(word=format.pack_word(1, 0)))
    return folder


def restored(folder, like=None, table=None, partial=False):
    table = table or Table()
    with pccheck.open(folder) as view:
        loaded = load_newest(view._look, view._open, where=str(folder), accept=fitting(like, table, partial=partial))
        return assemble(loaded, table, like=like, partial=partial)


@pytest.fixture
def chunks_read(monkeypatch):
    read, real = [], gathering.read_chunks

    def counting(medium, chunks, *rest):
        read.extend(chunk.start // CHUNK for chunk in chunks)
        return real(medium, chunks, *rest)

    monkeypatch.setattr(gathering, "read_chunks", counting)
    monkeypatch.setattr("pccheck.reading.reader.read_chunks", counting)
    return read


# -- planning ----------------------------------------------------------------------------------------------------------


def entries(state):
    return entries_of(prepared(state))


def entries_of(ready):
    digests = bytes(16 * len(ready.layout.chunks))
    data = ready.encode_manifest(counter=1, incarnation=1, rank=0, world=1, base=0, digests=digests)
    return ready, manifest.decode(data)


def test_a_part_is_an_entry_and_the_tree_names_the_first():
    w = Split.of(ROWS, TOP, BOTTOM)
    ready, found = entries({"a": np.ones(3), "w": w, "z": [Split.of(ROWS[:2], Box((0, 0), (2, 48))), 1.5]})
    assert [(e.path, e.box) for e in found.leaves] == [
        ("a", None), ("w", (TOP.offsets, TOP.sizes)), ("w", (BOTTOM.offsets, BOTTOM.sizes)),
        ("z/0", ((0, 0), (2, 48))),
    ]  # fmt: skip
    assert found.tree.items[1][1].index == 1
    assert found.tree.items[2][1].items[0].index == 3
    assert [int(a) for a in ready.addresses[1:3]] == [part.ctypes.data for part in w.parts.values()]
    assert list(ready.piece_paths) == ["a", "w", "w", "z/0"]


def test_later_saves_prove_the_same_plan_and_follow_the_memory():
    table = Table()
    planner = Planner(table, CHUNK)
    state = {"w": Split.of(ROWS, TOP, BOTTOM), "v": Split.of(ROWS + 1, TOP, BOTTOM), "lr": 0.5}
    first = planner.prepare(state, step=1)
    again = planner.prepare({**state, "w": Split.of(ROWS * 2, TOP, BOTTOM), "lr": 0.25}, step=2)
    assert again.layout is first.layout, "the plan is kept"
    assert space_of(again)[: ROWS.nbytes] == (ROWS * 2).tobytes()
    other = planner.prepare({**state, "w": Split.of(ROWS, *QUARTERS)}, step=3)
    assert len(other.layout.pieces) == 6
    assert len(planner.prepare(state, step=4).layout.pieces) == 4


def test_equal_leaves_are_tied_as_a_whole_or_not_at_all():
    w = Split.of(ROWS, TOP, BOTTOM)
    twin = Split(w.shape, w.parts)
    half = Split(w.shape, {TOP: w.parts[TOP], BOTTOM: w.parts[BOTTOM].copy()})
    ready, found = entries({"w": w, "twin": twin, "half": half})
    places = {}
    for e in found.leaves:
        places.setdefault(e.path, []).append(e.offset)
    assert places["w"] == places["twin"]
    assert len(ready.layout.pieces) == 4
    assert not set(places["half"]) & set(places["w"])


class Everything:
    """A guard that owns one leaf."""

    def __init__(self, owned):
        self.owned = owned

    def version(self):
        return 1

    def owners(self, kind, values):
        return [0 if kind == "split" and value is self.owned else -1 for value in values]


def test_every_part_has_the_owner_of_its_leaf():
    w, v = Split.of(ROWS, TOP, BOTTOM), Split.of(ROWS, *QUARTERS)
    ready = Planner(Table(), CHUNK).prepare({"w": w, "v": v}, step=1, guard=Everything(w))
    assert ready.owners.tolist() == [0, 0] + [NOBODY] * 4
    assert ready.unowned.host.tolist() == [2, 3, 4, 5]


def test_parts_that_make_no_array_are_refused_with_their_path():
    for boxes in ((TOP, Box((16, 0), (32, 48))), (TOP, TOP)):
        bad = Split(ROWS.shape, {box: cut(ROWS, box).copy() for box in boxes})
        bad.parts = Twice([(box, cut(ROWS, box).copy()) for box in boxes])
        with pytest.raises(UnsupportedLeafError, match="overlap") as caught:
            prepared({"m": [bad]})
        assert caught.value.path == "m/0"
    with pytest.raises(UnsupportedLeafError, match="1,024") as caught:
        prepared({"m": Split.of(np.zeros(1025), *[Box((n,), (1,)) for n in range(1025)])})
    gone = Split.of(ROWS, TOP, BOTTOM)
    gone.deleted = True
    with pytest.raises(UnsupportedLeafError, match="deleted") as caught:
        prepared({"m": gone})
    assert caught.value.path == "m"
    with pytest.raises(UnsupportedLeafError, match="spread over several devices"):
        prepared({"m": Shard(Split.of(ROWS, TOP, BOTTOM), shape=(64, 96), offsets=(0, 0))})


class Twice(list):
    """Parts of which two may be the same."""

    def items(self):
        return iter(self)


# -- holding -----------------------------------------------------------------------------------------------------------


def test_what_holds_the_memory_is_kept_as_long_as_it_is_captured():
    table = Table()
    planner = Planner(table, CHUNK)
    state = {"w": Split.of(ROWS, TOP, BOTTOM), "x": Split.of(ROWS, Box.whole(ROWS.shape)), "n": np.ones(4)}
    ready = planner.prepare(state, step=1)
    del table.kind.held[:], table.kind.asked[:]
    del ready
    ready = planner.prepare(state, step=2)
    asked = table.kind.asked
    for number in (0, 1):  # the leaf in one part is asked of the kind itself, which asks its first part
        mine = [what for what, n in asked if n == number]
        assert mine == ["fingerprint", "hold", "addresses"] * (2 - number)
    assert sorted(len(held.values) for held in table.kind.held) == [1, 1, 1]
    alive = [weakref.ref(held) for held in table.kind.held]
    table.kind.held.clear()
    gc.collect()
    assert all(ref() is not None for ref in alive)
    ready.keep = None
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_what_is_copied_is_not_held():
    table = Table()
    planner = Planner(table, CHUNK)
    state = {"s": Shard(np.ones((4, 4))[:, ::2], shape=(4, 2), offsets=(0, 0)), "t": "x" * 5000}
    planner.prepare(state, step=1)
    planner.prepare(state, step=2)
    assert not table.kind.held


@pytest.mark.parametrize(
    "form", [lambda array: array, lambda array: Shard(array, shape=(8, 4), offsets=(0, 0))], ids=["plain", "shard"]
)
@pytest.mark.parametrize("odd", [np.ones((4, 8), "<f4")[:, ::2], np.ones((0, 4), "<f4")], ids=["strided", "empty"])
def test_what_is_not_read_in_place_is_compared_beside_what_is(form, odd):
    planner = Planner(Table(), CHUNK)
    state = {"a": form(np.ones((4, 4))), "s": form(odd), "b": form(np.ones((4, 4)))}
    planner.prepare(state, step=1)
    _, found = entries_of(planner.prepare({**state, "s": form(odd.view("<i4"))}, step=2))
    assert [e.dtype for e in found.leaves] == ["<f8", "<i4", "<f8"]


def test_a_leaf_that_cannot_be_held_is_told_of_when_it_is_planned_anew():
    table = Table()
    planner = Planner(table, CHUNK)
    state = {"w": Split.of(ROWS, TOP, BOTTOM)}
    planner.prepare(state, step=1)
    state["w"].deleted = True
    with pytest.raises(UnsupportedLeafError, match="deleted"):
        planner.prepare(state, step=2)


# -- restoring ---------------------------------------------------------------------------------------------------------


def test_parts_that_make_the_whole_come_back_whole(tmp_path):
    state = {"a": np.ones(3), "w": Split.of(ROWS, *QUARTERS), "e": Split.of(np.zeros((0, 3)), Box.whole((0, 3)))}
    store = put(tmp_path / "s", state)
    found = restored(store)
    assert type(found.state["w"]) is Split
    assert (found.state["w"].whole() == ROWS).all()
    assert found.state["e"].whole().shape == (0, 3)
    with pccheck.open(store) as view:  # which knows nothing of this framework
        assert list(view) == view.checkpoint().paths() == ["a", "w", "e"]
        assert (view["w"] == ROWS).all()
        assert view["w"].dtype == np.dtype("<f4")
        assert (view.checkpoint().state()["w"] == ROWS).all()
        first, second = view.checkpoint().read(["w", "w"])
        assert first is second
        with pytest.raises(UsageError, match="cannot be mapped"):
            view.checkpoint().mapped()
    outline = pccheck.outline(store)
    leaf = outline.trees[0]["w"]
    assert (leaf.spec.shape, leaf.spec.box, leaf.spec.nbytes, leaf.boxes) == (ROWS.shape, None, ROWS.nbytes, ())
    assert (outline.restore().state["w"] == ROWS).all()
    assert (outline.restore(like=outline.trees[0]).state["w"] == ROWS).all()


def test_parts_of_which_some_are_elsewhere_come_back_as_shards(tmp_path):
    state = {
        "w": Split.of(ROWS, *QUARTERS[1:]),
        "one": Split.of(ROWS, TOP),
        "n": 1,
        "none": Split(ROWS.shape, {}, "f8"),
    }
    store = put(tmp_path / "s", state)

    def check(found):
        assert [shard.box for shard in found["w"]] == QUARTERS[1:]
        assert all((shard.array == cut(ROWS, shard.box)).all() for shard in found["w"])
        assert (found["one"].array == cut(ROWS, TOP)).all()
        assert found["none"].array.shape == (0, 0)

    with pccheck.open(store) as view:
        check(view.checkpoint().state())
        check(view.restore().state)
        check({path: view[path] for path in view})
        stored = StoredLeaf("", None)
        check(view.restore(like={"w": stored, "one": stored, "n": 0, "none": stored}).state)
    like = Abstract(ROWS.shape, "f4", Box((32, 8), (32, 24)), Box((40, 8), (1, 1)))
    found = restored(store, {"w": like, "one": ..., "n": ..., "none": ...}).state
    assert (found["w"].parts[like.boxes[0]] == cut(ROWS, like.boxes[0])).all()
    with pytest.raises(
        MismatchError, match=r"w: part is \[0:32, 24:48\], \[32:64, 0:24\], .* in the checkpoint, \[0:33"
    ):
        restored(store, {"w": Abstract(ROWS.shape, "f4", Box((0, 0), (33, 24))), "one": ..., "n": ..., "none": ...})
    leaf = pccheck.outline(store).trees[0]["w"]
    assert (leaf.spec.box, leaf.boxes) == (QUARTERS[1], tuple(QUARTERS[1:]))


@pytest.mark.parametrize("whole", [Box.whole(ROWS.shape), None])
def test_only_chunks_with_needed_bytes_are_read(tmp_path, chunks_read, whole):
    boxes = QUARTERS if whole is None else [whole]
    store = put(tmp_path / "s", {"w": Split.of(ROWS, *boxes), "x": np.ones(4000)})
    wanted = Box((40, 30), (2, 3))
    found = restored(store, {"w": Abstract(ROWS.shape, "f4", wanted, wanted), "x": ...}).state
    assert [*found["w"].parts] == [wanted]
    assert (found["w"].parts[wanted] == cut(ROWS, wanted)).all()
    assert found["x"] is ...
    offset = (40 * 48 if whole else 3 * 32 * 24 + 8 * 24) * 4
    assert chunks_read == [offset // CHUNK], "equal boxes are read once"
    chunks_read.clear()
    with pccheck.open(store) as view:
        assert (view["w"] == ROWS).all()
    assert sorted(chunks_read) == [0, 1, 2]


def test_equal_boxes_are_read_in_place_and_joined_in_their_order(tmp_path):
    table, seen = Table(), []
    store = put(tmp_path / "s", {"w": Split.of(ROWS, TOP, BOTTOM)})
    join = table.kind.join
    table.kind.join = lambda values, like: seen.append(values) or join(values, like)
    restored(store, {"w": Abstract(ROWS.shape, "f4", BOTTOM, TOP, BOTTOM)}, table)
    ((a, b, c),) = seen
    assert a is c
    assert [(v.whole() == cut(ROWS, box)).all() for v, box in ((a, BOTTOM), (b, TOP))] == [True, True]


def test_nothing_is_wanted_by_who_holds_nothing(tmp_path, chunks_read):
    store = put(tmp_path / "s", {"w": Split.of(ROWS, TOP, BOTTOM)})
    found = restored(store, {"w": Abstract(ROWS.shape, "f4")}).state
    assert (found["w"].parts, found["w"].shape, chunks_read) == ({}, ROWS.shape, [])
    empty = Box((5, 0), (0, 48))
    found = restored(store, {"w": Abstract(ROWS.shape, "f4", empty)}).state
    assert found["w"].parts[empty].shape == (0, 48)
    assert chunks_read == []


def test_tied_leaves_stay_tied(tmp_path):
    w = Split.of(ROWS, TOP, BOTTOM)
    store = put(tmp_path / "s", {"a": w, "b": w, "c": Split.of(ROWS, TOP, BOTTOM)})
    found = restored(store).state
    assert found["a"] is found["b"]
    assert found["c"] is not found["a"]
    like = {name: Abstract(ROWS.shape, "f4", *QUARTERS) for name in "abc"}
    found = restored(store, like).state
    assert found["a"] is found["b"]
    assert found["c"] is not found["a"]
    assert (found["c"].whole() == ROWS).all()


def test_a_leaf_that_shares_one_part_only_has_its_own_values(tmp_path):
    w = Split.of(ROWS, TOP, BOTTOM)
    half = Split(w.shape, {TOP: w.parts[TOP], BOTTOM: w.parts[BOTTOM] + 1})
    found = restored(put(tmp_path / "s", {"w": w, "half": half})).state
    assert (found["half"].whole() == half.whole()).all()
    assert (found["w"].whole() == ROWS).all()


@pytest.mark.parametrize("order", ["C", "F"])
def test_other_kinds_are_read_in_boxes_too(tmp_path, order):
    store = put(tmp_path / "s", {"w": np.asarray(ROWS, order=order)})
    found = restored(store, {"w": Abstract(ROWS.shape, "f4", *QUARTERS[::-1])}).state["w"]
    assert (found.whole() == ROWS).all()
    assert [*found.parts] == QUARTERS[::-1]
    other = put(tmp_path / "o", {"w": Split.of(ROWS, *QUARTERS)})
    plain = restored(other, {"w": np.zeros(ROWS.shape, "<f4")}).state["w"]
    assert type(plain) is np.ndarray
    assert (plain == ROWS).all()
    part = Box((10, 10), (40, 30))
    shard = Shard(np.zeros(part.sizes, "<f4"), shape=ROWS.shape, offsets=part.offsets)
    assert (restored(other, {"w": shard}).state["w"].array == cut(ROWS, part)).all()


def test_a_kind_that_casts_may_ask_for_another_dtype_and_no_other(tmp_path):
    store = put(tmp_path / "s", {"w": Split.of(ROWS, TOP, BOTTOM), "n": ROWS, "i": np.arange(4)})
    boxes = [Box.whole(ROWS.shape)]
    like = {"w": Abstract(ROWS.shape, "f8", *QUARTERS), "n": Abstract(ROWS.shape, "f2", *boxes), "i": ...}
    found = restored(store, like).state
    assert (found["w"].dtype, found["n"].dtype) == (np.dtype("f8"), np.dtype("f2"))
    assert (found["w"].whole() == ROWS).all()
    assert (found["n"].whole() == ROWS.astype("f2")).all()
    with pytest.raises(MismatchError) as caught:
        restored(
            store, {"w": np.zeros(ROWS.shape, "f8"), "n": ROWS.astype("f2"), "i": Abstract((4,), "f4", Box((0,), (4,)))}
        )
    assert [(m.path, m.problem) for m in caught.value.mismatches] == [("w", "dtype"), ("n", "dtype"), ("i", "dtype")]
    with pytest.raises(MismatchError, match="shape"):
        restored(store, {"w": Abstract((48, 64), "f4", Box.whole((48, 64))), "n": ..., "i": ...})
    with pytest.raises(MismatchError, match="w: part is"):
        restored(store, {"w": Abstract(ROWS.shape, "f4", Box((60, 0), (8, 1))), "n": ..., "i": ...})


def test_load_into_tells_that_these_cannot_be_written(tmp_path):
    w = Split.of(ROWS, TOP, BOTTOM)
    state = restored(put(tmp_path / "s", {"w": w, "n": np.ones(3), "left": 2})).state
    target = {"w": Split.of(ROWS, TOP, BOTTOM), "n": np.zeros(3), "left": 1}
    table = Table()
    table.kind.assignable = lambda target: False
    found = Assigning(table, target, {**state, "left": ...})
    assert [(m.path, m.problem) for m in found.mismatches] == [("w", "kind")]
    found.carry_out()
    assert (target["n"] == 1).all()
    assert target["left"] == 1, "what was left out of the restore stays"


def test_a_tied_target_needs_a_tied_checkpoint(tmp_path):
    class Assignable(Table):
        def __init__(self):
            super().__init__()
            self.kind.assign = lambda target, value: target.parts.update(value.parts)

    w, target = Split.of(ROWS, TOP, BOTTOM), Split.of(ROWS * 0, TOP, BOTTOM)
    tied = {"a": w, "b": Split(w.shape, w.parts)}
    apart = {"a": w, "b": Split.of(ROWS, TOP, BOTTOM)}
    assert not Assigning(Assignable(), {"a": target, "b": target}, tied).mismatches
    found = Assigning(Assignable(), {"a": target, "b": target}, apart).mismatches
    assert [(m.path, m.problem) for m in found] == [("b", "tied")]


# -- several ranks -----------------------------------------------------------------------------------------------------

COLUMNS = [Box((0, 12 * n), (64, 12)) for n in range(4)]


def world(root, states):
    for rank, state in enumerate(states):
        put(root / f"rank-{rank:05}", state, rank=rank, world=len(states))
    return WorldIdentity(1, 1, 10, len(states))


def test_a_leaf_in_parts_over_ranks_is_put_together(tmp_path, chunks_read):
    states = [{"w": Split.of(ROWS, *COLUMNS[2 * r : 2 * r + 2]), "r": r, "v": Split.of(ROWS, TOP)} for r in range(2)]
    states[1]["v"] = Split.of(ROWS, BOTTOM)
    identity = world(tmp_path, states)
    for home in (0, 1):
        found = load_world(tmp_path, identity, home, kinds=Table()).restored.state
        assert (found["w"].whole() == ROWS).all()
        assert (found["v"].whole() == ROWS).all()
        assert found["r"] == home
    for boxes in (QUARTERS, COLUMNS, [Box((3, 3), (50, 40)), Box((60, 0), (1, 48))]):
        like = {"w": Abstract(ROWS.shape, "f8", *boxes), "r": 0, "v": ...}
        found = load_world(tmp_path, identity, 1, like=like, kinds=Table()).restored.state["w"]
        assert all((found.parts[box] == cut(ROWS, box)).all() for box in boxes)
    with pccheck.open(tmp_path) as view:
        assert view.keys() == ["w", "v"]
        assert (view["w"] == ROWS).all()
    chunks_read.clear()
    (tmp_path / "rank-00000" / "slot-000.pcc").rename(tmp_path / "rank-00000" / "gone")
    like = {"w": Abstract(ROWS.shape, "f4", *COLUMNS[2:], Box((0, 20), (1, 20))), "r": 0, "v": ...}
    own = {**like, "w": Abstract(ROWS.shape, "f4", *COLUMNS[2:], Box((8, 30), (9, 12)))}
    found = load_world(tmp_path, identity, 1, like=own, kinds=Table()).restored.state["w"]
    assert (found.parts[COLUMNS[3]] == cut(ROWS, COLUMNS[3])).all(), "who has all parts needs no other rank"
    with pytest.raises(pccheck.errors.ReusedError):
        load_world(tmp_path, identity, 1, like=like, kinds=Table())


def test_a_part_that_lacks_is_named(tmp_path):
    identity = world(tmp_path, [{"w": Split.of(ROWS, *COLUMNS[:2])}, {"w": Split.of(ROWS, COLUMNS[2])}])
    with pytest.raises(FormatError, match=r"w: 768 of 3,072 elements"):
        load_world(tmp_path, identity, 0, kinds=Table())
    found = load_world(tmp_path, identity, 0, like={"w": Abstract(ROWS.shape, "f4", COLUMNS[2])}, kinds=Table())
    assert (found.restored.state["w"].parts[COLUMNS[2]] == cut(ROWS, COLUMNS[2])).all()


@st.composite
def partitions(draw):
    """Cut an array by random borders, and give its boxes to ranks."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    boxes = [
        Box(tuple(a for a, _ in at), tuple(b - a for a, b in at))
        for at in itertools.product(*(list(itertools.pairwise(c)) for c in cuts))
    ]
    ranks = draw(st.lists(st.integers(0, 2), min_size=len(boxes), max_size=len(boxes)))
    wanted = [
        Box(tuple(offsets), tuple(draw(st.integers(0, n - o)) for o, n in zip(offsets, shape, strict=True)))
        for offsets in draw(st.lists(st.tuples(*(st.integers(0, n) for n in shape)), max_size=3))
    ]
    return shape, boxes, ranks, wanted


@settings(max_examples=60, deadline=None)
@given(partitions(), st.integers(0, 2))
def test_any_partition_gives_any_boxes(tmp_path_factory, how, home):
    shape, boxes, ranks, wanted = how
    array, root = np.random.default_rng(1).random(shape), tmp_path_factory.mktemp("w")
    states = [
        {"w": Split.of(array, *(box for box, r in zip(boxes, ranks, strict=True) if r == rank)), "n": rank}
        for rank in range(3)
    ]
    identity = world(root, states)
    found = load_world(root, identity, home, kinds=Table()).restored.state["w"]
    assert (found.whole() == array).all()
    like = {"w": Abstract(shape, "f8", *wanted), "n": 0}
    found = load_world(root, identity, home, like=like, kinds=Table()).restored.state["w"]
    assert all((found.parts[box] == cut(array, box)).all() for box in wanted)


# -- what a file claims ------------------------------------------------------------------------------------------------


def encoded(state):
    ready = prepared(state)
    digests = bytes(16 * len(ready.layout.chunks))
    data = ready.encode_manifest(counter=1, incarnation=1, rank=0, world=1, base=0, digests=digests)
    return msgspec.json.decode(data)


def leaf(number, **changes):
    return lambda m: m["leaves"][number].update(changes)


def swap(m):
    m["leaves"][1], m["leaves"][3] = m["leaves"][3], m["leaves"][1]


def share(m):
    """Have the second leaf of two parts name one part of the first."""
    m["leaves"][3]["offset"] = m["leaves"][1]["offset"]


WRONG = {
    "parts apart": swap,
    "part without box": lambda m: m["leaves"][2].pop("box"),
    "first without box": lambda m: m["leaves"][1].pop("box"),
    "another kind": leaf(2, kind="numpy"), "another dtype": leaf(2, dtype="int32"),
    "another shape": leaf(2, shape=[64, 49]), "another extra": leaf(2, extra={"a": 1}),
    "equal boxes": leaf(2, box=[[0, 0], [32, 48]]), "overlap": leaf(2, box=[[31, 0], [32, 48]]),
    "elements of another size": leaf(2, box=[[48, 0], [16, 48]]),
    "shared bytes": lambda m: m["leaves"][2].update(offset=m["leaves"][1]["offset"]),
    "shares one part": share,
    "a plain leaf in its bytes": lambda m: m["leaves"][0].update(
        offset=m["leaves"][1]["offset"], nbytes=m["leaves"][1]["nbytes"]
    ),
    "the tree names a further part": lambda m: m["tree"]["items"][1].__setitem__(1, {"is": "leaf", "index": 2}),
    "the tree names all parts": lambda m: m["tree"]["items"].insert(2, ["x", {"is": "leaf", "index": 2}]),
    "one part is another leaf": leaf(2, path="x"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_claim_is_a_format_error(case):
    state = {"a": np.ones(3), "w": Split.of(ROWS, TOP, BOTTOM), "v": Split.of(ROWS, TOP, BOTTOM)}
    claimed = encoded(state)
    manifest.decode(msgspec.json.encode(claimed))
    WRONG[case](claimed)
    with pytest.raises(FormatError):
        manifest.decode(msgspec.json.encode(claimed))


def test_tied_parts_in_another_order_are_a_format_error():
    w = Split.of(ROWS, TOP, BOTTOM)
    claimed = encoded({"w": w, "v": w})
    manifest.decode(msgspec.json.encode(claimed))
    a, b = claimed["leaves"][2:]
    a["box"], b["box"] = b["box"], a["box"]
    with pytest.raises(FormatError, match="shares some"):
        manifest.decode(msgspec.json.encode(claimed))


def test_parts_without_end_are_a_format_error():
    claimed = encoded({"w": Split.of(np.zeros(1024), *[Box((n,), (1,)) for n in range(1024)])})
    manifest.decode(msgspec.json.encode(claimed))
    claimed["leaves"] += [{**claimed["leaves"][0], "nbytes": 0, "box": [[0], [0]]}]
    with pytest.raises(FormatError, match="1024"):
        manifest.decode(msgspec.json.encode(claimed))


def test_parts_and_containers_together(tmp_path):
    table = Table()
    state = Bag("kept", w=Split.of(ROWS, *QUARTERS), n=3)
    store = put(tmp_path / "s", state, table)
    assert (restored(store).state["w"].whole() == ROWS).all()
    like = Bag("of like", w=Abstract(ROWS.shape, "f4", TOP, BOTTOM), n=0)
    found = restored(store, like).state
    assert (type(found), found.static, found.items["n"]) == (Bag, "of like", 3)
    assert (found.items["w"].whole() == ROWS).all()
