"""One rank of test_dcp_ranks.py: `python dcp_ranks.py SCENE RANK WORLD PORT FOLDER`; prints what it found as JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_ranks import differences
from fsdp_ranks import whole as full
from pccheck_torch.dcp import Backend, LoadPlanner, Reader, SavePlanner, StateDictError, Writer
from pccheck_torch.ranks import StoreCoordinator
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import pccheck

WAIT_S = 120


def build(shape=None):
    """Give a model with uneven and tiny parameters, sharded over all ranks, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(10, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 33), torch.nn.Linear(33, 1)
    )
    if shape is not None:
        names = ("replicas", "shards")[-len(shape) :]
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.8, 0.95))


def train(model, optimizer, step):
    optimizer.zero_grad()
    torch.manual_seed(step)
    model(torch.randn(8, 10)).square().mean().backward()
    optimizer.step()


def state_of(model, optimizer, **more):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


def refused(call, *errors):
    """Give the text of the error that a call raises."""
    try:
        call()
    except errors as error:
        return str(error)
    return ""


# -- scenes ------------------------------------------------------------------------------------------------------------


def stock_hang(rank, world, folder):
    """Four saves of stock DCP at once over one group, in another order on each rank."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))

    class Late(dcp.FileSystemWriter):
        def storage_meta(self):  # the first call in DCP's background thread
            time.sleep(0.1 * (self.k if rank else 3 - self.k))
            return super().storage_meta()

    saves = []
    for k in range(4):
        writer = Late(folder / f"stock-{k}")
        writer.k = k
        saves.append(dcp.async_save({"w": torch.full((8,), k)}, storage_writer=writer, process_group=group))
    failed = 0
    for k, save in enumerate(saves):
        target = {"w": torch.zeros(8, dtype=torch.int64)}
        try:
            save.result(WAIT_S)
            dcp.load(target, checkpoint_id=folder / f"stock-{k}", no_dist=True)
            failed += target["w"].tolist() != [k] * 8
        except (Exception, CheckpointException):
            failed += 1
    return {"failed": failed}


def many_in_flight(rank, world, folder):
    """FSDP2 and AdamW saved in each step, four in flight, in another order on each rank, some overtaking others."""
    model, optimizer = build((world,))
    held, go, turns = threading.Event(), threading.Event(), []

    def at(point):
        if point == "data-synced" and not held.is_set():
            held.set()
            assert go.wait(WAIT_S)

    set_up = SavePlanner.set_up_planner

    def late(self, state_dict, storage_meta=None, is_coordinator=False):
        turns.append(self)
        time.sleep(0.03 * (len(turns) % 4 if rank else 3 - len(turns) % 4))
        set_up(self, state_dict, storage_meta, is_coordinator)

    SavePlanner.set_up_planner = late
    ck = pccheck.Checkpointer(folder, in_flight=4, keep=12, coordinator=StoreCoordinator(), _at=at)
    references, ends, futures = {}, [], []
    with ck, Backend(ck) as backend:
        for step in range(1, 9):
            train(model, optimizer, step)
            state = state_of(model, optimizer, step=step, seen=(step, [rank]))
            references[step] = full(state)
            started = backend.async_save(state, step)
            started.staging_completion.result(WAIT_S)
            futures.append(started.upload_completion)
            futures[-1].add_done_callback(lambda _, step=step: ends.append(step))
            if step == 3:
                assert held.wait(WAIT_S)
                futures[1].result(WAIT_S)
                futures[2].result(WAIT_S)
                go.set()
        backend.wait(WAIT_S)
        ck.save(100, state_of(model, optimizer, step=100, seen=(100, [rank])))
        ck.wait(WAIT_S)
        references[100] = full(state_of(model, optimizer, step=100, seen=(100, [rank])))
        wrong = {}
        for step, reference in references.items():
            train(model, optimizer, 1000 + step)
            target = state_of(model, optimizer, step=0, seen=None)
            dcp.load(target, storage_reader=Reader(folder, step), planner=LoadPlanner())
            wrong[step] = differences(full(target), reference)
        steps = ck.steps()
    SavePlanner.set_up_planner = set_up
    if rank == 0:
        torch.save(references, folder / "references.pt")
    return {"ends": ends, "wrong": wrong, "steps": steps}


def strict_and_failing(rank, world, folder):
    """What one rank cannot do all hear of, and what no rank uses is an error on all."""
    found, folder = {}, folder / "strict"
    with Backend(folder, keep=4, in_flight=2) as backend:
        backend.save({"w": torch.zeros(4), f"own-{rank}": torch.full((2,), rank), "rank": rank}, 1)
        state = {"w": object() if rank == 1 else torch.ones(4), "rank": rank, f"own-{rank}": torch.zeros(2)}
        if rank == 1:
            found["refused"] = refused(lambda: backend.async_save(state, 2), pccheck.errors.UnsupportedLeafError)
        else:
            upload = backend.async_save(state, 2).upload_completion
            found["refused"] = refused(lambda: upload.result(WAIT_S), pccheck.errors.UnsupportedLeafError)
        found["odd"] = refused(lambda: backend.save({"w": torch.ones(4)}, 3 + rank), pccheck.errors.RanksError)
        backend.save({"w": torch.ones(4), f"own-{rank}": torch.full((2,), rank), "rank": rank}, 5)
        target = {"w": torch.zeros(4), "rank": -1}
        found["unused"] = refused(lambda: backend.load(target), StateDictError)
        found["untouched"] = target["w"].tolist()
        mine = {**target, f"own-{rank}": torch.zeros(2, dtype=torch.int64)}
        found["step"] = backend.load(mine).step
        found["mine"] = [mine["w"].tolist(), mine["rank"], mine[f"own-{rank}"].tolist()]
        other = {f"own-{1 - rank}": torch.zeros(2, dtype=torch.int64)}
        dcp.load(other, storage_reader=Reader(folder), planner=LoadPlanner(strict=False))
        found["other"] = other[f"own-{1 - rank}"].tolist()
        with pccheck.Checkpointer(folder / f"alone-{rank}") as alone:
            group = backend._lanes[0].group
            found["alone"] = refused(
                lambda: dcp.save(
                    {"w": torch.ones(1)}, storage_writer=Writer(alone, 1), planner=SavePlanner(), process_group=group
                ),
                CheckpointException,
            )
            plain = {"w": torch.full((4,), float(rank)), "n": rank}
            dcp.save(plain, storage_writer=Writer(alone, 1), planner=SavePlanner(), no_dist=True)
            back = {"w": torch.zeros(4), "n": -1}
            dcp.load(back, storage_reader=Reader(alone), planner=LoadPlanner(), no_dist=True)
            found["no_dist"] = differences(back, plain)
        stock = {"w": torch.arange(8.0), "n": [1, 2], "z": torch.tensor(3)}
        dcp.save(stock, storage_writer=Writer(backend.checkpointer, 6), planner=dcp.DefaultSavePlanner())
        back = {"w": torch.zeros(8), "n": [], "z": torch.tensor(0)}
        dcp.load(back, storage_reader=Reader(folder, 6))
        found["stock"] = differences(back, stock)
        found["twice"] = twice_with_cached_plans(rank, world, backend.checkpointer)
    return found


def twice_with_cached_plans(rank, world, checkpointer):
    """Sharded and replicated DTensors with DCP's own planner, the second time from its cache."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    for step in (7, 8):
        whole = torch.arange(10.0) + step
        state = {"s": distribute_tensor(whole, mesh, [Shard(0)]), "r": distribute_tensor(whole, mesh, [Replicate()])}
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=Writer(checkpointer, step), planner=planner)
        back = {"s": distribute_tensor(torch.zeros(10), mesh, [Replicate()]), "r": torch.zeros(10)}
        dcp.load(back, storage_reader=Reader(checkpointer.path, step), planner=LoadPlanner())
        found += differences(full(back), {"s": whole, "r": whole})
        outline = pccheck.outline(checkpointer.path, step)
        found += [[name, step] for name in "sr" if sum(t[name].spec.nbytes for t in outline.trees) != 40]
    return found


def load(rank, world, folder):
    """What two ranks saved, on another number of ranks: by DCP with both planners, and by pccheck."""
    references = torch.load(folder / "references.pt", weights_only=True)
    model, optimizer = build(None if world == 1 else (world,))
    wrong = {}
    for step in (8, 100):
        reference = references[step]
        for how in ("ours", "stock", "restore"):
            train(model, optimizer, 2000 + step)
            target = state_of(model, optimizer, step=0, seen=None if how == "ours" else (0, [0]))
            if how == "ours":
                dcp.load(target, storage_reader=Reader(folder, step), planner=LoadPlanner())
            elif how == "stock":
                dcp.load(target, storage_reader=Reader(folder, step))
            else:
                with pccheck.open(folder) as view:
                    target = view.restore(step, like=target).state
            found = full(target)
            del found["seen"]  # of another rank than the reference
            wrong[f"{step} {how}"] = differences(found, {k: v for k, v in reference.items() if k != "seen"})
    return {"wrong": wrong}


def replicas(rank, world, folder):
    """Two replicas of two shards: nothing is stored twice, and all of it comes back on the same mesh."""
    model, optimizer = build((2, 2))
    with Backend(folder, keep=2) as backend:
        for step in (1, 2):
            train(model, optimizer, step)
            backend.async_save(state_of(model, optimizer), step)
        backend.wait(WAIT_S)
        reference = full(state_of(model, optimizer))
        train(model, optimizer, 3)
        target = state_of(model, optimizer)
        loaded = backend.load(target)
        wrong = differences(full(target), reference)
        stage = rank // 2
        mesh = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])][stage]
        backend.save({f"stage-{stage}": distribute_tensor(torch.arange(5.0) + stage, mesh, [Shard(0)]), "n": 1}, 3)
        stages = {"stage-0": torch.zeros(5), "stage-1": torch.zeros(5), "n": 0}
        backend.load(stages)
    with Backend(folder / f"half-{min(rank, 3 - rank)}", process_group=mine_of_halves(rank)) as backend:
        backend.save({"rank": rank, "w": torch.full((3,), rank)}, 7)
        half = {"rank": -1, "w": torch.zeros(3, dtype=torch.int64)}
        backend.load(half)
    outline = pccheck.outline(folder, 2)
    stored = sum(tree["model"]["2.weight"].spec.nbytes for tree in outline.trees)
    wrong += differences(stages, {"stage-0": torch.arange(5.0), "stage-1": torch.arange(5.0) + 1, "n": 1})
    return {
        "wrong": wrong,
        "step": loaded.step,
        "stored": stored,
        "whole": 33 * 7 * 4,
        "half": [half["rank"], half["w"].tolist()],
    }


def death(rank, world, folder):
    """Rank 1 dies while its data is being written; the other hears of it in time, and keeps what all had."""
    deadly = threading.Event()

    def at(point):
        if point == "data-synced" and deadly.is_set():
            print(json.dumps({"death": None}), flush=True)
            os._exit(0)

    backend = Backend(folder, agree_timeout_s=3, keep=2, **({"_at": at} if rank else {}))
    backend.save({"w": torch.full((1000,), 1.0), "rank": rank}, 1)
    deadly.set()
    began = time.monotonic()
    upload = backend.async_save({"w": torch.full((1000,), 2.0), "rank": rank}, 2).upload_completion
    failed = refused(lambda: upload.result(WAIT_S), Exception)
    found = {"failed": failed, "took": time.monotonic() - began}
    target = {"w": torch.zeros(1000), "rank": -1}
    dcp.load(target, storage_reader=Reader(folder), planner=LoadPlanner(), no_dist=True)
    found["loaded"] = [target["w"].unique().tolist(), target["rank"]]
    print(json.dumps({"death": found}), flush=True)
    os._exit(0)


def damaged(rank, world, folder):
    """The part of rank 1 is damaged: no rank loads anything of it, and all go back to the one before."""
    found, whole = {}, torch.arange(1000.0)
    mesh = init_device_mesh("cpu", (world,))
    with Backend(folder, keep=3) as backend:
        for step in (1, 2):
            backend.save({"w": distribute_tensor(whole + step, mesh, [Shard(0)]), "n": step}, step)
        if rank == 1:
            with pccheck.open(folder / "rank-00001") as view:
                name = next(entry.name for entry in view.checkpoints if entry.step == 2)
            with (folder / "rank-00001" / name).open("r+b") as file:
                file.seek(65536)
                file.write(b"x")
        dist.barrier()
        target = {"w": distribute_tensor(torch.zeros(1000), mesh, [Shard(0)]), "n": 0}
        found["error"] = refused(
            lambda: dcp.load(target, storage_reader=Reader(folder), planner=LoadPlanner()), CheckpointException
        )
        found["touched"] = target["w"].to_local().any().item() or target["n"]
        loaded = backend.load(target)
        found["step"] = [loaded.step, [s.step for s in loaded.skipped]]
        found["wrong"] = differences(full(target), {"w": whole + 1, "n": 1})
    return found


def mine_of_halves(rank):
    """Make two groups of two ranks, of which one begins with an odd rank; give this rank's."""
    outer, inner = dist.new_group([0, 3]), dist.new_group([1, 2])
    return inner if rank in (1, 2) else outer


SCENES = {f.__name__: f for f in (stock_hang, many_in_flight, strict_and_failing, damaged, load, replicas, death)}


def main(scenes, rank, world, port, folder):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=timedelta(seconds=WAIT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=WAIT_S))
    found = {}
    for scene in scenes.split(","):
        found[scene] = SCENES[scene](rank, world, Path(folder))
        dist.barrier()
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
