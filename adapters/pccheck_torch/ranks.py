"""Ranks that agree through a `torch.distributed` store, without any collective (imports torch, pccheck.errors).

Keys, below `pccheck/<name>/`:

    session             token and world of the present session; rank 0 sets it anew each time it opens a coordinator.
                        After that, token and world of each earlier one of which keys may be there: their ranks died
    <token>/<rank>      the blob of a rank; there, and empty, before any rank can know the token
    <token>/left        how many ranks have left

A store may outlive workers that died (torchrun's lives in the agent), so nothing in it is believed to be of this run:
a rank joins a session only if no process has published as this rank there, and leaves an unfinished one for a newer.
Within a session each blob replaces the last by `compare_set`, so that a second process with the same rank is found.
Keys of a session vanish only when nobody can be reading them, since a `get` of a missing key blocks: once all of its
ranks have left, or all ranks of a later session have been heard.
"""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist

from pccheck.deadlines import Calls
from pccheck.errors import ClosedError, CoordinatorLostError, OptionError, RanksError, UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@final
class StoreCoordinator:
    """Lets ranks hear of each other through a `torch.distributed` store. Thread-safe; runs no collective.

    Args:
        store: a TCPStore, FileStore, HashStore or PrefixStore. None = that of the default process group, or, before
            `init_process_group`, the one that `torchrun` and the MASTER_ADDR of an `env://` start lead to.
        rank: of this process, from 0; None = as the process group, or the launcher, says.
        world: number of ranks; None = likewise.
        name: keeps the coordinators of several Checkpointers apart: each needs its own, the same on all ranks.
        timeout_s: seconds, more than 0, after which a store that does not answer counts as lost.

    Raises:
        OptionError: rank, world, name or timeout_s is out of its range.
        UsageError: there is no store to be found, and none was given.
        CoordinatorLostError: the store cannot be reached.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        rank: int | None = None,
        world: int | None = None,
        name: str = "checkpoints",
        timeout_s: float = 30.0,
    ) -> None:
        if not timeout_s > 0:
            raise OptionError("timeout_s", timeout_s, "more than 0 seconds")
        if not name or "/" in name:
            raise OptionError("name", name, 'a text without "/"')
        origin, self.rank, self.world = _defaults(store, rank, world, timeout_s)
        self._origin: Any = origin  # to be kept: it may own the server
        self.name, self.timeout_s = name, timeout_s
        self._prefix = f"pccheck/{name}"
        self._last = b""  # what the store holds of this rank, or what it is to hold once a session is joined
        self._session = b""  # as in the store; empty = none joined
        self._refused: set[bytes] = set()  # sessions in which another process spoke as this rank
        self._previous: list[bytes] = []  # sessions of ranks that died, to be cleared
        self._complete = False  # every rank was heard in this session
        self._closed = False
        self._calls = Calls(
            timeout_s, service="the store through which the ranks agree", host="the process that hosts it"
        )
        self._store: Any = self._origin
        self._calls.run(self._connect)

    def publish(self, blob: bytes) -> None:
        """Leave this rank's blob in place of its last one.

        Raises:
            CoordinatorLostError: the store does not answer, or is gone; so says every later call.
            RanksError: another process speaks as this rank, or has replaced this one.
        """
        self._assert_open()
        self._calls.run(lambda: self._publish(blob))

    def read(self) -> list[bytes | None]:
        """Give the newest blob of every rank, None where there is none yet; waits for the store, not for any rank.

        Raises as `publish` does.
        """
        self._assert_open()
        return self._calls.run(self._read)

    def close(self) -> None:
        """Leave; the last to leave takes all blobs away. Idempotent; a lost store is none of its business."""
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

    def _connect(self) -> None:
        """Take a connection of our own: one that waits, in a thread of the trainer's, would hold up all others."""
        self._store = self._origin.clone()
        self._store.set_timeout(timedelta(seconds=self.timeout_s / 2))  # so that its own error comes before ours
        if self.rank == 0:
            there = [one for one in _each(self._present_session()) if self._store.check(self._keys(one)[:1])]
            self._previous = there
            session = b" ".join([f"{uuid.uuid4().hex} {self.world}".encode(), *there])
            self._store.multi_set(self._keys(session), [b""] * self.world)
            self._store.set(self._session_key, session)
            self._session = session

    def _publish(self, blob: bytes) -> None:
        if self._session:
            self._replace(self._last, blob)
        self._last = blob
        self._join()

    def _replace(self, old: bytes, new: bytes) -> None:
        if self._store.compare_set(self._keys(self._session)[self.rank], old, new) != new:
            raise RanksError(
                f"another process speaks as rank {self.rank} in {self._prefix!r} of the store: start each rank once, "
                "and give each Checkpointer's coordinator a name= of its own",
                [self.rank],
            )

    def _read(self) -> list[bytes | None]:
        self._join()
        if self._session:
            if self._store.get(self._session_key) == self._session:
                blobs = self._blobs()
                if blobs is not None:
                    self._heard(blobs)
                    return [blob or None for blob in blobs]
            self._move()
        return [self._last or None if rank == self.rank else None for rank in range(self.world)]

    def _blobs(self) -> list[bytes] | None:
        """Give the blobs of this session; None where it was cleared after another had taken its place."""
        try:
            blobs: list[bytes] = self._store.multi_get(self._keys(self._session))
            return blobs
        except RuntimeError:
            if self._present_session() != self._session:
                return None
            raise

    def _heard(self, blobs: list[bytes]) -> None:
        self._complete = self._complete or all(blobs)
        if self._complete and self._previous:  # the ranks are all here now: nobody reads there
            for session in self._previous:
                self._delete(session)
            self._previous = []

    def _move(self) -> None:
        """Leave a session that rank 0 has replaced, if no agreement can have been reached in it."""
        if self.rank == 0 or self._complete:
            raise RanksError(
                f"the ranks were started again, or another coordinator took the name {self.name!r}: this one, of rank "
                f"{self.rank}, was replaced and must end",
                [self.rank],
            )
        self._session = b""
        self._join()

    def _join(self) -> None:
        """Enter the present session with what is to be said, unless this rank has spoken there before."""
        if self._session or not self._last:
            return
        session = self._present_session()
        if not session or session in self._refused or int(session.split()[1]) != self.world:
            return  # of a run that ended, or that this rank has left: rank 0 will open another
        key = self._keys(session)[self.rank]
        if self._store.compare_set(key, b"", self._last) == self._last:
            self._session = session
        else:
            self._refused.add(session)

    def _leave(self) -> None:
        if not self._store.check([self._keys(self._session)[self.rank]]):
            return  # a later session's ranks have cleared this one
        left: int = self._store.add(self._left_key(self._session), 1)
        if left == self.world:
            self._store.compare_set(self._session_key, self._session, b"")
            for session in _each(self._session):
                self._delete(session)

    def _delete(self, session: bytes) -> None:
        for key in (*self._keys(session), self._left_key(session)):
            self._store.delete_key(key)

    def _present_session(self) -> bytes:
        if not self._store.check([self._session_key]):
            return b""
        session: bytes = self._store.get(self._session_key)
        return session

    @property
    def _session_key(self) -> str:
        return f"{self._prefix}/session"

    def _left_key(self, session: bytes) -> str:
        return f"{self._prefix}/{session.split()[0].decode()}/left"

    def _keys(self, session: bytes) -> list[str]:
        token, world = session.decode().split()[:2]
        return [f"{self._prefix}/{token}/{rank}" for rank in range(int(world))]

    def _assert_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the coordinator {self.name!r} of rank {self.rank} is closed; make a new one")

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._calls.lost or ("joined" if self._session else "alone so far")
        return f"<StoreCoordinator {self.name!r}: rank {self.rank} of {self.world}, {state}>"


def _each(session: bytes) -> list[bytes]:
    """Give token and world of a session, and of those before it."""
    words = session.split()
    return [b" ".join(words[at : at + 2]) for at in range(0, len(words), 2)]


def _defaults(store: Store | None, rank: int | None, world: int | None, timeout_s: float) -> tuple[Store, int, int]:
    """Fill in what was not given, from the process group or, where there is none, from the launcher."""
    if store is None or rank is None or world is None:
        if dist.is_available() and dist.is_initialized():
            store = store if store is not None else dist.distributed_c10d._get_default_store()
            rank = dist.get_rank() if rank is None else rank
            world = dist.get_world_size() if world is None else world
        elif store is None:
            store, rank, world = _launched(rank, world, timeout_s)
        else:
            raise UsageError("say rank= and world= beside store=, or call torch.distributed.init_process_group first")
    if type(world) is not int or world < 1:
        raise OptionError("world", world, "a whole number from 1 on")
    if type(rank) is not int or not 0 <= rank < world:
        raise OptionError("rank", rank, f"a whole number from 0 to {world - 1}")
    return store, rank, world


def _launched(rank: int | None, world: int | None, timeout_s: float) -> tuple[Store, int, int]:
    from torch.distributed.rendezvous import rendezvous

    try:
        handler = rendezvous("env://", timeout=timedelta(seconds=timeout_s))
        store, its_rank, its_world = next(handler)
    except ValueError as error:
        raise UsageError(
            f"no store to agree through: give store=, rank= and world=, call torch.distributed.init_process_group "
            f"first, or start with torchrun ({error})"
        ) from error
    except RuntimeError as error:
        raise CoordinatorLostError(f"the store of the launcher cannot be reached: {error}") from error
    return store, its_rank if rank is None else rank, its_world if world is None else world
