"""Pictures, drawn with matplotlib if it is installed (floor 4: imports errors; matplotlib in functions)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pccheck.errors import MediumError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 150


def figure(width: float, height: float) -> Figure:
    """Give an empty figure of a size in inches, which needs no display.

    Raises UsageError without matplotlib, with how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(f"drawing needs matplotlib ({error}): pip install 'pccheck[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, file: Path) -> None:
    """Write a figure; the file's ending says the format, such as .png or .svg.

    Raises UsageError for an ending that matplotlib does not know, MediumError if the file cannot be written.
    """
    if file.suffix.lower().lstrip(".") not in figure.canvas.get_supported_filetypes():
        raise UsageError(f"{file}: its ending must be .png, .svg, .pdf or another that matplotlib writes")
    try:
        figure.savefig(file, dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise MediumError("writing the picture", str(file), error) from error
