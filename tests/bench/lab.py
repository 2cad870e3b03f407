"""Fresh processes to measure in, one at a time (bench: imports nothing)."""

from __future__ import annotations

import multiprocessing as mp
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class MeasurementError(RuntimeError):
    """A measurement failed in its process; the text holds the traceback from there."""


class Lab:
    """Starts each measurement in a process forked from a clean server that has imported torch and nothing else.

    Args:
        deadline_s: seconds that one measurement may take.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", __package__ + ".measures", __package__ + ".loops"])

    def run(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Give what a function gives in a process of its own.

        Raises MeasurementError if it raised, died, or took longer than the deadline.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_measure, args=(sender, function, args, options))
        process.start()
        sender.close()
        ok: bool
        result: Any
        try:
            ok, result = False, f"no answer in {self._deadline_s:.0f} s"
            if receiver.poll(self._deadline_s):
                ok, result = receiver.recv()
        except EOFError:
            process.join(10)
            ok, result = False, f"the process ended with {process.exitcode}"
        finally:
            receiver.close()
            process.join(30 if ok else 1)
            if process.is_alive():
                process.kill()
                process.join()
        if not ok:
            raise MeasurementError(f"{function.__name__}{args}: {result}")
        measured: T = result
        return measured


def _measure(sender: Connection, function: Callable[..., Any], args: Any, options: Any) -> None:
    try:
        answer = (True, function(*args, **options))
    except BaseException:
        answer = (False, traceback.format_exc())
    sender.send(answer)
    sender.close()


@contextmanager
def emptied(directory: Path) -> Iterator[Path]:
    """Give a path at which nothing is, and remove what was made there."""
    shutil.rmtree(directory, ignore_errors=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
