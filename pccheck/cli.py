"""The command line: its verbs, put together (floor 4: imports commands)."""

from __future__ import annotations

import importlib
import platform
from typing import Annotated

import typer

from pccheck.commands.advise import advise
from pccheck.commands.inspect import inspect
from pccheck.commands.probe import probe
from pccheck.commands.replay import replay
from pccheck.commands.report import report
from pccheck.version import __version__

VERBS = (inspect, report, advise, probe, replay)


def main() -> None:
    """Run the command line."""
    build()()


def build() -> typer.Typer:
    """Put the command line together."""
    app = typer.Typer(
        name="pccheck",
        help="Look at checkpoints that pccheck made.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for verb in VERBS:
        app.command()(verb)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print("\n".join(version_lines()))
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    pass


def version_lines() -> list[str]:
    """Give what `pccheck --version` prints: our version, the data path in use, the interpreter, the platform."""
    try:
        path = f"native ({importlib.import_module('pccheck._native').isa()})"
    except (ImportError, AttributeError):
        path = "portable: the extension was not built, so saving costs the training loop more"
    return [
        f"pccheck {__version__}",
        f"data path: {path}",
        f"python: {platform.python_implementation()} {platform.python_version()}",
        f"platform: {platform.platform()}",
    ]


if __name__ == "__main__":
    main()
