"""What ranks plan and store in parts comes back whole, from any rank, as any part: planner and reader together."""

from __future__ import annotations

import numpy as np
import pytest

from pccheck import Shard, format
from pccheck.errors import FormatError
from pccheck.reading.loading import load_world
from pccheck.reading.world import WorldIdentity
from pccheck.state.kinds import kind_of
from pccheck.state.planner import Planner
from pccheck.testing.compare import difference
from pccheck.testing.slotfiles import check_file
from tests.unit.captured import slot_of

CHUNK = 4096


def store(root, rank, world, prepared):
    """Write one rank's store, as its pipeline and commit would have."""
    folder = root / f"rank-{rank:05}"
    folder.mkdir()
    (folder / "slot-000.pcc").write_bytes(slot_of(prepared, rank, world))
    (folder / "CHECK").write_bytes(check_file(word=format.pack_word(1, 0)))


def saved(root, states, replicated):
    world, digests = len(states), set()
    for rank, state in enumerate(states):
        prepared = Planner(kind_of, CHUNK, rank=rank, world=world, replicated=replicated).prepare(state, step=10)
        digests.add(prepared.plan_digest)
        store(root, rank, world, prepared)
    assert len(digests) == 1

    def load(home=0, **how):
        return load_world(root, WorldIdentity(1, 1, 10, world), home, **how).restored.state

    return load


def model():
    rng = np.random.default_rng(3)
    a = rng.random((33, 70), np.float32)
    return {
        "a": a, "tied": a, "f": np.asfortranarray(rng.random((10, 12))), "thin": rng.random(999)[::3],
        "row": rng.random((1, 500)), "perm": rng.random((4, 5, 6)).transpose(1, 2, 0), "few": np.arange(2),
        "zero_d": np.array(2.5), "scalar": np.float32(7), "none": np.zeros((0, 4)), "text": "é" * 5000, "lr": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize("world", [2, 3, 5])
def test_what_is_divided_comes_back_whole_to_every_rank(tmp_path, world):
    shared = model()
    load = saved(tmp_path, [{"model": shared, "rank": rank} for rank in range(world)], ["model"])
    for home in range(world):
        back = load(home)
        assert difference(back, {"model": shared, "rank": home}) is None
        assert back["model"]["a"] is back["model"]["tied"]
    like = {"model": model(), "rank": 0}
    back = load(world - 1, like=like)
    assert difference(back, {"model": shared, "rank": world - 1}) is None


def test_shards_come_back_whole_or_as_the_part_that_is_asked_for(tmp_path):
    whole = np.arange(12 * 7, dtype="<f4").reshape(12, 7)
    own = [np.asfortranarray(whole[4 * r : 4 * r + 4]) if r == 1 else whole[4 * r : 4 * r + 4] for r in range(3)]
    states = [{"w": Shard(own[r], shape=(12, 7), offsets=(4 * r, 0)), "r": r} for r in range(3)]
    load = saved(tmp_path, states, False)
    for home in range(3):
        back = load(home)
        assert type(back["w"]) is np.ndarray
        assert (back["w"] == whole).all()
    for first, end in ((0, 12), (0, 6), (3, 9), (5, 5), (11, 12)):
        for left, right in ((0, 7), (2, 3)):
            part = np.zeros((end - first, right - left), "<f4")
            back = load(1, like={"w": Shard(part, shape=(12, 7), offsets=(first, left)), "r": 0})
            assert type(back["w"]) is Shard
            assert (back["w"].shape, back["w"].offsets) == ((12, 7), (first, left))
            assert (back["w"].array == whole[first:end, left:right]).all()
            assert back["w"].array is not part
            assert back["r"] == 1
    assert (load(2, like={"w": np.zeros((12, 7), "<f4"), "r": 0})["w"] == whole).all()


def test_tensors_are_divided_as_arrays_are(tmp_path):
    torch = pytest.importorskip("torch")
    weight = torch.randn(6, 3, 4, 5).to(memory_format=torch.channels_last)
    shared = {
        "w": torch.nn.Parameter(weight), "half": torch.arange(300, dtype=torch.bfloat16), "step": torch.tensor(3.0),
        "conj": torch.randn(40, 3, dtype=torch.complex64).conj(), "size": torch.Size([2, 3]),
        "sparse": torch.eye(9).to_sparse(),
    }  # fmt: skip
    load = saved(
        tmp_path, [{"m": shared, "s": Shard(shared["half"], shape=(600,), offsets=(300 * r,))} for r in (0, 1)], ["m"]
    )
    for home in (0, 1):
        back = load(home, like={"m": shared, "s": Shard(torch.empty(200), shape=(600,), offsets=(200,))}, partial=True)
        assert back["s"].array.shape == (200,), "another dtype is a mismatch, and what `like` has stays"
        back = load(home, like={"m": shared, "s": Shard(shared["half"][:200], shape=(600,), offsets=(200,))})
        assert torch.equal(back["s"].array, torch.cat([shared["half"], shared["half"]])[200:400])
        for name in ("w", "half", "step", "conj", "sparse"):
            found, expected = back["m"][name], shared[name]
            assert (type(found), found.dtype, found.requires_grad) == (
                type(expected),
                expected.dtype,
                expected.requires_grad,
            )
            assert torch.equal(found.to_dense(), expected.to_dense())
        assert back["m"]["w"].stride() == weight.stride()
        assert back["m"]["size"] == torch.Size([2, 3])


def test_a_state_that_is_one_array_is_named_where_ranks_hold_different_ones(tmp_path):
    load = saved(tmp_path, [Shard(np.full(4, rank), shape=(4,), offsets=(0,)) for rank in range(2)], False)
    with pytest.raises(FormatError, match=r"^the state itself: ranks 0, 1 store different values"):
        load(like=Shard(np.empty(2, int), shape=(4,), offsets=(1,)))
