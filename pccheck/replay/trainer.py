"""What trains, saves, and is killed: `python -m pccheck.replay.trainer FD JOB` (floor 4: imports replay.contender).

It imports and sets up first, says so, and waits for the word to go. From then on it tells each step and each save at
once: what it has not told when it is killed, it has not done. It ends when nobody listens any more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from pccheck.replay import contender as contenders
from pccheck.replay import places
from pccheck.replay.contender import Contender
from pccheck.replay.told import MOST_BYTES, Began, Go, Job, Missing, Ready, Saved, Saving, Stepped, Told
from pccheck.replay.training import Training


def main(arguments: list[str]) -> None:
    """Be a trainer, until killed or nobody listens."""
    link = Connection(int(arguments[0]))
    job = msgspec.json.decode(arguments[1].encode(), type=Job)
    with suppress(BrokenPipeError, EOFError, ConnectionResetError):  # the supervisor is gone
        try:
            make = contenders.find(job.contender)
        except ImportError as error:
            return _tell(link, Missing(str(error)))
        training = Training(job.state_bytes, seed=job.seed)
        training.gradients()  # whatever is done once, such as starting BLAS
        _tell(link, Ready(time.process_time(), training.state_bytes))
        go = msgspec.json.decode(link.recv_bytes(MOST_BYTES), type=Go)
        directory = Path(job.directory)
        contender = _begin(link, training, lambda: make(directory), directory, go)
        while True:
            _step(link, job, training, contender)


def _tell(link: Connection, told: Told) -> None:
    link.send_bytes(msgspec.json.encode(told))


def _begin(link: Connection, training: Training, make: Callable[[], Contender], directory: Path, go: Go) -> Contender:
    """Open, restore and check; begin anew, in an emptied directory, where what was restored is not what was saved."""
    refused, step, verify_s, at = None, 0, 0.0, time.monotonic()
    contender = make()
    try:
        restored = contender.restore(training.state)
    except Exception as error:  # such as of damage: a job would be stuck, and somebody would have it begin anew
        restored, refused = None, f"restore() raised {type(error).__name__}: {error}"
    load_s = time.monotonic() - at
    if restored is not None:
        step, state = restored
        refused = training.refusal(step, state, go.digests)
        verify_s = time.monotonic() - at - load_s
        if refused is None:
            training.adopt(state)
    if restored is None or refused is not None:
        training.reset()
        step = 0
    if refused is not None:
        contender.close()
        places.emptied(directory)
        contender = make()
        contender.restore(training.state)
        training.reset()
    _tell(link, Began(step, time.monotonic(), load_s, verify_s, refused))
    return contender


def _step(link: Connection, job: Job, training: Training, contender: Contender) -> None:
    """Do one step, and save if it is time."""
    launched_s = time.monotonic()
    training.gradients()
    time.sleep(max(0.0, launched_s + job.device_s - time.monotonic()))  # the device is at it; nothing here is held
    ready_s = time.monotonic()
    contender.fence()
    fence_s = time.monotonic() - ready_s
    training.update()
    done_s = time.monotonic()
    _tell(link, Stepped(training.step, done_s, fence_s))
    if training.step % job.every == 0:
        digest = training.digest()
        asked_s = time.monotonic()
        _tell(link, Saving(training.step, digest, asked_s))
        contender.save(training.step, training.state)
        _tell(link, Saved(training.step, time.monotonic() - asked_s))


if __name__ == "__main__":
    main(sys.argv[1:])
