"""Where a save is linked to, asked for when it is needed (floor 2: imports arguments, save and below)."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late

from pccheck import arguments
from pccheck.errors import DeadlineError
from pccheck.saving.save import Link, Path, Underway


def await_path(work: Underway) -> str | None:
    """Give the absolute path that a save is to be linked to, None for none.

    Its caller's function may wait for the folder to be made, and for ever: so it runs on a thread of its own, which a
    save that has reached its deadline leaves behind.

    Raises:
        DeadlineError: it did not give a path before the save's deadline.
        UsageError: what it gave is no path.
        (any): what it raised.
    """
    link = work.link
    if link is None:
        return None
    return arguments.path(_called(work, link) if callable(link) else link, "link")


def _called(work: Underway, link: Link) -> Path:
    assert callable(link), "a path needs no call"
    answer: Future[Path] = Future()

    def call() -> None:
        try:
            answer.set_result(link())
        except BaseException as error:  # whatever it is, it is this save's
            answer.set_exception(error)

    threading.Thread(target=call, name="pccheck-link", daemon=True).start()
    try:
        return answer.result(work.left_s())
    except Late:
        if answer.done():
            raise  # its own
        raise DeadlineError(f"step {work.save.step}, the path that link() is to give", work.seconds()) from None
