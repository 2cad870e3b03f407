"""Every Python block of README.md and docs/ is run, each page's blocks in order in one namespace and one folder.

Pages may hold, where a reader does not see them:
    <!-- setup            Python that is run at this place: small stand-ins for what the reader has
    ...
    -->
    <!-- not run: reason -->   before a block that cannot be run
    <!-- needs: torch -->      the page is skipped where the module is not installed
In ```console blocks each line that begins with `$ pccheck` is run in the same folder and must end with status 0.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PIECE = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|^<!-- not run: (?P<reason>.+?) -->\n```\w+\n.*?^```$"
    r"|^```python\n(?P<python>.*?)^```$"
    r"|^```console\n(?P<console>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Piece:
    """One block to run: Python text, or a command."""

    kind: str
    text: str
    line: int


def pieces(page: str) -> list[Piece]:
    found = []
    for match in PIECE.finditer(page):
        kind = match.lastgroup
        if kind in ("setup", "python"):
            found.append(Piece("python", match[kind], page.count("\n", 0, match.start(kind)) + 1))
        elif kind == "console":
            line = page.count("\n", 0, match.start(kind)) + 1
            for i, command in enumerate(match[kind].splitlines()):
                if command.startswith("$ pccheck"):
                    found.append(Piece("console", command.removeprefix("$ "), line + i))
    return found


def run(name: str, page: str) -> None:
    """Run the blocks of a page in the current folder; errors name the page and its line."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for piece in pieces(page):
        if piece.kind == "python":
            text = "\n" * (piece.line - 1) + piece.text  # so that a traceback shows the line of the page
            exec(compile(text, name, "exec"), namespace)
        else:
            program, *arguments = shlex.split(piece.text, comments=True)
            command = [str(Path(sys.executable).with_name(program)), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, f"{name}:{piece.line}: {piece.text}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_the_page_run(page, tmp_path, monkeypatch):
    text = page.read_text()
    for module in re.findall(r"^<!-- needs: (\w+) -->$", text, re.MULTILINE):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{page.name} needs {module}")
    monkeypatch.chdir(tmp_path)
    run(str(page.relative_to(ROOT)), text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    gone = [target for target in targets if not (page.parent / target).exists()]
    assert not gone, f"{page.name} links to what is not there: {gone}"


def test_no_block_is_overlooked():
    """A fence that the pattern above does not take, for a stray space or a capital, is not run without a word."""
    for page in PAGES:
        text = page.read_text()
        fences = len(re.findall(r"^\s*(?:```|~~~) *(?:python|py|console)\b", text, re.MULTILINE | re.IGNORECASE))
        taken = sum(1 for m in PIECE.finditer(text) if m.lastgroup != "setup")
        assert fences == taken, f"{page.name}: {fences} fences, {taken} of them run or set aside"


SAMPLE = """# A page
<!-- setup
x = 20
-->
```python
x += 1
```
<!-- not run: it would end the process -->
```python
raise SystemExit(1)
```
```python
assert x == WANTED, x
```
"""


def test_blocks_share_a_namespace_and_errors_name_the_line():
    run("page.md", SAMPLE.replace("WANTED", "21"))
    with pytest.raises(AssertionError) as caught:
        run("page.md", SAMPLE.replace("WANTED", "22"))
    assert str(caught.traceback[-1].path) == "page.md"
    assert caught.traceback[-1].lineno + 1 == 13


def test_a_command_that_fails_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=r"page\.md:2: pccheck inspect nowhere"):
        run("page.md", "```console\n$ pccheck inspect nowhere\n```\n")
