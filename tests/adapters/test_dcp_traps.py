"""The traps of DCP, each as a pair: what stock DCP does in it, and that pccheck's backend does not.

One process suffices for these; test_dcp_ranks.py has those that take several.
"""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import Future

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pccheck_torch.dcp import Backend, Reader, SavePlanner, Writer
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

import pccheck
from pccheck.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WAIT_S = 60


class HeldWriter(FileSystemWriter):
    """Stock DCP's writer, which comes to a place and waits there until it may go on."""

    def __init__(self, path, hold="write_data", **options):
        super().__init__(path, **options)
        self.hold, self.there, self.go = hold, threading.Event(), threading.Event()

    def _wait(self, place):
        if self.hold == place:
            self.there.set()
            assert self.go.wait(WAIT_S)

    def prepare_global_plan(self, plans):
        plans = super().prepare_global_plan(plans)
        self._wait("prepare_global_plan")
        return plans

    def write_data(self, plan, planner):
        self._wait("write_data")
        return super().write_data(plan, planner)


@pytest.fixture(autouse=True)
def no_cached_plans():
    """DCP's cache of plans is one for the process: leave it as it was."""
    planner = dcp.planner.SavePlanner
    caches = [v for n, v in vars(planner).items() if n.startswith("_cached") and isinstance(v, dict)]
    assert len(caches) == 5
    yield
    for cache in caches:
        cache.clear()


@pytest.fixture
def ck(tmp_path):
    with pccheck.Checkpointer(tmp_path / "ours", in_flight=3, keep=4, chunk_bytes=1 << 16) as checkpointer:
        yield checkpointer


def loaded(source, step, like):
    """Give what dcp.load reads of a step."""
    state = {key: torch.zeros_like(value) for key, value in like.items()}
    reader = dcp.FileSystemReader(source) if step is None else Reader(source, step)
    dcp.load(state, storage_reader=reader)
    return state


# -- a stager that two saves share -------------------------------------------------------------------------------------


def test_stock_stager_shared_by_two_saves_corrupts_the_first(tmp_path):
    weights = torch.zeros(1000)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    first = HeldWriter(tmp_path / "0")
    saves = [dcp.async_save({"w": weights}, storage_writer=first, async_stager=stager)]
    assert first.there.wait(WAIT_S)
    weights.fill_(1)
    saves.append(dcp.async_save({"w": weights}, storage_writer=FileSystemWriter(tmp_path / "1"), async_stager=stager))
    first.go.set()
    for save in saves:
        save.result(WAIT_S)  # nobody complains
    stager.close()
    assert loaded(tmp_path / "0", None, {"w": weights})["w"].unique().tolist() == [1], "the first save holds step 1"


def test_our_writer_stages_each_save_for_itself(tmp_path):
    weights = torch.zeros(1000)
    with Backend(tmp_path, in_flight=3, keep=3) as backend:
        for step in range(3):
            weights.fill_(step)
            backend.async_save({"w": weights}, step).staging_completion.result(WAIT_S)
        backend.wait(WAIT_S)
        for step in range(3):
            assert loaded(tmp_path, step, {"w": weights})["w"].unique().tolist() == [step]


# -- a writer that two saves share -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_stock_writer_used_twice_loses_the_first_save(tmp_path):
    both, turn = threading.Barrier(2), threading.Lock()

    class Late(FileSystemWriter):
        def set_up_storage_writer(self, *args, **kwargs):
            both.wait(WAIT_S)  # by now both saves have called reset(), which DCP does in its background threads
            assert turn.acquire(timeout=WAIT_S)  # from here on one after the other, as most often happens
            super().set_up_storage_writer(*args, **kwargs)

        def finish(self, metadata, results):
            super().finish(metadata=metadata, results=results)
            turn.release()

    writer = Late(tmp_path / "0")
    saves = [
        dcp.async_save({"w": torch.full((4,), step)}, checkpoint_id=tmp_path / str(step), storage_writer=writer)
        for step in range(2)
    ]
    for save in saves:
        save.result(WAIT_S)  # both succeed
    there = [(tmp_path / str(step) / ".metadata").exists() for step in range(2)]
    assert sorted(there) == [False, True], "one of the two checkpoints is nowhere"


def test_our_writer_refuses_a_second_save(ck):
    writer = Writer(ck, 1)
    dcp.async_save({"w": torch.zeros(4)}, storage_writer=writer, planner=SavePlanner()).result(WAIT_S)
    with pytest.raises(UsageError, match=r"used for step 1 already; make a new Writer"):
        dcp.async_save({"w": torch.ones(4)}, storage_writer=writer, planner=SavePlanner())
    with pytest.raises(dcp.api.CheckpointException, match="used for step 1 already"):
        dcp.save({"w": torch.ones(4)}, storage_writer=writer, planner=SavePlanner())
    writer.reset()
    with pytest.raises(UsageError, match="make a new Writer"):
        writer.reset()
    with pytest.raises(UsageError, match="leave checkpoint_id out"):
        dcp.save({"w": torch.ones(4)}, checkpoint_id="x", storage_writer=Writer(ck, 2), planner=SavePlanner())
    assert ck.steps() == [1]
    assert loaded(ck, 1, {"w": torch.ones(4)})["w"].tolist() == [0] * 4


# -- cached plans ------------------------------------------------------------------------------------------------------


def cached():
    return DefaultSavePlanner(enable_plan_caching=True)


def test_stock_plan_cache_does_not_see_another_dtype(tmp_path):
    for step, dtype in enumerate((torch.float32, torch.bfloat16)):
        dcp.save({"w": torch.ones(8, dtype=dtype)}, checkpoint_id=tmp_path / str(step), planner=cached())
    told = dcp.FileSystemReader(tmp_path / "1").read_metadata().state_dict_metadata["w"]
    assert told.properties.dtype == torch.float32, "the metadata of bfloat16 weights"


def test_our_plan_sees_another_dtype(ck):
    for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        dcp.save({"w": torch.full((8,), step, dtype=dtype)}, storage_writer=Writer(ck, step), planner=SavePlanner())
    for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        reader = Reader(ck.path, step)
        told = reader.read_metadata().state_dict_metadata
        assert reader.outline.step == step
        assert told["w"].properties.dtype == dtype
        found = loaded(ck.path, step, {"w": torch.empty(8, dtype=dtype)})["w"]
        assert found.tolist() == [step] * 8


def test_a_stale_plan_of_another_planner_fails_the_save(ck):
    dcp.save({"w": torch.ones(8)}, storage_writer=Writer(ck, 0), planner=cached())
    halves = {"w": torch.ones(8, dtype=torch.bfloat16)}
    with pytest.raises(dcp.api.CheckpointException, match=r"'w' says torch.float32 \[8\].*has torch.bfloat16 \[8\]"):
        dcp.save(halves, storage_writer=Writer(ck, 1), planner=cached())
    assert ck.steps() == [0], "nothing was written"
    with pytest.raises(dcp.api.CheckpointException, match=r"'w' says torch.float32 \[8\].*has torch.bfloat16 \[8\]"):
        dcp.async_save(halves, storage_writer=Writer(ck, 2), planner=cached()).result(WAIT_S)


def test_stock_plan_cache_mixes_up_two_saves_in_flight(tmp_path):
    first, second = {"a": torch.zeros(4)}, {"b": torch.zeros(4)}
    dcp.save(first, checkpoint_id=tmp_path / "0", planner=cached())
    held = HeldWriter(tmp_path / "1", hold="prepare_global_plan")
    save = dcp.async_save(first, storage_writer=held, planner=cached())
    assert held.there.wait(WAIT_S)
    dcp.save(second, checkpoint_id=tmp_path / "2", planner=cached())
    held.go.set()
    with pytest.raises(dcp.api.CheckpointException, match="Could not find FQN: 'b'"):
        save.result(WAIT_S)


def test_our_plans_of_two_saves_in_flight_are_apart(tmp_path):
    with Backend(tmp_path, in_flight=2, keep=8) as backend:
        for step in range(8):
            backend.async_save({"ab"[step % 2]: torch.full((4,), step)}, step)
        backend.wait(WAIT_S)
        for step in range(8):
            key = "ab"[step % 2]
            assert loaded(tmp_path, step, {key: torch.empty(4, dtype=torch.int64)})[key].tolist() == [step] * 4


# -- failed staging, the process executor ------------------------------------------------------------------------------


class FailingStager(AsyncStager):
    def stage(self, state_dict):
        failed: Future[dict] = Future()
        failed.set_exception(RuntimeError("no memory"))
        return failed


def test_stock_staging_that_failed_looks_as_if_it_had_not(tmp_path):
    started = dcp.async_save({"w": torch.ones(4)}, checkpoint_id=tmp_path, async_stager=FailingStager())
    assert started.staging_completion.result(WAIT_S) is None
    with pytest.raises(RuntimeError, match="no memory"):
        started.upload_completion.result(WAIT_S)


def test_our_staging_that_fails_says_so_at_once(tmp_path):
    with Backend(tmp_path) as backend:
        with pytest.raises(pccheck.errors.UnsupportedLeafError, match="oops"):
            backend.async_save({"oops": object()}, 0)
        backend.async_save({"w": torch.ones(4)}, 1).upload_completion.result(WAIT_S)
    with pccheck.Checkpointer(tmp_path / "other") as ck:
        started = dcp.async_save({"oops": object()}, storage_writer=Writer(ck, 0), planner=SavePlanner())
        with pytest.raises(dcp.api.CheckpointException, match="cannot save oops of type object"):
            started.result(WAIT_S)


def test_our_writer_does_not_go_to_another_process(ck):
    """DCP's process executor starts slowly, and cold it loses saves; a pccheck writer needs none, and says so."""
    with pytest.raises(UsageError, match=r"AsyncCheckpointerType\.THREAD"):
        pickle.dumps(Writer(ck, 0))
