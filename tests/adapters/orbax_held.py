"""A handler whose saves are held by events, and fail where told: order and blocking are seen without a clock."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

LIMIT_S = 60.0


class HeldHandler(ocp.AsyncCheckpointHandler):
    """Stores one array, once the event of its save is set."""

    def __init__(self) -> None:
        self._waiting: dict[str, Any] = {}

    async def async_save(self, directory, args):
        if args.refuse is not None:
            raise args.refuse
        self._waiting[str(directory)] = np.array(args.item)
        return [_Held(args.gate, args.error)]

    def save(self, directory, args):
        if args.refuse is not None or args.error is not None:
            raise args.refuse or args.error
        np.save(directory / "array.npy", np.asarray(args.item))

    def finalize(self, directory):
        if str(directory) in self._waiting:
            np.save(directory / "array.npy", self._waiting.pop(str(directory)))

    def restore(self, directory, args=None):
        return np.load(directory / "array.npy")

    def metadata(self, directory):
        return {"dtype": str(np.load(directory / "array.npy").dtype)}


class _Held:
    def __init__(self, gate, error):
        self._gate, self._error = gate, error

    def result(self, timeout=None):
        if self._gate is not None and not self._gate.wait(LIMIT_S):
            raise TimeoutError("the test never opened the gate")
        if self._error is not None:
            raise self._error

    def cancel(self):
        return False


@ocp.args.register_with_handler(HeldHandler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
    item: Any
    gate: threading.Event | None = None
    error: BaseException | None = None  # of the background
    refuse: BaseException | None = None  # of save() itself


@ocp.args.register_with_handler(HeldHandler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
    item: Any = None


def registry() -> Any:
    made = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handler = HeldHandler()
    for item in ("default", "state"):
        made.add(item, Save, handler)
        made.add(item, Restore, handler)
    return made


class Call:
    """A call on a thread of its own, to see whether it blocks."""

    def __init__(self, function, *args, **kwargs):
        self.result: Any = None
        self.error: BaseException | None = None
        self._run = lambda: function(*args, **kwargs)
        self._thread = threading.Thread(target=self._call, daemon=True)
        self._thread.start()

    def _call(self):
        try:
            self.result = self._run()
        except BaseException as error:
            self.error = error

    def blocks(self) -> bool:
        """Whether it has not ended by now: a quick call that is slow today passes as blocked, never the reverse."""
        self._thread.join(0.1)
        return self._thread.is_alive()

    def ends(self) -> Any:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the call blocks"
        if self.error is not None:
            raise self.error
        return self.result
