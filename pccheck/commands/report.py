"""`pccheck report`: what checkpoints cost, and what failures took (floor 4: imports bill, printing; never a writer)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pccheck import printing
from pccheck.bill import metrics, showing
from pccheck.bill.report import report as report_on
from pccheck.errors import ContentError, MediumError, UsageError


def report(
    store: Annotated[Path, typer.Argument(help="A store, a folder of rank-00000, ..., or a folder of Orbax steps.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    prometheus: Annotated[
        Path | None,
        typer.Option("--prometheus", metavar="FILE", help="Also put metrics there, for node_exporter: *.prom."),
    ] = None,
) -> None:
    """Show what checkpoints cost in the runs of STORE, and what failures took. The store may be in use meanwhile.

    Exit status: 0 = told, even if no run is noted there; 2 = STORE is missing or is none, or FILE cannot be written.
    """
    try:
        found = report_on(store)
        if prometheus is not None:
            metrics.write(found, prometheus)
    except (UsageError, MediumError, ContentError) as error:
        print(f"pccheck report: {printing.plain(str(error))}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        showing.show(found, Console(highlight=False))
