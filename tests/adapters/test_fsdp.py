"""FSDP2, HSDP, tensor parallelism and DDP on gloo ranks: what some ranks saved is restored by others, to the bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import pccheck  # noqa: E402
from pccheck.audit import audit, exit_code  # noqa: E402
from tests.adapters import fsdp_ranks  # noqa: E402
from tests.adapters.fsdp_jobs import Jobs  # noqa: E402

ROOT = Path(__file__).parents[2]
SAVED = {  # how, mesh, ranks
    "fsdp": ("fsdp", [4], 4),
    "hsdp": ("fsdp", [2, 2], 4),
    "tp": ("tp", [2, 2], 4),
    "one": ("fsdp", [1], 1),
    "ddp": ("ddp", [], 3),
}
REPLICATED = ["model", "optimizer"]


@pytest.fixture(scope="module")
def jobs():
    jobs = Jobs()
    yield jobs
    jobs.close()


@pytest.fixture(scope="module")
def saved(jobs, tmp_path_factory):
    """Give a folder in which ranks have saved; each is made once."""
    made = {}

    def give(name):
        if name not in made:
            how, mesh, world = SAVED[name]
            folder = tmp_path_factory.mktemp(name)
            run(
                jobs,
                scene="save",
                folder=folder,
                how=how,
                mesh=mesh,
                world=world,
                replicated=how == "ddp" and REPLICATED,
            )
            made[name] = folder
        return made[name]

    return give


def run(jobs, **job):
    """Run a job in which nobody dies, and give what each rank found wrong."""
    wrong, errors = {}, []

    def hear(word, rest):
        if word == "wrong":
            wrong[int(rest[0])] = json.loads(rest[1])
        elif word == "error":
            errors.append(json.loads(rest[1]))

    ended = jobs.run(hear, **job)
    assert not errors, errors[0]
    assert ended == dict.fromkeys(range(job["world"]), 0)
    return wrong


def restored_elsewhere(jobs, folder, tmp_path, how, mesh, world, **options):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    wrong = run(jobs, scene="load", folder=tmp_path, how=how, mesh=mesh, world=world, **options)
    assert wrong == {rank: [] for rank in range(world)}
    assert exit_code(audit(tmp_path / "ckpt", verify=True)) == 0
    with pccheck.open(tmp_path / "ckpt") as view:
        assert view.latest() == 3, "what was saved by the new world is the newest"


def plain_process_finds(folder, name):
    """Restore in this process, which has no ranks, into a plain model of other weights."""
    _, _, world = SAVED[name]
    model, optimizer = fsdp_ranks.build("plain", [], seed=1)
    state = fsdp_ranks.TrainingState(model=model, optimizer=optimizer, mine=-1)
    with pccheck.Checkpointer(folder / "ckpt") as ck:
        assert state.restore(ck) == 3
        wrong = fsdp_ranks.check(folder, 0, fsdp_ranks.states(model, optimizer), state.extras["mine"])
        ck.save(3, state).durable.result(60)
    assert wrong == []
    with pccheck.Checkpointer(folder / "ckpt") as ck:
        assert ck.restore().step == 3
    return world


@pytest.mark.parametrize(
    ("how", "mesh", "world"),
    [("fsdp", [2], 2), ("fsdp", [3], 3), ("fsdp", [4], 4), ("fsdp", [1], 1), ("ddp", [], 2)],
    ids=["2 ranks", "3 ranks", "4 ranks", "mesh of 1", "ddp"],
)
def test_saved_by_fsdp_on_four_ranks(jobs, saved, tmp_path, how, mesh, world):
    restored_elsewhere(jobs, saved("fsdp"), tmp_path, how, mesh, world)


@pytest.mark.parametrize("name", SAVED)
def test_saved_by_ranks_restored_by_a_plain_process(saved, tmp_path, name):
    shutil.copytree(saved(name), tmp_path, dirs_exist_ok=True)
    plain_process_finds(tmp_path, name)


@pytest.mark.parametrize(
    ("how", "mesh", "world"),
    [("fsdp", [2, 2], 4), ("fsdp", [3], 3), ("fsdp", [1, 2], 2)],
    ids=["2x2", "3 shards", "1x2"],
)
def test_saved_by_hsdp(jobs, saved, tmp_path, how, mesh, world):
    restored_elsewhere(jobs, saved("hsdp"), tmp_path, how, mesh, world)


@pytest.mark.parametrize(
    ("how", "mesh", "world"),
    [("tp", [2, 2], 4), ("fsdp", [3], 3), ("tp", [1, 2], 2)],
    ids=["2x2", "3 shards", "tensors only"],
)
def test_saved_by_fsdp_with_tensor_parallelism(jobs, saved, tmp_path, how, mesh, world):
    restored_elsewhere(jobs, saved("tp"), tmp_path, how, mesh, world)


def test_tensor_parallelism_from_shards(jobs, saved, tmp_path):
    restored_elsewhere(jobs, saved("fsdp"), tmp_path, "tp", [2, 1], 2)


@pytest.mark.parametrize("world", [2, 4])
def test_saved_by_ddp(jobs, saved, tmp_path, world):
    restored_elsewhere(jobs, saved("ddp"), tmp_path, "ddp", [], world, replicated=REPLICATED)


def test_saved_by_ddp_restored_by_fsdp(jobs, saved, tmp_path):
    restored_elsewhere(jobs, saved("ddp"), tmp_path, "fsdp", [2], 2)


def test_stages_of_a_pipeline_have_states_of_their_own(jobs, tmp_path):
    job = {"folder": tmp_path, "how": "pp", "mesh": [2, 2], "world": 4}
    run(jobs, scene="save", **job)
    assert run(jobs, scene="load", **job) == {rank: [] for rank in range(4)}
    with pccheck.open(tmp_path / "ckpt") as view:
        assert [view[f"model/stage{n}.weight"].shape for n in (0, 1)] == [(5, 10), (6, 10)]


def test_each_rank_on_a_disk_of_its_own(jobs, tmp_path):
    """Shards that are wanted as they were stored come from the rank's own store; no other needs to be seen."""
    job = {"folder": tmp_path, "how": "fsdp", "mesh": [3], "world": 3, "local": True}
    run(jobs, scene="save", **job)
    assert sorted(p.name for p in tmp_path.glob("node-*/rank-*")) == ["rank-00000", "rank-00001", "rank-00002"]
    assert run(jobs, scene="load", **job) == {rank: [] for rank in range(3)}


def test_divided_arrays_on_disks_that_others_do_not_see_are_refused(jobs, tmp_path):
    """Never a start from scratch, and never a gap: each rank names the one whose part it cannot see."""
    job = {"folder": tmp_path, "how": "ddp", "mesh": [], "world": 2, "local": True, "replicated": REPLICATED}
    run(jobs, scene="save", **job)
    told = {}
    ended = jobs.run(
        lambda word, rest: told.update({rest[0]: rest[1]}) if word == "error" else None, scene="load", **job
    )
    assert ended == {0: 1, 1: 1}
    for rank, other in (("0", 1), ("1", 0)):
        assert "NoValidCheckpointError" in told[rank]
        assert f"rank {other} does not hold step 2" in told[rank]


@pytest.mark.parametrize("name", ["fsdp", "hsdp", "ddp"])
def test_what_is_on_several_ranks_is_stored_once(saved, name):
    """The ranks' tensors together are one copy, and no rank stores much more than its part."""
    model, optimizer = fsdp_ranks.build("plain", [])
    fsdp_ranks.train(model, optimizer, torch.randn(8, 10))
    tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values() if t.dim())]
    copy = sum(t.nbytes for t in tensors)
    parts = []
    for folder in sorted((saved(name) / "ckpt").glob("rank-*")):
        with pccheck.open(folder) as view:
            stored = view.checkpoint()
            leaves = {path: stored[path] for path in stored.paths()}
        parts.append(sum(bytes_of(leaf) for path, leaf in leaves.items() if is_common(path)))
    world = SAVED[name][2]
    assert len(parts) == world
    assert sum(parts) == copy
    if name == "ddp":
        assert max(parts) <= 1.2 * copy / world


def is_common(path):
    return path.startswith(("model/", "optimizer/state/")) and not re.search("running|num_batches|/step$", path)


def bytes_of(leaf):
    array = leaf.array if isinstance(leaf, pccheck.Shard) else leaf
    return array.nbytes
