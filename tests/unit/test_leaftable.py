"""What a prepared state knows beyond addresses: whose the bytes are, what lies on devices, what can be copied aside."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from pccheck.state.kinds import kind_of
from pccheck.state.owning import NEVER, NOBODY
from pccheck.state.planner import Planner
from pccheck.state.shards import Shard
from tests.unit.device_arrays import Device, DeviceArray, Table

CHUNK = 4096


def copier(addresses, lengths, targets):
    for source, length, target in zip(addresses.tolist(), lengths.tolist(), targets.tolist(), strict=True):
        ctypes.memmove(target, source, length)


def space_of(prepared):
    """The byte space as a pipeline captures it, devices included."""
    layout, filler = prepared.layout, prepared.filler
    space = np.zeros(len(layout.chunks) * layout.chunk_bytes, np.uint8)
    for piece, address in zip(layout.pieces, prepared.addresses, strict=True):
        if piece.length and address:
            space[piece.offset : piece.offset + piece.length] = np.frombuffer(
                ctypes.string_at(int(address), piece.length), np.uint8
            )
    for n in range(len(layout.chunks)):
        if filler is not None and filler.has(n):
            at = space.ctypes.data + n * layout.chunk_bytes
            assert filler.fill(n, at, layout.chunk_bytes).wait(60)
    if filler is not None:
        filler.end()
    return space


def bytes_at(prepared, space, path):
    piece = prepared.layout.pieces[list(prepared.piece_paths).index(path)]
    return space[piece.offset : piece.offset + piece.length].tobytes()


class Owners:
    """A guard that owns arrays by address."""

    def __init__(self, owned):
        self.owned, self.asked, self.now = owned, [], 1

    def version(self):
        return self.now

    def owners(self, kind, values):
        self.asked.append((kind, len(values)))
        return [next((o for o, mine in self.owned.items() if any(v is m for m in mine)), -1) for v in values]


def owner_of(prepared, path):
    return int(prepared.owners[list(prepared.piece_paths).index(path)])


# -- owners ----------------------------------------------------------------------------------------------------------


def test_every_piece_has_the_owner_of_its_leaves():
    a, b, shared, free = (np.arange(1000.0) + i for i in range(4))
    state = {
        "a": a, "b": b, "free": free, "thin": np.arange(100)[::3], "lr": 1.5, "empty": np.zeros(0),
        "s1": shared, "part": Shard(b, shape=(2000,), offsets=(0,)), "text": "x" * 5000,
    }  # fmt: skip
    guard = Owners({0: [a, shared], 3: [b]})
    prepared = Planner(kind_of, CHUNK).prepare(state, step=1, guard=guard)
    told = {path: owner_of(prepared, path) for path in prepared.piece_paths}
    assert told == {
        "a": 0, "b": 3, "free": NOBODY, "thin": NEVER, "empty": NEVER, "s1": 0, "part": 3, "text": NEVER,
    }  # fmt: skip
    pieces = prepared.layout.pieces
    for owner, paths in ((0, ("a", "s1")), (3, ("b", "part"))):
        ends = [pieces[list(prepared.piece_paths).index(p)] for p in paths]
        assert prepared.owned_chunks[owner] == max((p.offset + p.length - 1) // CHUNK + 1 for p in ends)
    assert set(prepared.owned_chunks) == {0, 3}
    index = list(prepared.piece_paths).index("free")
    assert prepared.unowned.host.tolist() == [index]
    assert prepared.unowned.total_bytes == free.nbytes
    assert prepared.unowned.chunks == (pieces[index].offset + free.nbytes - 1) // CHUNK + 1


def test_a_piece_of_tied_leaves_is_owned_by_who_owns_them_all():
    a, b, c = (np.arange(10.0) for _ in range(3))
    views = a[:], b[:], c[:]
    state = {"a": a, "a2": views[0], "b": b, "b2": views[1], "c": c, "c2": views[2]}
    guard = Owners({0: [a, views[0], b], 1: [views[1]], 2: [c]})
    prepared = Planner(kind_of, CHUNK).prepare(state, step=1, guard=guard)
    assert [owner_of(prepared, p) for p in "abc"] == [0, NOBODY, NOBODY]


def test_the_guard_is_asked_again_only_about_what_changed():
    arrays = {f"w{i}": np.full(50, i) for i in range(600)}
    guard, planner = Owners({0: list(arrays.values())}), Planner(kind_of, CHUNK)
    first = planner.prepare(arrays, step=1, guard=guard)
    again = planner.prepare(arrays, step=2, guard=guard)
    assert guard.asked == [("numpy", 600)]
    assert again.owners is first.owners
    assert again.unowned is first.unowned
    moved = {**arrays, "w7": np.full(50, 7), "w8": np.full(50, 8)}
    third = planner.prepare(moved, step=3, guard=guard)
    assert guard.asked[1:] == [("numpy", 2)]
    assert [owner_of(third, p) for p in ("w6", "w7", "w8", "w9")] == [0, NOBODY, NOBODY, 0]
    assert third.unowned.host.size == 2
    again = planner.prepare({**arrays, "w7": np.full(50, 7)}, step=4, guard=guard)
    assert len(guard.asked) == 2, "about what nobody owned it is not asked"
    assert again.owners is third.owners
    guard.now, guard.owned = 2, {5: [arrays["w0"]]}
    fourth = planner.prepare(arrays, step=5, guard=guard)
    assert (owner_of(fourth, "w0"), owner_of(fourth, "w1")) == (5, NOBODY)
    other = Owners({1: [arrays["w1"]]})
    other.now = 2
    assert owner_of(planner.prepare(arrays, step=6, guard=other), "w1") == 1, "another guard of the same version"


def test_without_a_guard_nobody_owns_anything():
    prepared = Planner(kind_of, CHUNK).prepare({"a": np.ones(2000), "b": np.ones(5)[::2]}, step=1)
    assert prepared.owners is None
    assert prepared.owned_chunks == {}
    assert prepared.unowned is prepared.changeable
    assert prepared.unowned.chunks == 4


# -- copied aside ----------------------------------------------------------------------------------------------------


def test_what_nobody_owns_is_copied_aside_and_captured_from_there():
    owned, free, thin = np.arange(1000.0), np.arange(77.0), np.arange(50.0)[::2]
    state = {"owned": owned, "free": free, "tied": free, "thin": thin}
    prepared = Planner(kind_of, CHUNK).prepare(state, step=1, guard=Owners({0: [owned]}))
    before = np.array(prepared.addresses)
    expected = free.tobytes()
    assert prepared.copy_aside(prepared.unowned, copier) == 0
    changed = before != np.array(prepared.addresses)
    assert changed.tolist() == [path == "free" for path in prepared.piece_paths], "stable and owned ones stay"
    free[:] = -1
    assert bytes_at(prepared, space_of(prepared), "free") == expected
    assert bytes_at(prepared, space_of(prepared), "owned") == owned.tobytes()


def test_all_can_be_copied_into_memory_of_the_caller():
    state = {f"w{i}": np.arange(i * 10.0) for i in range(20)}
    expected = {path: array.tobytes() for path, array in state.items()}
    prepared = Planner(kind_of, CHUNK).prepare(state, step=1)
    room = np.zeros(prepared.changeable.host_bytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    assert prepared.copy_aside(prepared.changeable, copier, room.ctypes.data + start) == 0
    inside = np.array(prepared.addresses)[prepared.changeable.host].astype(np.int64) - room.ctypes.data
    assert ((inside >= start) & (inside < room.nbytes)).all()
    assert ((inside - start) % 64 == 0).all()
    for array in state.values():
        array[:] = -1
    space = space_of(prepared)
    assert {path: bytes_at(prepared, space, path) for path in prepared.piece_paths} == expected


def test_the_smallest_pieces_that_fit_are_found():
    state = {"big": np.zeros(1000), "a": np.zeros(10), "b": np.zeros(20), "last": np.zeros(900)}
    prepared = Planner(kind_of, CHUNK).prepare(state, step=1)
    chosen, chunks = prepared.smallest(prepared.unowned, 400)
    assert [prepared.piece_paths[i] for i in chosen.host] == ["a", "b"]
    assert chunks == prepared.unowned.chunks
    every, chunks = prepared.smallest(prepared.unowned, 1 << 20)
    assert (every.host.tolist(), chunks) == (prepared.unowned.host.tolist(), 0)
    nothing, chunks = prepared.smallest(prepared.unowned, 10)
    assert (nothing.total_bytes, nothing.chunks, chunks) == (0, 0, prepared.unowned.chunks)


# -- devices ---------------------------------------------------------------------------------------------------------


def example(one, two):
    a = DeviceArray(one, np.arange(3000.0))
    return {
        "a": a, "tied": a, "host": np.arange(400.0), "b": DeviceArray(two, np.arange(700, dtype="<i2")),
        "lazy": DeviceArray(one, np.ones(100), lazy=True), "none": DeviceArray(one, np.zeros(0)),
        "c": Shard(DeviceArray(one, np.arange(50.0)), shape=(100,), offsets=(50,)),
    }  # fmt: skip


def array_in(leaf):
    leaf = leaf.array if isinstance(leaf, Shard) else leaf
    return leaf.array if isinstance(leaf, DeviceArray) else leaf


def test_leaves_on_devices_are_filled_into_their_chunks():
    one, two, table = Device("one"), Device("two"), Table()
    planner, layout, asked = Planner(table, CHUNK), None, 0
    for step in range(3):
        state = example(one, two)  # other arrays each time
        prepared = planner.prepare(state, step=step)
        assert not prepared.stable
        for path, address in zip(prepared.piece_paths, prepared.addresses, strict=True):
            assert bool(address) is (path == "host"), "a piece on a device has no address"
        prepared.filler.begin()
        space = space_of(prepared)
        for path in ("a", "host", "b", "lazy", "c"):
            assert bytes_at(prepared, space, path) == array_in(state[path]).tobytes(), path
        assert "tied" not in prepared.piece_paths
        if step:
            assert prepared.layout is layout
            assert table.kind.asked - asked == 1, "the lazy one alone is asked for its bytes"
        layout, asked = prepared.layout, table.kind.asked
    assert {d.name for d in prepared.filler.devices} == {"one", "two"}
    for device in (one, two):
        assert [capture.ended for capture in device.captures] == [1, 1, 1]


def test_another_device_makes_another_plan():
    one, two, planner = Device("one"), Device("two"), Planner(Table(), CHUNK)
    array = np.arange(900.0)
    for device in (one, two, one):
        prepared = planner.prepare({"a": DeviceArray(device, array)}, step=1)
        assert prepared.filler.devices == (device,)
    assert planner.prepare({"a": array}, step=2).filler is None


def test_divided_leaves_on_devices_are_copied_from_their_first_row():
    array = np.arange(6000.0).reshape(600, 10)
    found = []
    for rank in range(3):
        planner = Planner(Table(), CHUNK, rank=rank, world=3, replicated=True)
        for _ in range(2):
            prepared = planner.prepare({"a": DeviceArray(Device(), array), "b": 1}, step=1)
            prepared.filler.begin()
            space = space_of(prepared)
        found.append(bytes_at(prepared, space, "a"))
    assert b"".join(found) == array.tobytes()
    assert {len(part) for part in found} == {array.nbytes // 3}


def test_a_rank_that_stores_nothing_of_a_leaf_asks_its_device_for_nothing():
    device = Device()
    for rank in range(3):
        planner = Planner(Table(), CHUNK, rank=rank, world=3, replicated=True)
        prepared = planner.prepare({"a": DeviceArray(device, np.arange(8.0).reshape(1, 8))}, step=1)
        assert (prepared.filler is None) is (prepared.layout.data_bytes == 0)


def test_leaves_on_devices_are_owned_and_shadowed():
    one, two = Device("one"), Device("two", room=False)
    state = example(one, two)
    guard = Owners({4: [state["a"], state["b"]]})
    prepared = Planner(Table(), CHUNK).prepare(state, step=1, guard=guard)
    assert [owner_of(prepared, p) for p in ("a", "b", "lazy", "host", "c")] == [4, 4, NEVER, NOBODY, NOBODY]
    assert [prepared.piece_paths[i] for i in prepared.unowned.device] == ["c"]
    assert (prepared.unowned.device_bytes, prepared.unowned.host_bytes) == (400, 3200)
    expected = {path: array_in(state[path]).tobytes() for path in ("a", "b", "c", "host")}
    assert prepared.copy_aside(prepared.unowned, copier) == 0
    for path in ("c", "host"):
        array_in(state[path])[:] = -1
    prepared.filler.begin()
    space = space_of(prepared)
    assert {path: bytes_at(prepared, space, path) for path in expected} == expected


def test_what_a_device_has_no_room_for_is_told_by_its_chunks():
    one, two = Device("one"), Device("two", room=False)
    prepared = Planner(Table(), CHUNK).prepare(example(one, two), step=1)
    piece = prepared.layout.pieces[list(prepared.piece_paths).index("b")]
    assert prepared.copy_aside(prepared.changeable, copier) == (piece.offset + piece.length - 1) // CHUNK + 1
    two.room = True
    prepared = Planner(Table(), CHUNK).prepare(example(one, two), step=1)
    assert prepared.copy_aside(prepared.changeable, copier) == 0


@pytest.mark.parametrize("count", [1, 5])
def test_the_cost_of_a_cached_plan_is_no_question_per_leaf(count):
    device, table = Device(), Table()
    state = {f"w{i}": DeviceArray(device, np.arange(5.0)) for i in range(count)}
    planner = Planner(table, CHUNK)
    planner.prepare(state, step=1)
    asked = table.kind.asked
    planner.prepare(state, step=2)
    assert table.kind.asked == asked
