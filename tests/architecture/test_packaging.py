"""What pyproject.toml lists is what lies in the tree: nothing is forgotten in a wheel."""

from __future__ import annotations

import tomllib

import pytest


@pytest.fixture(scope="module")
def project(root):
    return tomllib.loads((root / "pyproject.toml").read_text())


def test_the_list_of_packages_is_the_tree(root, project):
    there = {".".join(f.parent.relative_to(root).parts) for f in (root / "pccheck").rglob("__init__.py")}
    there |= {".".join(f.parent.relative_to(root / "adapters").parts) for f in (root / "adapters").rglob("__init__.py")}
    listed = project["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(there), "correct [tool.setuptools] packages in pyproject.toml"
    assert "" not in there, "adapters/ is a source root, not a package"


def test_every_adapter_is_placed_and_checked(root, project):
    tops = sorted(f.parent.name for f in (root / "adapters").glob("*/__init__.py"))
    placed = project["tool"]["setuptools"]["package-dir"]
    assert placed == {"pccheck": "pccheck", **{name: f"adapters/{name}" for name in tops}}
    assert sorted(project["tool"]["mypy"]["packages"]) == sorted(["pccheck", *tops])
    for folder in (root / "pccheck", *(root / "adapters" / name for name in tops)):
        assert (folder / "py.typed").exists(), f"{folder.name} lacks py.typed"


def test_every_c_source_is_built(root, project):
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    native = root / "pccheck" / "_native"
    assert sorted(extension["sources"]) == sorted(str(f.relative_to(root)) for f in native.glob("*.c"))
    assert sorted(extension["depends"]) == sorted(str(f.relative_to(root)) for f in native.glob("*.h"))
    assert extension["optional"], "a machine without a compiler installs too"


def test_torch_is_pinned_for_developers(project):
    (pin,) = [r for r in project["project"]["optional-dependencies"]["dev"] if r.startswith(("torch=", "torch>"))]
    assert pin.startswith("torch=="), "an open range may pull a build with several GB of CUDA"


def test_the_release_is_told_once_and_has_its_changes_written_down(root, project):
    import pccheck

    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "pccheck.version.__version__"}
    assert f"## {pccheck.__version__}" in (root / "docs" / "changelog.md").read_text()
