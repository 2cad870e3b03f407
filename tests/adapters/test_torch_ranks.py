"""Ranks agree through torch's stores: real stores, real processes, on 127.0.0.1."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from pccheck_torch.ranks import StoreCoordinator  # noqa: E402

from pccheck.errors import ClosedError, CoordinatorLostError, OptionError, RanksError, UsageError  # noqa: E402
from tests.adapters.jobs import free_port, outputs  # noqa: E402

WORKER = Path(__file__).with_name("rank_worker.py")
HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def store(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 1)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return dist.PrefixStore("job", server) if request.param == "prefix" else server


def coordinators(store, world=3, **options):
    return [StoreCoordinator(store, rank=rank, world=world, **options) for rank in range(world)]


def close(*them):
    for coordinator in them:
        coordinator.close()


def test_each_rank_hears_the_newest_blob_of_all(store):
    ranks = coordinators(store)
    assert ranks[1].read() == [None] * 3
    ranks[1].publish(b"\x00one\xff")
    assert ranks[0].read() == [None, b"\x00one\xff", None]
    for blob in (b"a", b"b" * 100_000, b"b" * 100_000, b"c"):
        for rank in ranks:
            rank.publish(blob + bytes([rank.rank]))
        assert [rank.read() for rank in ranks] == [[blob + b"\0", blob + b"\1", blob + b"\2"]] * 3
    close(*ranks)


def test_the_last_to_leave_takes_everything_away():
    store = dist.HashStore()
    ranks = coordinators(store)
    for rank in ranks:
        rank.publish(b"x")
        rank.read()
    close(*ranks[:2])
    assert ranks[2].read() == [b"x"] * 3, "what others said last can still be read"
    close(*ranks, *ranks)
    assert store.num_keys() == 1, "the name alone"
    assert store.get("pccheck/checkpoints/session") == b""
    with pytest.raises(ClosedError):
        ranks[0].read()


def test_ranks_that_come_in_any_order_meet(store):
    late = StoreCoordinator(store, rank=2, world=3)
    late.publish(b"2")
    assert late.read() == [None, None, b"2"]
    first = StoreCoordinator(store, rank=0, world=3)
    first.publish(b"0")
    assert late.read() == [b"0", None, b"2"]
    assert first.read() == [b"0", None, b"2"]
    close(late, first)


def test_after_a_restart_the_dead_are_not_heard():
    """The store of an elastic job outlives its workers: they are killed, and nothing is taken away."""
    store = dist.HashStore()
    dead = coordinators(store)
    for rank in dead:
        rank.publish(b"dead")
    assert dead[1].read() == [b"dead"] * 3
    again = [StoreCoordinator(store, rank=r, world=3) for r in (1, 2)]
    for rank in again:
        rank.publish(b"new")
        assert b"dead" not in rank.read()
    again.insert(0, StoreCoordinator(store, rank=0, world=3))
    again[0].publish(b"new")
    for rank in again:
        rank.read()
    assert [rank.read() for rank in again] == [[b"new"] * 3] * 3
    with pytest.raises(RanksError, match="was replaced"):
        dead[1].read()
    with pytest.raises(RanksError, match="was replaced"):
        dead[0].read()
    close(*again)
    assert store.num_keys() == 1


def test_restarts_leave_nothing_behind():
    """Jobs that died at any moment: some of their ranks had left, or the ranks had not all met yet."""
    store = dist.HashStore()
    sizes = []
    for life in range(12):
        ranks = coordinators(store, world=2 + life % 2)
        spoke = ranks[: -1 if life % 3 == 1 else None]
        for rank in spoke:
            rank.publish(b"x")
        for rank in spoke:
            rank.read()
        for rank in ranks[: life % 3]:
            rank.close()
        if spoke == ranks:
            sizes.append(store.num_keys())
    assert max(sizes) <= 1 + 3 + 1
    ranks = coordinators(store, world=2)
    for rank in ranks:
        rank.publish(b"y")
    close(*ranks)
    assert store.num_keys() == 1


def test_another_number_of_ranks_meets_anew():
    store = dist.HashStore()
    for rank in coordinators(store, world=3):
        rank.publish(b"dead")
    for world in (4, 2):
        ranks = [StoreCoordinator(store, rank=r, world=world) for r in reversed(range(world))]
        for rank in ranks:
            rank.publish(b"new")
        for rank in ranks:
            rank.read()
        assert [rank.read() for rank in ranks] == [[b"new"] * world] * world


def test_one_after_the_other_in_one_process(store):
    for turn in (b"1", b"2", b"3"):
        ranks = coordinators(store, world=2)
        for rank in reversed(ranks):
            rank.publish(turn)
        assert [rank.read() for rank in ranks] == [[turn] * 2] * 2
        close(*(ranks if turn == b"1" else reversed(ranks)))


def test_one_that_opens_again_early_waits_for_the_others():
    store = dist.HashStore()
    zero, one = coordinators(store, world=2)
    one.publish(b"old 1")
    zero.publish(b"old 0")
    one.close()
    again = StoreCoordinator(store, rank=1, world=2)
    again.publish(b"new 1")
    assert again.read() == [None, b"new 1"]
    assert zero.read() == [b"old 0", b"old 1"], "it has not left, and may still need this"
    zero.close()
    zero = StoreCoordinator(store, rank=0, world=2)
    zero.publish(b"new 0")
    assert again.read() == [b"new 0", b"new 1"]
    close(again, zero)


def test_names_keep_checkpointers_apart():
    store = dist.HashStore()
    one, other = StoreCoordinator(store, rank=0, world=1), StoreCoordinator(store, rank=0, world=1, name="ema")
    one.publish(b"1")
    other.publish(b"2")
    assert (one.read(), other.read()) == ([b"1"], [b"2"])
    same = StoreCoordinator(store, rank=0, world=1)
    with pytest.raises(RanksError, match="name 'checkpoints'"):
        one.read()
    close(one, other, same)


def test_two_processes_with_one_rank_are_told_apart():
    store = dist.HashStore()
    zero, one = coordinators(store, world=2)
    one.publish(b"1")
    second = StoreCoordinator(store, rank=1, world=2)
    second.publish(b"a second 1")
    assert zero.read() == [None, b"1"]
    assert second.read() == [None, b"a second 1"], "it is heard by nobody"
    session = store.get("pccheck/checkpoints/session").split()[0].decode()
    store.set(f"pccheck/checkpoints/{session}/1", "somebody else's")
    with pytest.raises(RanksError, match="speaks as rank 1") as caught:
        one.publish(b"2")
    assert caught.value.ranks == (1,)
    close(zero, one, second)


def test_a_wait_of_the_trainers_own_does_not_hold_it_up():
    """A wait on a store object blocks every thread that uses that object: the coordinator has its own."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=30))
    waiting = threading.Thread(target=store.wait, args=(["never"],))
    ranks = coordinators(store, world=2)
    waiting.start()
    for rank in ranks:
        rank.publish(b"x")
    assert ranks[0].read() == [b"x"] * 2
    assert waiting.is_alive()
    free = store.clone()
    free.set("never", "after all")
    waiting.join(30)
    close(*ranks)


@pytest.fixture
def host():
    process = subprocess.Popen(
        [sys.executable, "-c", HOST],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    with process:
        yield process, dist.TCPStore("127.0.0.1", int(process.stdout.readline()), is_master=False)
        process.kill()


def await_stop(process):
    """A signal that stops a process may take its time on a busy machine."""
    for _ in range(2000):
        try:
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state in "TZX":
            return
        time.sleep(0.005)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_lost_store_fails_fast_and_for_good(host, end):
    """A host that hangs leaves `check` waiting for ever: the coordinator does not."""
    process, store = host
    zero, one = coordinators(store, world=2, timeout_s=1.0)
    zero.publish(b"0")
    one.publish(b"1")
    process.send_signal(end)
    await_stop(process)
    with pytest.raises(CoordinatorLostError, match="lost"):
        for _ in range(3):  # the first may still find its words in the system's buffers
            zero.publish(b"more")
    for call in (zero.read, lambda: zero.publish(b"x")):
        with pytest.raises(CoordinatorLostError):
            call()
    with pytest.raises(CoordinatorLostError):
        one.read()
    close(zero, one)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"rank": 2, "world": 2}, "rank"), ({"rank": -1, "world": 2}, "rank"), ({"rank": 0, "world": 0}, "world"),
        ({"rank": 0, "world": 1, "timeout_s": 0}, "timeout_s"), ({"rank": 0, "world": 1, "name": "a/b"}, "name"),
    ],
)  # fmt: skip
def test_options_out_of_range(options, field):
    with pytest.raises(OptionError) as caught:
        StoreCoordinator(dist.HashStore(), **options)
    assert caught.value.field == field


def test_without_a_store_it_says_what_to_do(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="torchrun"):
        StoreCoordinator()
    with pytest.raises(UsageError, match="rank= and world="):
        StoreCoordinator(dist.HashStore())


def test_the_default_process_group_says_who_it_is():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        coordinator = StoreCoordinator()
        coordinator.publish(b"x")
        assert (coordinator.rank, coordinator.world, coordinator.read()) == (0, 1, [b"x"])
        coordinator.close()
    finally:
        dist.destroy_process_group()


# -- whole jobs -------------------------------------------------------------------------------------------------------


def job(folder, *options, world=3, worker=WORKER):
    """Start all ranks as `env://` does, and give each one's status and lines."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    command = [sys.executable, str(worker), str(folder), *map(str, options)]
    started = [
        subprocess.Popen(
            command, env={**os.environ, **where, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(world)
    ]  # fmt: skip
    return [(out.splitlines(), p.returncode) for (out, _), p in zip(outputs(started, 90), started, strict=True)]


@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_the_job_resumes_where_all_agreed(tmp_path):
    ended = job(tmp_path, "--die-at", 2, "--victim", 2, "--agree-s", 2)
    assert ended[2][1] == -signal.SIGKILL
    for lines, status in ended[:2]:
        assert status == 3
        assert lines[-1].split()[2:4] == ["failed", "RankTimeoutError"], lines
        assert "missing: rank 2" in lines[-1]
    again = job(tmp_path)
    assert [status for _, status in again] == [0] * 3, again
    start = again[0][0][0].split()[3]
    assert start in ("2", "3"), "it died during the save of step 2, which may have been whole all the same"
    assert [lines[0] for lines, _ in again] == [f"rank {r} start {start} seen {start}" for r in range(3)]
    assert [lines[-1] for lines, _ in again] == [f"rank {r} ended True" for r in range(3)]


@pytest.mark.slow
def test_when_the_host_of_the_store_dies_the_others_hear_of_it(tmp_path):
    ended = job(tmp_path, "--die-at", 2, "--victim", 0, "--agree-s", 60)
    assert ended[0][1] == -signal.SIGKILL
    for lines, status in ended[1:]:
        assert status == 3
        assert lines[-1].split()[2:4] == ["failed", "CoordinatorLostError"], lines


@pytest.mark.slow
@pytest.mark.parametrize("group", [[], ["--group"]], ids=["alone", "process group"])
def test_torchrun_starts_the_job_again(tmp_path, group):
    """The store lives in the agent and is handed to the restarted workers with all that the dead left in it."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--max-restarts=1", str(WORKER)]
    options = [str(tmp_path), "--die-at", "3", "--victim", "0" if group else "1", *group]
    done = subprocess.run([sys.executable, *command, *options], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    starts = re.findall(r"^rank (\d) start (\d+) seen (\d+)$", done.stdout, re.MULTILINE)
    resumed = max(starts, key=lambda start: int(start[1]))[1]
    assert resumed in ("3", "4"), "it died during the save of step 3, which may have been whole all the same"
    assert sorted(starts) == sorted((str(r), at, at) for r in range(3) for at in ("0", resumed))
    assert sorted(re.findall(r"^rank (\d) ended True$", done.stdout, re.MULTILINE)) == ["0", "1", "2"]


@pytest.mark.slow
def test_shards_are_restored_by_another_number_of_ranks(tmp_path):
    for start, before, world in ((0, 2, 2), (3, 2, 3), (6, 3, 1)):
        ended = job(tmp_path, world=world, worker=WORKER.with_name("fsdp_worker.py"))
        assert [lines for lines, _ in ended] == [
            [f"rank {r} of {world} began at {start}, mine {r % before}, same True"] for r in range(world)
        ], "what belongs to a rank comes from rank r % (number of ranks before)"
