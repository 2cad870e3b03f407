"""Public bug reports of other checkpoint libraries, each as a test of its whole kind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import pccheck
from pccheck import format
from pccheck.audit import audit, exit_code
from pccheck.directory import Directory
from pccheck.errors import MediumError, NoValidCheckpointError, SkippedError, StoreTaken
from pccheck.testing.faults import FOREVER, Fault, FaultyVolume, Script
from pccheck.testing.throttle import Rate, ThrottledVolume
from tests.faults.helpers import CHUNK, WAIT_S, Gate, make_state, pool_of, records, run_python, slot_files, step_of

MIB = 1 << 20


def throttled(directory, mib_per_s: float, **options):
    volume = ThrottledVolume(Directory(str(directory), create=True, write=True), total=Rate.steady(mib_per_s * MIB))
    return pccheck.Checkpointer(volume, **{"chunk_bytes": CHUNK, **options})


def faulty(directory, script, **options):
    volume = FaultyVolume(Directory(str(directory), create=True, write=True), script)
    return pccheck.Checkpointer(volume, **{"chunk_bytes": CHUNK, **options})


# -- A. snapshot consistency ------------------------------------------------------------------------------------------


def aliased(kind: str, tmp_path):
    """Give a leaf of 1s and a function that sets all of it to 2, through some other name of the same memory."""
    if kind.startswith("torch"):
        torch = pytest.importorskip("torch")
        base = torch.ones(60_000)
        leaf = {"torch": base, "torch view": base[7:-7], "torch strided": base.view(200, 300).T[::2],
                "torch from numpy": base}[kind]  # fmt: skip
        if kind == "torch from numpy":
            array = np.ones(60_000, np.float32)
            return torch.from_numpy(array), lambda: array.fill(2)
        return leaf, lambda: base.fill_(2)
    if kind == "memory map":
        array = np.memmap(tmp_path / "weights.bin", np.float32, "w+", shape=(60_000,))
        array.fill(1)
    else:
        array = np.ones(60_000, np.float32)
    leaf = {"view": array[7:-7], "strided": array.reshape(200, 300).T[::2], "reversed": array[::-1],
            "broadcast": np.broadcast_to(array[:1], (99, 99)), "read-only": array.view()}.get(kind, array)  # fmt: skip
    if kind == "read-only":
        leaf.flags.writeable = False
    return leaf, lambda: array.fill(2)


@pytest.mark.parametrize(
    "kind",
    ["numpy", "view", "strided", "reversed", "broadcast", "read-only", "memory map", "torch", "torch view",
     "torch strided", "torch from numpy"],
)  # fmt: skip
def test_case_1_what_is_assigned_after_the_call_is_not_stored(tmp_path, kind):
    """Case 1: on slow storage, through a pool smaller than the state, the value at the time of the call is stored."""
    with throttled(tmp_path / "s", 4, buffer_bytes=2 * CHUNK) as ck:
        leaf, overwrite = aliased(kind, tmp_path)
        save = ck.save(1, {"a": [leaf], "b": {"same": leaf}})
        overwrite()
        assert save.durable.result(WAIT_S) == 1
        restored = ck.restore().state
        for found in (restored["a"][0], restored["b"]["same"]):
            assert tuple(found.shape) == tuple(leaf.shape)
            assert (np.asarray(found) == 1).all()


@pytest.mark.parametrize("kind", ["numpy", "strided", "torch"])
def test_case_1_in_lazy_mode_after_the_fence(tmp_path, kind):
    """Case 1: in lazy mode the fence is what must come first, and it is enough."""
    with throttled(tmp_path / "s", 4, buffer_bytes=2 * CHUNK, snapshot="lazy") as ck:
        leaf, overwrite = aliased(kind, tmp_path)
        save = ck.save(1, {"a": leaf})
        assert ck.fence(WAIT_S) >= 0
        assert save.captured.result(WAIT_S) == 1
        overwrite()
        assert save.durable.result(WAIT_S) == 1
        assert (np.asarray(ck.restore().state["a"]) == 1).all()


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_case_2_all_leaves_are_from_one_step(fast_path, snapshot):
    """Case 2: AdamW's 0-d step counters, moments, weights and Python numbers, 200 rounds, training on at once."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.999)
    data = torch.randn(16, 64)
    checks: dict[int, tuple] = {}

    def totals():
        state = optimizer.state_dict()["state"]
        return (
            sum(float(p.detach().double().sum()) for p in model.state_dict().values()),
            sum(float(s["exp_avg"].double().sum()) for s in state.values()),
            scheduler.last_epoch,
        )

    with pccheck.Checkpointer(fast_path / "s", in_flight=3, snapshot=snapshot, chunk_bytes=CHUNK) as ck:
        for k in range(1, 201):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            ck.fence(WAIT_S)
            optimizer.step()
            scheduler.step()
            checks[k] = totals()
            ck.save(k, {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "k": k})  # fmt: skip
            if k % 10:
                continue
            with pccheck.open(fast_path / "s") as view:
                restored = view.restore()
            if restored is None:
                continue
            state, step = restored.state, restored.step
            assert state["k"] == step
            for leaf in state["optimizer"]["state"].values():
                assert float(leaf["step"]) == step
            weights, moments, epoch = checks[step]
            assert state["scheduler"]["last_epoch"] == epoch
            assert sum(float(p.double().sum()) for p in state["model"].values()) == weights
            moment_sum = sum(float(s["exp_avg"].double().sum()) for s in state["optimizer"]["state"].values())
            assert moment_sum == moments


@pytest.mark.parametrize("writers", [1, 3])
def test_case_4_a_buffer_returns_only_when_its_write_is_acknowledged(tmp_path, writers):
    """Case 4: two buffers, slow storage, five saves with a fill of their own under way: each kept step is uniform."""
    with throttled(tmp_path / "s", 3, in_flight=5, keep=5, buffer_bytes=2 * CHUNK, writers=writers) as ck:
        for step in range(1, 6):
            array = np.full(40_000, step, np.uint8)
            ck.save(step, {"w": array})
            array.fill(255)
        ck.wait(WAIT_S)
        assert ck.steps() == [1, 2, 3, 4, 5]
        for step in range(1, 6):
            assert np.array_equal(ck.restore(step, branch=False).state["w"], np.full(40_000, step, np.uint8))
        assert pool_of(ck) == (2, 2)
        assert ck.stats().pool_wait_s > 0


# -- B. kills, commit, pointer files ----------------------------------------------------------------------------------


def damage_in_turn(store):
    """Give each way to lose or cut each file of the newest checkpoint: name, function of the folder."""
    newest = max((r.counter, f.name) for f, r in records(store).items())[1]
    yield "slot deleted", lambda d: (d / newest).unlink()
    for left in (0, 1, 511, 512, 4096, 65536, 65537, 70_000):
        yield f"slot cut to {left}", lambda d, left=left: os.truncate(d / newest, left)
    for left in (None, 0, 1, 4096):

        def cut(d, left=left):
            (d / "CHECK").unlink() if left is None else os.truncate(d / "CHECK", left)

        yield f"CHECK cut to {left}", cut


def test_case_9_an_incomplete_newest_checkpoint_is_passed_over(tmp_path):
    """Case 9: each file of the newest is lost or cut in turn: the one before comes back, and what was skipped."""
    import shutil

    good = tmp_path / "good"
    with pccheck.Checkpointer(good, keep=2, in_flight=1, chunk_bytes=CHUNK) as ck:
        for step in (1, 2):
            ck.save(step, make_state(step)).durable.result(WAIT_S)
    for number, (name, damage) in enumerate(damage_in_turn(good)):
        store = tmp_path / str(number)
        shutil.copytree(good, store)
        damage(store)
        about_slot = name.startswith("slot")
        with pccheck.open(store) as view:
            assert step_of(view.restore().state) == (1 if about_slot else 2), name
        rebuilt = pytest.warns(RuntimeWarning, match="rebuilt") if not about_slot else _nothing()
        with rebuilt:
            ck = pccheck.Checkpointer(store, keep=2, in_flight=1, chunk_bytes=CHUNK)
        with ck:
            restored = ck.restore()
            assert step_of(restored.state) == (1 if about_slot else 2), name
            if about_slot and "cut" in name and not name.endswith((" 0", " 1", " 511")):
                assert restored.skipped, name
                assert "slot-" in str(restored.skipped[0])
            for step in (3, 4):
                assert ck.save(step, make_state(step)).durable.result(WAIT_S) == step
            assert ck.steps() == [3, 4]
        assert exit_code(audit(store, verify=True)) == 0, name


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize("operation", ["write", "sync", "check_sync"])
def test_case_10_the_books_are_what_the_disk_is(tmp_path, operation):
    """Case 10: a step whose commit failed is in no list; lower and equal steps are saved, each with an outcome."""
    script = Script()
    with faulty(tmp_path, script, keep=2) as ck:
        ck.save(10, make_state(10)).durable.result(WAIT_S)
        script.arm(Fault(operation, {"write": 5, "sync": 3, "check_sync": 1}[operation], times=FOREVER))
        failed = ck.save(20, make_state(20))
        assert failed.durable.exception(WAIT_S) is not None
        script.arm()
        assert (failed.outcome, ck.latest(), ck.steps()) == ("failed", 10, [10])
        with pytest.raises(MediumError):
            ck.wait(WAIT_S)
        lower = ck.save(18, make_state(18))
        assert lower.durable.result(WAIT_S) == 18
        assert (lower.outcome, ck.latest()) == ("committed", 18)
        again = ck.save(20, make_state(20))
        assert again.durable.result(WAIT_S) == 20
        assert (again.outcome, ck.latest()) == ("committed", 20)
        assert step_of(ck.restore(20).state) == 20


def test_case_13_leftovers_of_a_dead_save_are_no_obstacle(tmp_path):
    """Case 13: killed during the save of step 7; the restarted job reaches 7 and saves it, without any clean-up."""
    for point in ("filling", "captured", "written", "sealed", "published"):
        store = tmp_path / point
        done = run_python(
            """
            import os, signal, sys
            from tests.faults.helpers import make_state
            import pccheck
            def at(point):
                if point == sys.argv[2] and armed:
                    os.kill(os.getpid(), signal.SIGKILL)
            armed = []
            ck = pccheck.Checkpointer(sys.argv[1], chunk_bytes=4096, in_flight=1, _at=at)
            ck.save(6, make_state(6)).durable.result(60)
            armed.append(True)
            ck.save(7, make_state(7)).durable.result(60)
            """,
            store, point, cwd=_root(),
        )  # fmt: skip
        assert done.returncode == -9, done.stderr
        with pccheck.Checkpointer(store, chunk_bytes=CHUNK, in_flight=1) as ck:
            assert ck.restore().step in (6, 7)
            assert ck.save(7, make_state(7)).durable.result(WAIT_S) == 7
            assert ck.steps() == [7]
        assert sorted(p.name for p in store.iterdir()) == ["CHECK", "slot-000.pcc", "slot-001.pcc"]


def _root():
    from pathlib import Path

    return Path(__file__).parents[2]


# -- D. errors that get lost ------------------------------------------------------------------------------------------


def test_case_20_a_background_failure_is_told_of_once_and_harms_no_other_save(tmp_path):
    """Case 20: save 1 fails; save 2 tells of it, once, and is itself durable."""
    script = Script()
    with faulty(tmp_path, script) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        script.arm(Fault("write", 3, errno=28))
        first = ck.save(1, make_state(1))
        error = first.durable.exception(WAIT_S)
        with pytest.raises(MediumError) as caught:
            ck.save(2, make_state(2))
        assert caught.value is error
        ck.wait(WAIT_S)
        ck.raise_errors()
        assert ck.latest() == 2
        assert step_of(ck.restore().state) == 2


def test_case_20_several_failures_are_told_of_one_by_one(tmp_path):
    script, gate = Script(), Gate()
    with faulty(tmp_path, script, in_flight=3, writers=1, _at=gate) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        for nth in (2, 3, 4):
            gate.hold("captured", nth)
        script.arm(Fault("sync", 4, times=3))  # three records "filling" are synced, then the data of each fails
        saves = [ck.save(step, make_state(step)) for step in (1, 2, 3)]
        for nth in (2, 3, 4):
            gate.reached("captured", nth)
        while script.count("sync") < 3:
            time.sleep(0.001)
        for nth in (2, 3, 4):
            gate.let_go("captured", nth)
        errors = [save.durable.exception(WAIT_S) for save in saves]
        heard = []
        for _ in range(3):
            with pytest.raises(MediumError) as caught:
                ck.wait(WAIT_S)
            heard.append(caught.value)
        ck.wait(WAIT_S)
        assert {id(e) for e in heard} == {id(e) for e in errors}
        assert ck.latest() == 0


def test_case_22_the_failure_of_the_last_save_is_raised_by_the_with_block(tmp_path):
    """Case 22: the run does not look successful; of several failures none is lost."""
    script, gate = Script(), Gate()
    with pytest.raises(MediumError) as caught, faulty(tmp_path, script, in_flight=2, _at=gate) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        for nth in (2, 3):
            gate.hold("written", nth)
        saves = [ck.save(1, make_state(1)), ck.save(2, make_state(2))]
        for nth in (2, 3):
            gate.reached("written", nth)
        script.arm(Fault("sync", times=FOREVER))
        for nth in (2, 3):
            gate.let_go("written", nth)
    errors = [save.durable.exception(WAIT_S) for save in saves]
    assert caught.value in errors
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert all(str(e) in told for e in errors)
    with pccheck.open(tmp_path) as view:
        assert step_of(view.restore().state) == 0


EXIT = """
import sys, time
import numpy as np
import pccheck
from pccheck.directory import Directory
from pccheck.testing.faults import Fault, FaultyVolume, Script
from pccheck.testing.throttle import Rate, ThrottledVolume
from tests.faults.helpers import make_state

volume = Directory(sys.argv[1], create=True, write=True)
script = Script()
if sys.argv[2] == "slow":
    volume = ThrottledVolume(volume, total=Rate.steady(float(sys.argv[3])))
else:
    volume = FaultyVolume(volume, script)
ck = pccheck.Checkpointer(volume, chunk_bytes=65536, in_flight=2, snapshot="lazy", **eval(sys.argv[4]))
if sys.argv[2] != "slow":
    script.arm(Fault("sync", 2))
state = make_state(1, 1 << 20)
save = ck.save(1, state)
if sys.argv[2] == "slow":
    assert not save.durable.done()
print("main is over")
"""


def test_case_22_a_pending_save_is_drained_at_interpreter_exit(tmp_path):
    """Case 22: the program just ends, without close, with a save under way: it becomes durable."""
    done = run_python(EXIT, tmp_path, "slow", 2 << 20, "{}", cwd=_root())
    assert (done.returncode, done.stdout, done.stderr) == (0, "main is over\n", "")
    with pccheck.open(tmp_path) as view:
        assert step_of(view.restore().state) == 1
    with pccheck.Checkpointer(tmp_path, lock_timeout_s=0) as ck:
        assert ck.latest() == 1


def test_case_22_a_failed_save_is_told_of_at_interpreter_exit(tmp_path):
    """Case 22: the last save fails and nobody asks: standard error says so."""
    done = run_python(EXIT, tmp_path, "faulty", 0, "{}", cwd=_root())
    assert done.stdout == "main is over\n"
    assert "MediumError" in done.stderr
    assert "sync failed" in done.stderr
    warned = run_python(EXIT, tmp_path / "w", "faulty", 0, "{'on_error': 'warn'}", cwd=_root())
    assert "sync failed" in warned.stderr


def test_case_22_exit_waits_no_longer_than_it_was_told(tmp_path):
    """Case 22: storage that hangs cannot keep the process from ending; standard error tells what was lost."""
    began = time.monotonic()
    done = run_python(EXIT, tmp_path, "slow", 1 << 10, "{'exit_timeout_s': 0.2}", cwd=_root(), timeout_s=60)
    assert time.monotonic() - began < 55
    assert done.stdout == "main is over\n"
    assert "DeadlineError" in done.stderr
    with pccheck.open(tmp_path) as view:
        assert view.restore() is None
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK, lock_timeout_s=0) as ck:
        assert ck.save(2, make_state(2)).durable.result(WAIT_S) == 2


@pytest.mark.parametrize("way", ["sys.exit(3)", "raise ValueError('of the trainer')"])
def test_case_22_other_ways_to_end_keep_their_status(tmp_path, way):
    done = run_python(EXIT + way, tmp_path, "slow", 4 << 20, "{}", cwd=_root())
    assert done.returncode == (3 if "exit" in way else 1)
    with pccheck.open(tmp_path) as view:
        assert step_of(view.restore().state) == 1


# -- E. corruption ----------------------------------------------------------------------------------------------------


def test_case_24_no_changed_byte_is_ever_handed_out(tmp_path):
    """Case 24: flip, zero or swap any byte, 4 KiB or chunk (a seeded sample): found before a value is returned."""
    store = tmp_path / "s"
    with pccheck.Checkpointer(store, keep=2, in_flight=1, chunk_bytes=CHUNK) as ck:
        for step in (1, 2):
            ck.save(step, make_state(step, 5 * CHUNK)).durable.result(WAIT_S)
    newest, older = sorted(records(store), key=lambda f: -records(store)[f].counter)
    record = records(store)[newest]
    whole, end = newest.read_bytes(), record.manifest_offset + record.manifest_bytes
    chance = random.Random(24)
    used = [(0, 512), *((o, CHUNK) for o in range(format.PAYLOAD_OFFSET, record.manifest_offset, 65536)),
            (record.manifest_offset, record.manifest_bytes)]  # fmt: skip

    def somewhere(length):
        start, room = chance.choice(used)
        return start + chance.randrange(max(1, room - length + 1)), min(length, room)

    def changed(kind):
        data = bytearray(whole)
        if kind == "flip bit":
            at, _ = somewhere(1)
            data[at] ^= 1 << chance.randrange(8)
        elif kind == "zero 4 KiB":
            at, length = somewhere(4096)
            data[at : at + length] = bytes(length)
        elif kind == "random 4 KiB":
            at, length = somewhere(4096)
            data[at : at + length] = chance.randbytes(length)
        elif kind == "swap bytes":
            (a, _), (b, _) = somewhere(1), somewhere(1)
            data[a], data[b] = data[b], data[a]
        elif kind == "swap chunks":
            a, b = chance.sample(used[1:-1], 2)
            data[a[0] : a[0] + CHUNK], data[b[0] : b[0] + CHUNK] = (
                whole[b[0] : b[0] + CHUNK],
                whole[a[0] : a[0] + CHUNK],
            )
        elif kind == "chunk of the older":
            at, _ = chance.choice(used[1:-1])
            data[at : at + CHUNK] = older.read_bytes()[at : at + CHUNK]
        elif kind == "stale tail":
            at = chance.choice(used[1:])[0]
            data[at:end] = older.read_bytes()[at:end]
        return bytes(data)

    found = 0
    kinds = ["flip bit", "zero 4 KiB", "random 4 KiB", "swap bytes", "swap chunks", "chunk of the older", "stale tail"]
    for n in range(350):
        data = changed(kinds[n % len(kinds)])
        newest.write_bytes(data)
        with pccheck.open(store) as view:
            restored = view.restore()
            assert step_of(restored.state) == restored.step
            if data[:512] + data[65536:end] != whole[:512] + whole[65536:end] and restored.step == 1:
                found += 1
                if data[:512].strip(b"\0"):  # a record of zeros is a slot that was never used
                    assert newest.name in restored.skipped[0].name
                with pytest.raises(pccheck.errors.PccheckError):
                    view.restore(2)
            else:
                assert restored.step == 2
                assert data == whole or not _covered(data, whole, used)
    assert found > 300
    newest.write_bytes(whole)


def _covered(data: bytes, whole: bytes, used) -> bool:
    """Whether a byte that a digest covers differs (padding of the record's sector and the manifest's page does not)."""
    return any(data[a : a + n] != whole[a : a + n] for a, n in used)


def test_case_24_whole_slots_that_changed_places(tmp_path):
    """Case 24: swap two slot files, or put one of another store there: neither is taken for this checkpoint."""
    stores = [tmp_path / "a", tmp_path / "b"]
    for number, store in enumerate(stores):
        with pccheck.Checkpointer(store, keep=2, in_flight=1, chunk_bytes=CHUNK) as ck:
            for step in (1, 2):
                ck.save(100 * number + step, make_state(100 * number + step)).durable.result(WAIT_S)
    files = slot_files(stores[0])
    first, second = (f.read_bytes() for f in files[:2])
    files[0].write_bytes(second)
    files[1].write_bytes(first)
    with pccheck.open(stores[0]) as view, pytest.raises(NoValidCheckpointError) as caught:
        view.restore()
    assert "slot" in str(caught.value)
    files[0].write_bytes(first)
    files[1].write_bytes(second)
    newest = max(records(stores[0]), key=lambda f: records(stores[0])[f].counter)
    newest.write_bytes((stores[1] / newest.name).read_bytes())
    with pccheck.open(stores[0]) as view:
        restored = view.restore()
        assert restored.step == 1
        assert "another store" in str(restored.skipped[0])


def test_case_26_what_was_restored_stays_right_while_its_slot_is_overwritten(tmp_path):
    """Case 26: arrays from restore, from `view[...]` and `read` do not change when every slot is filled anew."""
    with pccheck.Checkpointer(tmp_path / "s", in_flight=2, keep=1, chunk_bytes=CHUNK) as ck:
        ck.save(1, make_state(1, 8 * CHUNK)).durable.result(WAIT_S)
        held = ck.restore().state
        view = pccheck.open(tmp_path / "s")
        leaf, also = view["w"], view.checkpoint().read(["m/v"])[0]
        for step in range(2, 12):
            ck.save(step, {"w": held["w"] * step, "m": {"v": held["m"]["v"] + step - 1}, "step": step})
        ck.save(12, held)  # and it may itself be saved, to the same store
        ck.wait(WAIT_S)
        assert step_of(held) == 1
        assert (leaf == 1).all()
        assert np.array_equal(also, make_state(1, 8 * CHUNK)["m"]["v"])
        assert step_of(ck.restore().state) == 1
        assert step_of(ck.restore(12).state) == 1
        view.close()


def test_case_27_two_processes_do_not_write_to_one_directory(tmp_path):
    """Case 27: the second is told who the first is, at once, and the first goes on."""
    with pccheck.Checkpointer(tmp_path, chunk_bytes=CHUNK) as ck:
        ck.save(1, make_state(1)).durable.result(WAIT_S)
        children = [
            subprocess.Popen(
                [sys.executable, "-c", "import sys, pccheck; pccheck.Checkpointer(sys.argv[1])", str(tmp_path)],
                stderr=subprocess.PIPE, text=True,
            )
            for _ in range(2)
        ]  # fmt: skip
        for child in children:
            _, told = child.communicate(timeout=60)
            assert child.returncode == 1
            assert "StoreTaken" in told
            assert "give each rank a directory" not in told or "same parent" in told
        with pytest.raises(StoreTaken):
            pccheck.Checkpointer(tmp_path, lock_timeout_s=0)
        ck.save(2, make_state(2)).durable.result(WAIT_S)
        assert step_of(ck.restore().state) == 2


# -- F. memory --------------------------------------------------------------------------------------------------------

PEAK = """
import re, sys
import numpy as np
import pccheck

MIB = 1 << 20
directory, what, pool = sys.argv[1], sys.argv[2], int(sys.argv[3]) * MIB

def peak(field="VmHWM"):
    with open("/proc/self/status") as status:
        return int(re.search(field + r":\\s+(\\d+)", status.read())[1]) * 1024

def reset():
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")

def shared():
    return peak("RssFile") + peak("RssShmem")

ck = pccheck.Checkpointer(directory, in_flight=2, keep=1, buffer_bytes=pool, chunk_bytes=4 * MIB, pipeline=sys.argv[4])
if what == "save":
    state = {f"layer{i}": np.full(4 * MIB, i + 1, np.float32) for i in range(16)}
    ck.save(0, {"x": 1})
    ck.wait()
    reset()
    before = peak()
    for step in range(3):
        ck.save(step, state)
    ck.wait()
else:
    ck.save(0, {"x": 1}) if what == "nothing" else None
    reset()
    before = peak()
    restored = ck.restore()
    assert all((restored.state[f"layer{i}"][::4096] == i + 1).all() for i in range(16))
print(peak() - before)
ck.close()
"""


@pytest.mark.parametrize("pipeline", ["auto", "portable"])
def test_case_28_memory_is_bounded_by_the_pool(tmp_path, pipeline):
    """Case 28: 256 MiB of state, a pool of 32: a save takes the pool and little more, a restore the state and that."""
    pool, fixed, state = 32, 32, 256
    saved = run_python(PEAK, tmp_path, "save", pool, pipeline)
    assert saved.returncode == 0, saved.stderr
    restored = run_python(PEAK, tmp_path, "restore", pool, pipeline)
    assert restored.returncode == 0, restored.stderr
    extra, taken = int(saved.stdout) / MIB, int(restored.stdout) / MIB
    assert extra <= pool + fixed, f"a save took {extra:.0f} MiB more"
    assert taken <= state + pool + fixed, f"a restore took {taken:.0f} MiB"


# -- I. retention and meaning -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_flight", "keep"), [(1, 1), (2, 1), (2, 3)])
def test_case_39_exact_counts_after_every_commit_and_every_failure(tmp_path, in_flight, keep):
    """Case 39: the old is never deleted before the new is safe, `keep` of them stay, failures or not."""
    script, chance = Script(), random.Random(39)
    kept: list[int] = []
    with faulty(tmp_path, script, in_flight=in_flight, keep=keep, on_error="warn") as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        kept.append(0)
        for step in range(1, 40):
            fails = chance.random() < 0.4
            if fails:
                script.arm(Fault(chance.choice(("write", "sync")), chance.randrange(1, 4), errno=28))
            save = ck.save(step, make_state(step))
            outcome = save.durable.exception(WAIT_S)
            script.arm()
            assert (outcome is not None) == fails
            if fails:
                with pytest.warns(RuntimeWarning, match="failed"):
                    ck.raise_errors()
            else:
                kept = [*kept, step][-keep:]
            assert ck.steps() == kept
            assert len(slot_files(tmp_path)) <= in_flight + keep
            with pccheck.open(tmp_path) as view:
                assert step_of(view.restore().state) == kept[-1]
                assert set(kept) <= set(view.steps())


def test_case_39_the_same_step_twice_is_two_checkpoints_of_which_the_newer_counts(tmp_path):
    """Case 39: there is no option to forget: a step is a label, the newer of two is what a restore of it gives."""
    with pccheck.Checkpointer(tmp_path, keep=3, chunk_bytes=CHUNK) as ck:
        for value in (5, 6, 7):
            ck.save(1, make_state(value)).durable.result(WAIT_S)
        assert ck.steps() == [1]
        assert step_of(ck.restore(1, branch=False).state) == 7
        assert [e.step for e in pccheck.open(tmp_path).checkpoints] == [1, 1, 1]
        ck.delete(1)
        assert (ck.steps(), ck.latest(), ck.restore()) == ([], None, None)


def test_case_39_a_skipped_save_says_so(tmp_path):
    """Case 39: what is not stored is never silently not stored."""
    gate = Gate()
    gate.hold("written", 1)
    with pccheck.Checkpointer(tmp_path, in_flight=1, when_full="skip", chunk_bytes=CHUNK, _at=gate) as ck:
        ck.save(1, make_state(1))
        gate.reached("written", 1)
        skipped = ck.save(2, make_state(2))
        assert skipped.outcome == "skipped"
        assert isinstance(skipped.durable.exception(), SkippedError)
        gate.let_go("written", 1)
        ck.wait(WAIT_S)
        assert (ck.steps(), ck.stats().skipped) == ([1], 1)
    assert threading.active_count() < 20
