"""Check what the built wheel and sdist hold: `check_packages.py FOLDER`."""

import sys
import tarfile
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
assert "-cp311-abi3-" in wheel.name, f"one wheel for all Pythons from 3.11 on, not {wheel.name}"

with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
tops = {name.split("/")[0] for name in names}
expected = {"pccheck", "pccheck_jax", "pccheck_orbax", "pccheck_torch"}
assert {t for t in tops if not t.endswith(".dist-info")} == expected, tops
for needed in ("pccheck/__init__.py", "pccheck/py.typed", "pccheck/testing/__init__.py", "pccheck_torch/py.typed"):
    assert needed in names, f"{wheel.name} lacks {needed}"
assert [n for n in names if n.startswith("pccheck/_native") and n.endswith(".abi3.so")], "the extension is missing"
stray = [n for n in names if n.endswith((".c", ".h", ".o")) or n.startswith(("adapters/", "tests/", "examples/"))]
assert not stray, f"{wheel.name} holds {stray}"
assert any(n.endswith("licenses/LICENSE") for n in names), "the licence is missing"

with tarfile.open(sdist) as tar:
    sources = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
root = Path(__file__).resolve().parents[1]
for file in (*(root / "pccheck").rglob("*.[chp]*"), *(root / "adapters").rglob("*.py"), root / "pyproject.toml"):
    if file.suffix in (".c", ".h", ".py", ".pyi", ".toml"):
        assert str(file.relative_to(root)) in sources, f"{sdist.name} lacks {file.relative_to(root)}"
print(f"{wheel.name}: {len(names)} files; {sdist.name}: {len(sources)} files")
