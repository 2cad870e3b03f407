"""Fresh processes to measure in, one at a time, and rounds that alternate between contenders (bench: imports nothing)."""

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
DEADLINE_S = 900.0


class MeasurementError(RuntimeError):
    """A measurement failed in its process; the text holds the traceback from there."""


class Lab:
    """Starts each measurement in a process forked from a clean server that has imported torch and nothing else."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "safetensors.torch", "numpy"])

    def run(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Give what a function gives in a process of its own.

        Raises MeasurementError if it raised, died, or took longer than DEADLINE_S.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_measure, args=(sender, function, args, options))
        process.start()
        sender.close()
        try:
            ok, result = receiver.recv() if receiver.poll(DEADLINE_S) else (False, f"no answer in {DEADLINE_S:.0f} s")
        except EOFError:
            process.join(10)
            ok, result = False, f"the process ended with {process.exitcode}"
        finally:
            receiver.close()
            process.join(30)
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
