"""How the conformance checks tell what was broken (beside the floors: imports medium)."""

from __future__ import annotations

from collections.abc import Callable

from pccheck.storage.medium import Medium


def check(condition: object, promise: str) -> None:
    """Raise AssertionError that tells which promise was broken."""
    if not condition:
        raise AssertionError(f"broken promise: {promise}")


def raises(error: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], object], what: str) -> None:
    """Raise AssertionError unless `call` raises `error`."""
    try:
        call()
    except error:
        return
    names = error.__name__ if isinstance(error, type) else " or ".join(e.__name__ for e in error)
    raise AssertionError(f"broken promise: {what} raises {names}")


def read(medium: Medium, length: int, offset: int) -> bytes:
    """Give bytes of a medium."""
    room = bytearray(length)
    medium.read_into(memoryview(room), offset)
    return bytes(room)
