"""Starts trainers, reads what they told before they died, and checks what they left behind."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pccheck
from pccheck.audit import audit, exit_code
from pccheck.errors import UsageError
from pccheck.testing.scenario import fingerprint, make_state

TRAINER = Path(__file__).with_name("trainer.py")
DEADLINE_S = 60.0
POINTS = [
    "filling", "captured", "written", "data-synced", "sealed", "record-synced", "published", "word-synced", "reported",
    "agreed", "released",
]  # fmt: skip


@dataclass
class Told:
    """What trainers of one store told, over several lives."""

    saving: dict[int, str] = field(default_factory=dict)  # step -> fingerprint
    durable: int = 0  # the greatest counter
    exit: int | None = None
    lines: list[str] = field(default_factory=list)

    def hear(self, line: str, on_line: Callable[[str, list[str]], None] | None = None) -> None:
        word, *rest = line.split()
        self.lines.append(line)
        if word == "saving":
            assert self.saving.setdefault(int(rest[0]), rest[1]) == rest[1], "a step was trained differently"
        elif word == "durable":
            self.durable = max(self.durable, int(rest[0]))
        elif word == "exit":
            self.exit = int(rest[0])
        if on_line:
            on_line(word, rest)


class Server:
    """Forks trainers; each is a process of its own that was never anything else.

    Args:
        script: forks them for each JSON line of options, if it is called with "serve".
        deadline_s: for one such line; then it is killed.
    """

    def __init__(self, script: Path = TRAINER, deadline_s: float = DEADLINE_S) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(script), "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.deadline_s = deadline_s

    def ask(self, options: dict[str, object], hear: Callable[[str], bool]) -> None:
        """Have it do what the options say; `hear` gets each line that is told, and gives False for the last one."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(options) + "\n")
        self.process.stdin.flush()
        last: deque[str] = deque(maxlen=5)
        watchdog = threading.Timer(self.deadline_s, self.process.kill)
        watchdog.start()
        try:
            while True:
                line = self.process.stdout.readline()
                assert line, f"the server and what it had forked ended: {list(last)}"
                last.append(line)
                if not hear(line):
                    return
        finally:
            watchdog.cancel()

    def train(self, told: Told, on_line: Callable[[str, list[str]], None] | None = None, **options: object) -> int:
        """Run one trainer to its end and give its exit status."""

        def hear(line: str) -> bool:
            told.hear(line, on_line)
            return told.exit is None

        told.exit = None
        self.ask(options, hear)
        assert told.exit is not None
        return told.exit

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(self.deadline_s)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def torch_trainer(told: Told, **options: object) -> Iterator[tuple[subprocess.Popen[str], dict[str, list[str]]]]:
    """Run a torch trainer; what it told by now is in the dictionary, by first word."""
    process = subprocess.Popen(
        [sys.executable, str(TRAINER), "torch", json.dumps(options)], stdout=subprocess.PIPE, text=True
    )
    words: dict[str, list[str]] = {}
    assert process.stdout is not None
    stdout = process.stdout

    def listen() -> None:
        for line in stdout:
            told.hear(line, lambda word, rest: words.__setitem__(word, rest))

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        yield process, words
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        listener.join(DEADLINE_S)
        stdout.close()


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.005)


def check_what_is_left(directory: Path, told: Told, *, save_step: int | None = None, **options: object) -> None:
    """Hold a store whose trainer died against what it had told: nothing damaged, nothing durable lost, no lock left."""
    try:
        reports = audit(directory, verify=True)
    except UsageError:  # it died before it had made a store
        reports = []
    assert all(not r.damaged for r in reports), reports
    if told.durable:
        assert reports
        assert exit_code(reports) == 0, reports
    with pccheck.Checkpointer(directory, lock_timeout_s=0, **options) as ck:
        restored = ck.restore()
        assert (restored.counter if restored else 0) >= told.durable
        if restored:
            assert not restored.skipped
            assert fingerprint(restored.state).hex() == told.saving[restored.step]
        if save_step is not None:
            state = make_state(save_step, "parent")
            ck.save(save_step, state).durable.result(DEADLINE_S)
            again = ck.restore()
            assert again is not None
            assert (again.step, fingerprint(again.state)) == (save_step, fingerprint(state))
