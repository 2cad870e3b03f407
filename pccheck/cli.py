"""The command line: its verbs, put together (floor 4: imports commands)."""

from __future__ import annotations

import importlib
import io
import os
import platform
import sys
from typing import Annotated, Any, final

import typer

from pccheck.commands.advise import advise
from pccheck.commands.inspect import inspect
from pccheck.commands.probe import probe
from pccheck.commands.replay import replay
from pccheck.commands.report import report
from pccheck.version import __version__

VERBS = (inspect, report, advise, probe, replay)


CLOSED_PIPE = 141  # as a shell tells of tools that SIGPIPE ends
UNWRITTEN = 74  # EX_IOERR of sysexits.h; what is smaller the verbs have meanings for


def main() -> None:
    """Run the command line.

    Where whoever reads its output goes (`| head`), it ends quietly with status CLOSED_PIPE; where its output cannot be
    written, such as on a full disk, it says so and ends with UNWRITTEN.
    """
    out = sys.stdout
    if out is not None:  # typer and rich would exit with 1, which means something here
        file = io.BufferedWriter(_Output(out.fileno(), "wb", closefd=False))
        sys.stdout = io.TextIOWrapper(file, out.encoding, out.errors, line_buffering=out.isatty())
    try:
        build()()
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()


@final
class _Output(io.FileIO):
    """Standard output that ends the program when nobody reads it any more, or it goes nowhere."""

    def write(self, data: Any, /) -> int:
        """Write, or raise SystemExit; what is flushed after that goes nowhere."""
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(error, BrokenPipeError):
                raise SystemExit(CLOSED_PIPE) from None
            print(f"pccheck: the output could not be written: {error.strerror}", file=sys.stderr)
            raise SystemExit(UNWRITTEN) from None


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
