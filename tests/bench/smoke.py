"""What the smoke tests of the benchmarks share: a quick run, and a saver that cheats (bench: imports contenders)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, final

from .contenders import Saver

ROOT = Path(__file__).parents[2]


def quick_run(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Run the benchmarks at their quickest; give the JSON and the text. They must end well and leave no file behind."""
    out, work = folder / "bench.json", folder / "work"
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--quick", f"--json={out}", f"--directory={work}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert os.listdir(work) == [], "the benchmark left files behind"
    return json.loads(out.read_text()), done.stdout


@final
class Stale:
    """Saves the first state only: what a measurement must not let pass.

    Args:
        inner: does all else.
    """

    name, in_flight = "stale", 1

    def __init__(self, inner: Saver) -> None:
        self._inner = inner
        self._saved = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def save(self, step: int, state: Any) -> None:
        if not self._saved:
            self._inner.save(step, state)
        self._saved = True
