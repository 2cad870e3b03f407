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

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from pccheck.testing.disk import Image, SimulatedDisk, SyncInfo
from pccheck.testing.images import Enumerator, describe
from pccheck.testing.scenario import Promises, Run, Saved, Scenario, fingerprint, make_state, restore_and_save
from pccheck.testing.simulated import SimulatedVolume
from pccheck.testing.system import System

Mutation = str | Callable[[SyncInfo, str], bool]
AFTER_STEP = 1_000_000  # the step of the save with which a disk is checked
EXCERPT = 14


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One crash after which an invariant does not hold.

    Args:
        crash: "process death" or "power loss", and after what.
        position: operations of the log before the crash.
        fault: what does not hold.
        lost: how the disk differs from what the process saw.
        log: the operations up to the crash.
    """

    crash: str
    position: int
    fault: str
    lost: tuple[str, ...]
    log: tuple[str, ...]

    def __str__(self) -> str:
        lost = "\n".join(f"    {line}" for line in self.lost)
        return f"{self.fault}\n  {self.crash} at {self.position}:\n{lost}\n  after\n" + "\n".join(self.log)


@dataclass(kw_only=True)
class Report:
    """What an exploration did and found.

    Args:
        positions: crash points looked at.
        images: legal disks enumerated at them.
        distinct: disks that recovery can tell apart, each checked once.
        reopened: process deaths after which the store was reopened and explored on.
        sampled: how often there were too many combinations to enumerate them all.
        violations: the first few of each kind of fault.
        violated: how many there were, by the first word of the fault: "I1", "I2", "I3".
        syncs: how often each sync was called, by purpose, in the run itself.
    """

    positions: int = 0
    images: int = 0
    distinct: int = 0
    reopened: int = 0
    sampled: int = 0
    violations: list[Violation] = field(default_factory=list)
    violated: Counter[str] = field(default_factory=Counter)
    syncs: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every invariant held after every crash."""
        return not self.violated

    def __str__(self) -> str:
        head = (
            f"{self.positions} crash points ({self.reopened} reopenings), {self.images} disks, {self.distinct} of them "
            f"distinct, {self.sampled} times sampled; violations: {dict(self.violated) or 'none'}"
        )
        return "\n\n".join([head, *map(str, self.violations)])


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
        mutate: purpose of the syncs to drop (as `system.classify` names them), or a function of sync and purpose.
        limit: up to so many combinations of unsynced units are enumerated exhaustively at each crash point.
        samples: random combinations beyond that.
        seed: of those.
        max_violations: how many of each kind to keep in the report.
        stop_at: return as soon as a fault is found that begins with this: "I1", or "" for any.
    """
    explorer = Explorer(system, mutate, Enumerator(system, limit=limit, samples=samples, seed=seed), max_violations)
    try:
        return explorer.explore(scenario, resumes, stop_at)
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
        self.stop_at: str | None = None
        self.stopped = False

    def explore(self, scenario: Scenario, resumes: Sequence[Scenario], stop_at: str | None) -> Report:
        """Run, walk the log, and for every different process death resume and walk again."""
        self.stop_at = stop_at
        run = Run(system=self.system, disk=SimulatedDisk(drop=self.drop, classify=self.system.classify))
        scenario(run)
        for op in run.disk.log:
            if op.purpose:
                self.report.syncs[op.purpose] = self.report.syncs.get(op.purpose, 0) + 1
        deaths: dict[object, tuple[int, Promises]] = {}
        for position, disk, promises in self._walk(run, SimulatedDisk(), Promises(), ""):
            # Of moments that look alike to a new process, the last is explored on: no other promised more.
            deaths[self._signature(disk, promises)] = (position, replace(promises))
        for position, promises in sorted(deaths.values(), key=lambda d: d[0]):
            for resume in resumes:
                if not self._done():
                    self._resume(run, position, promises, resume)
        return self.report

    def _signature(self, disk: SimulatedDisk, promises: Promises) -> object:
        files = tuple(
            tuple(c.key for c in self.enumerator.files(i, n, disk.files[i])) for n, i in sorted(disk.names.items())
        )
        pending = tuple((n, tuple(v)) for n, v in sorted(disk.pending_names.items()))
        return self.enumerator.now(disk)[0], files, pending, promises.pinned, promises.forbidden

    def _resume(self, run: Run, position: int, promises: Promises, resume: Scenario) -> None:
        disk = SimulatedDisk.replay(run.disk.log[:position], drop=self.drop, classify=self.system.classify)
        resumed = Run(system=self.system, disk=disk, salt="resumed", saved=dict(run.saved))
        resume(resumed)
        self.report.reopened += 1
        before = SimulatedDisk.replay(run.disk.log[:position])
        crash = f"after process death at {position} and `{getattr(resume, '__name__', 'resume')}`"
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
            if op.kind == "point" or self._done():
                continue
            self.report.positions += 1
            if not marked or not disks:
                disks = list({k: (k, i) for k, i in self._disks(disk)}.values())
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
        faults += [f"I2: recovery warns: {w.message}" for w in warned]
        faults += self._unexpected_reads(volumes, image)
        faults += [f"{fault}, after one more save" for fault in self.system.audit(SimulatedVolume(disk))]
        return replace(outcome, faults=tuple(faults))

    def _found(self, saver: Any, restored: Any) -> Outcome:
        steps = {}
        if hasattr(saver, "steps"):
            steps = {step: fingerprint(saver.restore(step, branch=False).state) for step in saver.steps()}
        if restored is None:
            return Outcome(steps=steps)
        return Outcome(counter=restored.counter, content=fingerprint(restored.state), steps=steps)

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
                    return [
                        f"extents: recovery read byte {at} of {names[inode]}, which System.extents says that it does not"
                    ]
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

    def _done(self) -> bool:
        return self.stopped
