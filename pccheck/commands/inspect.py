"""`pccheck inspect`: every checkpoint, and whether it is whole (floor 4: imports audit, printing; never a writer)."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from pccheck import audit, printing
from pccheck.errors import ContentError, MediumError, UsageError
from pccheck.reports import exit_code


def inspect(
    path: Annotated[Path, typer.Argument(help="A store, a slot file, a folder of rank-00000, ..., or linked folders.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and check all digests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show every checkpoint at PATH, and whether it is whole. Never writes; the store may be in use meanwhile.

    Exit status: 0 = at least one valid checkpoint (of several ranks: one that all ranks hold; of a store of links: none
    is needed) and nothing damaged; 1 = nothing valid, or something damaged; 2 = PATH is missing or is no store.
    """
    try:
        with ExitStack() as stack:
            progress = _progress(stack) if verify else None
            reports = audit.audit(path, verify=verify, progress=progress)
    except (UsageError, MediumError, ContentError) as error:
        print(f"pccheck inspect: {printing.plain(str(error))}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(printing.as_json(reports, verify=verify), indent=2))
    else:
        printing.show(reports, Console(highlight=False), verify=verify, now_s=time.time())
    raise typer.Exit(exit_code(reports))


def _progress(stack: ExitStack) -> audit.Progress | None:
    """Give a progress bar on the terminal of standard error; None where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    bar = stack.enter_context(Progress(*columns, console=console, transient=True))
    tasks: dict[str, TaskID] = {}

    def advance(name: str, count: int, total: int) -> None:
        if name not in tasks:
            tasks[name] = bar.add_task(printing.plain(name), total=total)
        bar.advance(tasks[name], count)

    return advance
