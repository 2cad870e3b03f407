"""The crash explorer: runs real code on a simulated disk and checks every disk that a crash may leave (beside).

    report = explore(scenario, CheckpointerSystem(in_flight=2, keep=1))
    assert report.ok, report

A crash is, after every operation of the run: (a) process death, (b) power loss, (c) process death, reopening by the
real code, another save, then power loss after every operation of that. On each disk the real code must find:

* I1: a counter at least the greatest whose `durable` had resolved, with exactly the state saved under it.
* I2: no damage: what the records say and what the digests say is the same, and recovery passes over nothing.
* I3: a CHECK_ADDR that names a whole checkpoint, or none.
* Then opening for writing, one more save, and restoring that one.

`mutate` drops one class of syncs from the run (not from the checks): each sync of a protocol is needed exactly if some
scenario finds a violation without it. Disks that recovery cannot tell apart are checked once.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from pccheck.testing.disk import Image, Op, SimulatedDisk, SyncInfo
from pccheck.testing.images import Enumerator, describe
from pccheck.testing.report import Report, Violation
from pccheck.testing.scenario import Promises, Run, Saved, Scenario, fingerprint, make_state, restore_and_save
from pccheck.testing.simulated import SimulatedVolume
from pccheck.testing.system import System

Mutation = str | Callable[[SyncInfo, str], bool]
AFTER_STEP = 1_000_000  # the step of the save with which a disk is checked
EXCERPT = 14


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What recovery made of one disk. `counter` 0: it found nothing; `error`: it could not open or restore.

    `steps` has the content that `restore(step)` gives of each step that is said to be there.
    """

    counter: int = 0
    content: bytes = b""
    error: str = ""
    faults: tuple[str, ...] = ()
    steps: Mapping[int, bytes] = field(default_factory=dict)


def explore(
    scenario: Scenario,
    system: System,
    *,
    resumes: Sequence[Scenario] = (restore_and_save,),
    mutate: Mutation | None = None,
    after_power_loss: int = 0,
    limit: int = 4096,
    samples: int = 64,
    seed: int = 0,
    max_violations: int = 3,
    stop_at: str | None = None,
) -> Report:
    """Run a scenario and check every legal disk after every crash of it.

    Args:
        scenario: what to run; it must drain and close what it opens.
        system: what to run it on.
        resumes: what to run after process death and before power loss, one exploration each.
        after_power_loss: of the disks that a first power loss may leave, resume on so many, drawn at random, and
            explore a second power loss after every operation of that: a crash during recovery from a crash.
        mutate: purpose of the syncs to drop (as `system.classify` names them), or a function of sync and purpose.
        limit: up to so many combinations of unsynced units are enumerated exhaustively at each crash point.
        samples: random combinations beyond that.
        seed: of those.
        max_violations: how many of each kind to keep in the report.
        stop_at: return as soon as a fault is found that begins with this: "I1", or "" for any.
    """
    explorer = Explorer(system, mutate, Enumerator(system, limit=limit, samples=samples, seed=seed), max_violations)
    try:
        return explorer.explore(scenario, resumes, after_power_loss, stop_at)
    finally:
        explorer.report.sampled = explorer.enumerator.sampled


@final
class Explorer:
    """One exploration; use `explore`."""

    def __init__(self, system: System, mutate: Mutation | None, enumerator: Enumerator, max_violations: int) -> None:
        self.system, self.enumerator, self.max_violations = system, enumerator, max_violations
        self.drop = (lambda _, purpose: purpose == mutate) if isinstance(mutate, str) else mutate
        self.report = Report()
        self.outcomes: dict[bytes, Outcome] = {}
        self.losses: dict[bytes, tuple[int, Image, Promises]] = {}  # each first power loss, and when it came last
        self.stop_at: str | None = None
        self.stopped = False

    def explore(
        self, scenario: Scenario, resumes: Sequence[Scenario], after_power_loss: int, stop_at: str | None
    ) -> Report:
        """Run, walk the log, and for every different process death resume and walk again."""
        self.stop_at = stop_at
        run = Run(system=self.system, disk=self._disk())
        scenario(run)
        self.report.syncs.update(op.purpose for op in run.disk.log if op.purpose)
        deaths: dict[object, tuple[int, Promises]] = {}
        for position, disk, promises in self._walk(run, SimulatedDisk(), Promises(), ""):
            # Of moments that look alike to a new process, the last is explored on: no other promised more.
            deaths[self._signature(disk, promises)] = (position, replace(promises))
        for resume in resumes:
            for position, promises in sorted(deaths.values(), key=lambda d: d[0]):
                log = run.disk.log[:position]
                crash = f"after process death at {position} and `{resume.__name__}`"
                self._resume(run, self._disk(log), SimulatedDisk.replay(log), promises, resume, crash)
            for position, image, promises in self.enumerator.draw(list(self.losses.values()), after_power_loss):
                crash = f"after power loss at {position} and `{resume.__name__}`"
                self._resume(run, self._disk(image=image), SimulatedDisk(image), promises, resume, crash)
        return self.report

    def _disk(self, log: Sequence[Op] = (), image: Image | None = None) -> SimulatedDisk:
        return SimulatedDisk.replay(log, image=image, drop=self.drop, classify=self.system.classify)

    def _signature(self, disk: SimulatedDisk, promises: Promises) -> object:
        files = tuple(
            tuple(c.key for c in self.enumerator.files(i, n, disk.files[i])) for n, i in sorted(disk.names.items())
        )
        pending = tuple((n, tuple(v)) for n, v in sorted(disk.pending_names.items()))
        return self.enumerator.now(disk)[0], files, pending, promises.pinned, promises.forbidden

    def _resume(
        self, run: Run, disk: SimulatedDisk, before: SimulatedDisk, promises: Promises, resume: Scenario, crash: str
    ) -> None:
        if self.stopped:
            return
        resumed = Run(system=self.system, disk=disk, salt="resumed", saved=dict(run.saved))
        resume(resumed)
        self.report.reopened += 1
        for _ in self._walk(resumed, before, replace(promises), crash):
            pass

    def _walk(
        self, run: Run, disk: SimulatedDisk, promises: Promises, crash: str
    ) -> Iterator[tuple[int, SimulatedDisk, Promises]]:
        """Apply the rest of the log one by one and check every disk after each; yields each moment of the disk."""
        disks: list[tuple[bytes, Image]] = []
        for position in range(len(disk.log) + 1, len(run.disk.log) + 1):
            op = run.disk.log[position - 1]
            disk.apply(op)
            marked = promises.note(op)
            if op.kind == "point" or self.stopped:
                continue
            self.report.positions += 1
            if not marked or not disks:
                disks = list({k: (k, i) for k, i in self._disks(disk)}.values())
            if not crash:
                self.losses.update((key, (position, image, replace(promises))) for key, image in disks)
            deaths = () if crash else (self.enumerator.now(disk),)
            for kind, images in (("process death", deaths), ("power loss", disks)):
                for key, image in images:
                    for fault in self._faults(key, image, promises, run.saved):
                        self._violated(f"{kind} {crash}".strip(), disk, image, fault)
            yield position, disk, promises

    def _disks(self, disk: SimulatedDisk) -> Iterator[tuple[bytes, Image]]:
        for key, image in self.enumerator.disks(disk):
            self.report.images += 1
            yield key, image

    def _faults(self, key: bytes, image: Image, promises: Promises, saved: dict[int, Saved]) -> Iterator[str]:
        outcome = self.outcomes.get(key)
        if outcome is None:
            self.report.distinct += 1
            outcome = self.outcomes[key] = self._recover(image)
        yield from outcome.faults
        if outcome.error:
            yield f"I1: the store cannot be opened and restored: {outcome.error}"
        elif outcome.counter < promises.durable:
            yield f"I1: counter {promises.durable} was durable, restore gives {outcome.counter or 'None'}"
        elif outcome.counter in promises.forbidden:
            yield f"I1: restore gives counter {outcome.counter}, which a roll-back had left behind"
        elif outcome.counter and (outcome.counter not in saved or saved[outcome.counter].content != outcome.content):
            yield f"I1: what restore gives as counter {outcome.counter} is not what was saved under it"
        if not outcome.error and not promises.pinned <= outcome.steps.keys():
            yield f"I1: pinned steps {sorted(promises.pinned - outcome.steps.keys())} are gone"
        for step, content in outcome.steps.items():
            if content not in {s.content for s in saved.values() if s.step == step}:
                yield f"I1: what restore({step}) gives is no state saved as step {step}"

    def _recover(self, image: Image) -> Outcome:
        """Let the real code loose on a copy of the disk: audit, open, restore, save, restore, audit."""
        disk = SimulatedDisk(image)
        volumes = [SimulatedVolume(disk)]
        faults = self.system.audit(volumes[0])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                volumes.append(SimulatedVolume(disk))
                with self.system.open(volumes[1]) as saver:
                    restored = saver.restore()
                    outcome = self._found(saver, restored)
                    faults += [f"I2: restore passed over {s}" for s in getattr(restored, "skipped", ())]
                    faults += self._save_once_more(saver)
                volumes[1].unlock()
            except Exception as error:
                return Outcome(error=f"{type(error).__name__}: {error}", faults=tuple(faults))
        # A coroutine is never ours: one that another library left may be collected here (seen beside Orbax's tests).
        faults += [f"I2: recovery warns: {w.message}" for w in warned if not inspect.iscoroutine(w.source)]
        faults += self._unexpected_reads(volumes, image)
        faults += [f"{fault}, after one more save" for fault in self.system.audit(SimulatedVolume(disk))]
        return replace(outcome, faults=tuple(faults))

    def _found(self, saver: Any, restored: Any) -> Outcome:
        content = b"" if restored is None else fingerprint(restored.state)
        steps = {}
        for step in saver.steps() if hasattr(saver, "steps") else ():
            newest = restored is not None and step == restored.step
            steps[step] = content if newest else fingerprint(saver.restore(step, branch=False).state)
        return Outcome(counter=restored.counter if restored else 0, content=content, steps=steps)

    def _save_once_more(self, saver: Any) -> list[str]:
        state = make_state(AFTER_STEP, "after")
        save = saver.save(AFTER_STEP, state)
        save.durable.result(60.0)
        again = saver.restore()
        if again is None or again.counter != save.counter or fingerprint(again.state) != fingerprint(state):
            return [f"I1: after one more save as counter {save.counter}, restore gives {again}"]
        return []

    def _unexpected_reads(self, volumes: Sequence[SimulatedVolume], image: Image) -> list[str]:
        """Tell whether recovery looked at bytes by which disks were not told apart: then they had to be."""
        names = {inode: name for name, inode in sorted(image.names.items(), reverse=True)}
        for inode, offset, length in (
            r for v in volumes for r in v.session.reads if r[0] in image.files and r[0] in names
        ):
            file = image.files[inode]
            spans = [(0, 4096), *self.system.extents(names[inode], file.sectors.get(0, bytes(512)), file.size)]
            for sector in file.sectors:
                at = sector * 512
                inside = any(start <= at < end for start, end in spans)
                if not inside and offset < at + 512 and at < offset + length:
                    return [f"extents: recovery read byte {at} of {names[inode]}, which `extents` leaves out"]
        return []

    def _violated(self, crash: str, disk: SimulatedDisk, image: Image, fault: str) -> None:
        kind = fault.split(":")[0]
        self.report.violated[kind] += 1
        self.stopped |= self.stop_at is not None and fault.startswith(self.stop_at)
        if self.report.violated[kind] <= self.max_violations:
            first = max(0, len(disk.log) - EXCERPT)
            log = tuple(f"    {first + i + 1:4}  {op}" for i, op in enumerate(disk.log[first:]))
            lost = (
                tuple(describe(disk, image)) if crash.startswith("power") else ("all that the page cache held stays",)
            )
            self.report.violations.append(
                Violation(crash=crash, position=len(disk.log), fault=fault, lost=lost, log=log)
            )
