"""Every single operation of storage fails in turn, in every way: nothing lies, nothing leaks, nothing is lost."""

from __future__ import annotations

import errno
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import pccheck
from pccheck.audit import audit, exit_code
from pccheck.errors import CapacityError, MediumError, PccheckError
from pccheck.storage.directory import Directory
from pccheck.testing.faults import FOREVER, Fault, FaultyVolume, Script
from tests.faults.helpers import CHUNK, WAIT_S, make_state, pool_of, records, slot_files, step_of

IN_FLIGHT, KEEP, STEPS = 2, 1, 5
PINNED = 2  # this step is pinned, so that links are made, and a slot gets a new file when it is freed
WAYS = {
    "EIO once": {"errno": errno.EIO},
    "EIO after it was done": {"errno": errno.EIO, "how": "after"},
    "ENOSPC once": {"errno": errno.ENOSPC},
    "ENOSPC, short": {"errno": errno.ENOSPC, "how": "short"},
    "EDQUOT for ever": {"errno": errno.EDQUOT, "times": FOREVER},
    "EIO for ever": {"errno": errno.EIO, "times": FOREVER},
}


@dataclass
class Run:
    """What a run of saves was told, and how they really ended."""

    durable: dict[int, int] = field(default_factory=dict)  # counter -> step, as `Save.durable` resolved
    told: list[BaseException] = field(default_factory=list)  # raised by `save()` and `wait()`
    late: list[BaseException] = field(default_factory=list)  # of saves that failed after `save()` had gone well
    refused: list[BaseException] = field(default_factory=list)  # of saves that `save()` itself must refuse
    others: list[BaseException] = field(default_factory=list)  # raised by other calls
    opening: BaseException | None = None

    def listen(self, ck: pccheck.Checkpointer) -> None:
        """Note every end of a save where it happens."""
        end = ck._flight.end

        def heard(save, outcome, error, *, job, report):
            if error is not None:
                (self.late if report else self.refused).append(error)
            end(save, outcome, error, job=job, report=report)

        ck._flight.end = heard

    @property
    def errors(self) -> list[BaseException]:
        return [*self.late, *self.refused, *self.others]


def options(**more):
    return {"in_flight": IN_FLIGHT, "keep": KEEP, "chunk_bytes": CHUNK, "pipeline": "portable", **more}


def save(run: Run, ck: pccheck.Checkpointer, step: int) -> None:
    try:
        saved = ck.save(step, make_state(step))
    except PccheckError as error:  # it was refused, or it tells of an earlier one
        run.told.append(error)
        return
    error = saved.durable.exception(WAIT_S)
    if error is None:
        assert saved.durable.result() == step
        assert saved.outcome in ("committed", "superseded")
        run.durable[saved.counter] = step
    else:
        assert saved.outcome == "failed"
        assert any(error is e for e in run.late), "an error of this save, not of another one"


def train(run: Run, ck: pccheck.Checkpointer, steps: range) -> None:
    for step in steps:
        save(run, ck, step)
        if step == PINNED and ck.latest() == PINNED:
            try:
                ck.pin(PINNED)
            except PccheckError as error:
                run.others.append(error)
    while True:
        try:
            ck.wait(WAIT_S)
        except PccheckError as error:
            run.told.append(error)
        else:
            return


def check_store(directory: Path, run: Run) -> None:
    """What a reader finds now is whole and at least as new as what was promised, and nothing looks damaged."""
    newest = max(run.durable, default=0)
    with pccheck.open(directory) as view:
        restored = view.restore()
    if newest:
        assert restored is not None
        assert restored.counter >= newest
        assert restored.skipped == ()
    if restored is not None:
        assert step_of(restored.state) == restored.step
        assert run.durable.get(restored.counter, restored.step) == restored.step
        assert exit_code(audit(directory, verify=True)) == 0


def check_run(directory: Path, script: Script) -> Run:
    """Open, save, and check, with whatever the script lets fail; then without faults, and after a restart."""
    run = Run()
    volume = FaultyVolume(Directory(str(directory), create=True, write=True), script)
    try:
        ck = pccheck.Checkpointer(volume, **options())
    except PccheckError as error:
        run.opening = error
    else:
        run.listen(ck)
        train(run, ck, range(STEPS))
        if directory.joinpath("CHECK").exists():
            check_store(directory, run)
        told, ended = [id(e) for e in run.told], [id(e) for e in (*run.late, *run.refused)]
        assert sorted(told) == sorted(ended), "each failure is told of exactly once"
        for error in run.errors:
            assert isinstance(error, (MediumError, CapacityError)), f"{error!r} does not say what failed"

        script.arm()
        after = Run()
        train(after, ck, range(STEPS, STEPS + 3))
        assert after.told == [], "later saves work once the fault is gone"
        assert sorted(after.durable.values()) == list(range(STEPS, STEPS + 3))
        assert ck.latest() == STEPS + 2
        free, buffers = pool_of(ck)
        assert free == buffers > 0
        assert len(slot_files(directory)) <= IN_FLIGHT + KEEP
        stats = ck.stats()
        assert stats.committed + stats.superseded + stats.failed == stats.saves
        ck.close()
        run.durable.update(after.durable)
        check_store(directory, run)

    assert run.opening is None or isinstance(run.opening, (MediumError, CapacityError))
    with pccheck.Checkpointer(directory, **options()) as ck:
        restored = ck.restore()
        if run.durable:
            assert restored is not None
            assert restored.counter == max(run.durable)
            assert step_of(restored.state) == run.durable[restored.counter]
        again = Run()
        train(again, ck, range(20, 23))
        assert list(again.durable.values()) == [20, 21, 22]
        assert len(slot_files(directory)) == IN_FLIGHT + KEEP
    return run


def unharmed() -> list[tuple[str, str]]:
    """Give the operations of a run without faults, up to the moment at which faults are taken away."""
    with tempfile.TemporaryDirectory() as folder:
        script = Script()
        ck = pccheck.Checkpointer(FaultyVolume(Directory(folder, create=True, write=True), script), **options())
        train(Run(), ck, range(STEPS))
        done = list(script.operations)
        ck.close()
    return done


@pytest.mark.parametrize("way", WAYS)
def test_every_operation_in_turn(fast_path, way):
    """Case 17 of its whole kind: for all n, the n-th operation fails in this way."""
    count = len(unharmed())
    assert count > 60
    hit = 0
    for n in range(1, count + 1):
        script = Script(Fault("*", n, **WAYS[way]))
        run = check_run(fast_path / str(n), script)
        hit += bool(run.errors or run.opening)
    assert hit > count // 2


@pytest.mark.parametrize("operation", ["write", "sync", "check_sync", "create", "link", "remove", "sync_names"])
def test_many_in_flight_meet_a_failing_kind_of_operation(fast_path, operation):
    """Three saves at once, nobody waits: the n-th and the next operation of a kind fail, for every other n."""
    failed = 0
    for n in range(1, 40, 2):
        directory = fast_path / str(n)
        script = Script()
        volume = FaultyVolume(Directory(str(directory), create=True, write=True), script)
        ck = pccheck.Checkpointer(volume, **options(in_flight=3, keep=2, keep_every=4))
        script.arm(Fault(operation, n, times=2))
        run, saves = Run(), {}
        run.listen(ck)
        for step in range(12):
            try:
                saved = ck.save(step, make_state(step))
                saves[saved.counter] = saved
            except PccheckError as error:
                run.told.append(error)
        train(run, ck, range(0))
        told, ended = [id(e) for e in run.told], [id(e) for e in (*run.late, *run.refused)]
        assert sorted(told) == sorted(ended)
        run.durable = {c: s.step for c, s in saves.items() if s.durable.exception(WAIT_S) is None}
        assert all(s.outcome == "failed" for c, s in saves.items() if c not in run.durable)
        assert pool_of(ck)[0] == pool_of(ck)[1]
        check_store(directory, run)
        script.arm()
        train(run, ck, range(20, 23))
        assert len(slot_files(directory)) == 3 + 2
        ck.close()
        check_store(directory, run)
        failed += bool(run.errors)
    assert failed


@pytest.mark.filterwarnings("ignore:a save failed")
def test_what_no_save_survives_loses_no_space(fast_path):
    """Syncs fail for ever while training goes on: no slot, no file and no space is lost, however often they do."""
    script = Script()
    volume = FaultyVolume(Directory(str(fast_path / "s"), create=True, write=True), script)
    with pccheck.Checkpointer(volume, **options(on_error="warn")) as ck:
        ck.save(0, make_state(0)).durable.result(WAIT_S)
        refused = 0
        for operation in ("sync", "write", "check_sync"):
            script.arm(Fault(operation, times=FOREVER))
            for step in range(1, 31):
                try:
                    ck.save(step, make_state(step))
                except MediumError:
                    refused += 1  # there is no slot for it while the word cannot be made durable
                ck.wait(WAIT_S)
                assert len(slot_files(fast_path / "s")) <= IN_FLIGHT + KEEP, operation
            assert ck.latest() == 0
            assert step_of(ck.restore(0, branch=False).state) == 0
        script.arm()
        assert ck.stats().failed == 90
        assert refused == 28
        ck.save(100, make_state(100)).durable.result(WAIT_S)
        assert pool_of(ck)[0] == pool_of(ck)[1]
    assert len(records(fast_path / "s")) <= IN_FLIGHT + KEEP
