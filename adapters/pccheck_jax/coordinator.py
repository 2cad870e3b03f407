"""Ranks that agree through JAX's coordination service, without any collective (imports jax, pccheck.errors).

Keys, below `pccheck/<name>/`:

    session                  token and world of the present session; rank 0 sets it anew with each coordinator. After
                             that, the tokens of earlier ones of which keys may be there: their ranks died
    <token>/claim/<rank>     which process speaks as this rank: set once, so that a second one is found
    <token>/blob/<rank>      what it says
    <token>/left/<rank>      it has left

The service lives as long as process 0, and longer than a coordinator: nothing that is found there is believed to be of
this one. A rank claims its place in a session that rank 0 has opened, and leaves an unfinished one for a newer. The
keys of a session are removed once all of its ranks have left, or all ranks of a later one have been heard.
"""

from __future__ import annotations

import uuid
from typing import Any, final

import jax

from pccheck.deadlines import Calls
from pccheck.errors import ClosedError, OptionError, RanksError, UsageError

_MAX_PREVIOUS = 64
_NEEDED = ("key_value_set_bytes", "key_value_try_get_bytes", "key_value_dir_get_bytes", "key_value_delete")


@final
class JaxCoordinator:
    """Lets processes hear of each other through the service that `jax.distributed.initialize` started. Thread-safe.

    Rank and world are JAX's process number and number of processes.

    Args:
        name: keeps the coordinators of several Checkpointers apart: each needs its own, the same on all processes.
        timeout_s: seconds, more than 0, after which a service that does not answer counts as lost.

    Raises:
        OptionError: name or timeout_s is out of its range.
        UsageError: `jax.distributed.initialize` was not called, or this jax keeps its client elsewhere.
        CoordinatorLostError: the service does not answer.
    """

    def __init__(self, *, name: str = "checkpoints", timeout_s: float = 30.0) -> None:
        if not timeout_s > 0:
            raise OptionError("timeout_s", timeout_s, "more than 0 seconds")
        if not name or "/" in name:
            raise OptionError("name", name, 'a text without "/"')
        self._client = _client()
        self.rank, self.world = jax.process_index(), jax.process_count()
        self.name, self.timeout_s = name, timeout_s
        self._prefix = f"pccheck/{name}"
        self._last = b""  # what is to be heard of this rank
        self._session = b""  # as the service has it; empty = none joined
        self._refused: set[bytes] = set()  # sessions in which another process speaks as this rank
        self._previous: list[str] = []  # tokens of sessions whose ranks died, to be cleared
        self._complete = False  # every rank was heard in this session
        self._closed = False
        self._calls = Calls(timeout_s, service="JAX's coordination service", host="process 0")
        if self.rank == 0:
            self._calls.run(self._open)

    def publish(self, blob: bytes) -> None:
        """Leave this rank's blob in place of its last one.

        Raises:
            CoordinatorLostError: the service does not answer, or is gone; so says every later call.
        """
        self._assert_open()
        self._calls.run(lambda: self._publish(blob))

    def read(self) -> list[bytes | None]:
        """Give the newest blob of every rank, None where there is none yet; waits for the service, not for any rank.

        Raises as `publish` does, and RanksError where a newer session has replaced this one.
        """
        self._assert_open()
        return self._calls.run(self._read)

    def close(self) -> None:
        """Leave; the last to leave takes all keys away. Idempotent; a lost service is none of its business."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._session:
                self._calls.run(self._leave)
        except RanksError:
            pass
        finally:
            self._calls.end()

    # -- on the thread of the calls ---------------------------------------------------------------------------------

    def _open(self) -> None:
        words = (self._get("session") or b"").decode().split()
        self._previous = [words[0], *words[2:]][:_MAX_PREVIOUS] if words else []
        self._session = " ".join([uuid.uuid4().hex, str(self.world), *self._previous]).encode()
        self._claim(self._session)
        self._set("session", self._session)

    def _publish(self, blob: bytes) -> None:
        if not blob:
            raise UsageError("a blob has at least one byte")
        self._last = blob
        if self._session:
            self._set(self._key("blob"), blob)
        else:
            self._join()

    def _read(self) -> list[bytes | None]:
        self._join()
        if self._session:
            if self._get("session") != self._session:
                self._move()
            else:
                found = self._blobs()
                self._heard(found)
                return found
        return [self._last or None if rank == self.rank else None for rank in range(self.world)]

    def _blobs(self) -> list[bytes | None]:
        folder = f"{self._prefix}/{_token(self._session)}/blob/"
        there = {key.rsplit("/", 1)[1]: blob for key, blob in self._client.key_value_dir_get_bytes(folder)}
        return [there.get(str(rank)) for rank in range(self.world)]

    def _heard(self, blobs: list[bytes | None]) -> None:
        self._complete = self._complete or all(blobs)
        if self._complete and self._previous:  # the ranks are all here now: nobody reads there
            self._delete(self._previous)
            self._previous = []

    def _move(self) -> None:
        """Leave a session that rank 0 has replaced, if no agreement can have been reached in it."""
        if self.rank == 0 or self._complete:
            raise RanksError(
                f"the ranks were started again, or another coordinator took the name {self.name!r}: this one, of rank "
                f"{self.rank}, was replaced and must end; give each Checkpointer's coordinator a name= of its own",
                [self.rank],
            )
        self._session = b""
        self._join()

    def _join(self) -> None:
        """Enter the present session with what is to be said, unless another coordinator speaks as this rank there."""
        if self._session or not self._last:
            return
        session = self._get("session") or b""
        if not session or session in self._refused or session.split()[1] != str(self.world).encode():
            return
        if self._claim(session):
            self._session = session
            self._set(self._key("blob"), self._last)
        else:
            self._refused.add(session)  # of an earlier coordinator of this process: rank 0 will open another

    def _claim(self, session: bytes) -> bool:
        mine = uuid.uuid4().hex.encode()
        key = f"{self._prefix}/{_token(session)}/claim/{self.rank}"
        try:
            self._client.key_value_set_bytes(key, mine)
        except Exception as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def _leave(self) -> None:
        if self._get(f"{_token(self._session)}/claim/{self.rank}") is None:
            return  # a later session's ranks have cleared this one
        self._set(self._key("left"), b"1")
        folder = f"{self._prefix}/{_token(self._session)}/left/"
        if len(self._client.key_value_dir_get_bytes(folder)) == self.world:
            self._delete([_token(self._session), *self._previous])

    def _delete(self, tokens: list[str]) -> None:
        for token in tokens:
            self._client.key_value_delete(f"{self._prefix}/{token}/")

    def _key(self, what: str) -> str:
        return f"{_token(self._session)}/{what}/{self.rank}"

    def _set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(f"{self._prefix}/{key}", value, allow_overwrite=True)

    def _get(self, key: str) -> bytes | None:
        try:
            value: bytes = self._client.key_value_try_get_bytes(f"{self._prefix}/{key}")
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return value

    def _assert_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the coordinator {self.name!r} of rank {self.rank} is closed; make a new one")

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._calls.lost or ("joined" if self._session else "alone so far")
        return f"<JaxCoordinator {self.name!r}: rank {self.rank} of {self.world}, {state}>"


def _token(session: bytes) -> str:
    return session.split()[0].decode()


def _client() -> Any:
    """Give JAX's client of the coordination service, for which it has no public name."""
    try:
        from jax._src import distributed

        client = distributed.global_state.client
    except (ImportError, AttributeError):
        raise UsageError(
            f"jax {jax.__version__} keeps its coordination client where pccheck does not look; use "
            "pccheck.SharedDirectory(path, rank=jax.process_index(), world=jax.process_count())"
        ) from None
    if client is None:
        raise UsageError("call jax.distributed.initialize() first: its service is what the processes agree through")
    missing = [name for name in _NEEDED if not hasattr(client, name)]
    if missing:
        raise UsageError(
            f"the coordination client of jax {jax.__version__} has no {', '.join(missing)}; use pccheck.SharedDirectory"
        )
    return client
