"""Every module of the house, parsed once: what the architecture tests look at."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Module:
    """One source file. `name` is its import name."""

    name: str
    path: str  # relative to the root, for messages
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        """Give its syntax tree."""
        return ast.parse(self.text, self.path)

    def imports(self, names: frozenset[str]) -> list[tuple[int, str]]:
        """Give (line, module) of everything imported, in functions too; `names` are the modules of the house.

        `from pccheck import plan` is an import of pccheck.state.plan; one that takes `__version__` only is of nothing.
        """
        found: list[tuple[int, str]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(node.lineno, a.name) for a in node.names if self._uses(a.name) != {"__version__"}]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    if alias.name != "__version__":
                        found.append((node.lineno, full if full in names else base))
        return sorted(set(found))

    def _uses(self, name: str) -> set[str]:
        nodes = [n for n in ast.walk(self.tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
        return {n.attr for n in nodes if isinstance(n.value, ast.Name) and n.value.id == name}

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _load(source_root: Path) -> list[Module]:
    modules = []
    for file in sorted(source_root.rglob("*.py")):
        parts = list(file.relative_to(source_root if source_root.name == "adapters" else ROOT).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, str(file.relative_to(ROOT)), file.read_text(), is_package))
    return modules


@pytest.fixture(scope="session")
def root() -> Path:
    """Give the root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def core() -> list[Module]:
    """Give every module of pccheck."""
    return _load(ROOT / "pccheck")


@pytest.fixture(scope="session")
def adapters() -> list[Module]:
    """Give every module of every adapter."""
    return _load(ROOT / "adapters")


@pytest.fixture(scope="session")
def parse() -> type[Module]:
    """Give what makes a module out of text: `parse(name, path, text)`."""
    return Module
