"""Fresh processes to measure in, one at a time or as many as there are ranks (bench: imports torch)."""

from __future__ import annotations

import multiprocessing as mp
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

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
        self._context.set_forkserver_preload(
            ["torch", __package__ + ".measures", __package__ + ".trainers", __package__ + ".ranks"]
        )

    def run(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Give what a function gives in a process of its own.

        Raises MeasurementError if it raised, died, or took longer than the deadline.
        """
        measured: T = self._end(self._start(function, args, options), time.monotonic() + self._deadline_s)
        return measured

    def together(self, function: Callable[..., T], world: int, *args: Any) -> list[T]:
        """Give what a function gives in processes that run at once, one for each rank.

        It is called with its rank, the world, the port of a TCPStore on 127.0.0.1, and `args`. Raises as `run` does.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        started = [self._start(function, (rank, world, store.port, *args), {}) for rank in range(world)]
        until_s, found, failed = time.monotonic() + self._deadline_s, [], None
        for process in started:
            try:
                found.append(self._end(process, until_s))
            except MeasurementError as error:  # the others wait for this rank in vain
                failed, until_s = failed or error, min(until_s, time.monotonic() + 1.0)
        if failed is not None:
            raise failed
        return found

    def _start(self, function: Callable[..., T], args: tuple[Any, ...], options: dict[str, Any]) -> _Started:
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_measure, args=(sender, function, args, options))
        process.start()
        sender.close()
        return _Started(process=process, receiver=receiver, call=f"{function.__name__}{args}")

    def _end(self, started: _Started, until_s: float) -> Any:
        process, receiver = started.process, started.receiver
        ok: bool
        result: Any
        try:
            ok, result = False, "no answer in time"
            if receiver.poll(max(0.0, until_s - time.monotonic())):
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
            raise MeasurementError(f"{started.call}: {result}")
        return result


@dataclass(frozen=True)
class _Started:
    process: Any  # of the context
    receiver: Connection
    call: str


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
