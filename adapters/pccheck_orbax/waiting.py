"""Waiting: a call that runs to its end on a thread of its own, and processes that meet (imports orbax, jax)."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, final

import jax
import orbax.checkpoint as ocp

_config: Any = jax.config
_WAITER = object()


@final
class Call:
    """A call that another thread makes, with what the thread that made this had set for itself.

    A KeyboardInterrupt reaches the main thread alone: one that struck within a stock manager's save left it with two
    saves in one book-keeping. Here it strikes who waits, and the call goes on. Thread-safe.

    Args:
        function: what to call; what it raises is kept as `error`.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._owner: dict[str, object] = {}  # setdefault() is atomic, and may be repeated after an interrupt
        self._ended = threading.Event()
        self._context = contextvars.copy_context()
        self._x64, self._device = _config.jax_enable_x64, _config.jax_default_device
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"Call({'ended' if self.ended else 'running' if self.running else 'not begun'}, {self.error!r})"

    @property
    def running(self) -> bool:
        """Whether it has begun and not ended."""
        return "by" in self._owner and not self.ended

    @property
    def ended(self) -> bool:
        """Whether it has ended, or was withdrawn."""
        return self._ended.is_set() or self._owner.get("by") is _WAITER

    def run(self) -> None:
        """Make the call, unless it was withdrawn."""
        thread = object()
        if self._owner.setdefault("by", thread) is not thread:
            return
        try:
            with contextlib.ExitStack() as stack:  # JAX keeps these per thread
                if _config.jax_enable_x64 != self._x64:
                    stack.enter_context(jax.enable_x64(self._x64))
                if _config.jax_default_device != self._device:
                    stack.enter_context(jax.default_device(self._device))
                self._context.run(self._function)
        except BaseException as error:
            self.error = error
        finally:
            del self._function  # what it holds: of a save the whole state, which the next one would let go of, waiting
            self._ended.set()

    def withdraw(self) -> bool:
        """Keep it from beginning; False where it has begun, True also when asked again."""
        return self._owner.setdefault("by", _WAITER) is _WAITER

    def wait(self) -> None:
        """Wait until it has ended: as long as the call itself takes."""
        if not self.ended:
            self._ended.wait()


def meet(options: Any, processes: set[int] | None, what: str, turn: int, where: object) -> None:
    """Wait for the other processes (None: there are none), at most `AsyncOptions.timeout_secs`; TimeoutError then.

    Arguments: options: the manager's; what: what all come to, for the `turn`th time; where: the root, to be named.
    """
    if processes is None:
        return
    wait = options.async_options or ocp.AsyncOptions()
    barrier = wait.barrier_sync_fn or ocp.multihost.get_barrier_sync_fn(processes=processes)
    prefix = options.multiprocessing_options.barrier_sync_key_prefix or ""
    try:
        barrier(key=f"{prefix}pccheck_{what}_{turn}", timeout_ms=int(wait.timeout_secs * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise TimeoutError(
            f"not all of the processes {sorted(processes)} came to {what} in {where} within"
            f" {wait.timeout_secs} s (AsyncOptions.timeout_secs): one is gone, or is somewhere else in its program"
        ) from error
