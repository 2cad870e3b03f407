"""The C sources under the sanitizers of the compiler, driven without Python by native_driver.c."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "pccheck" / "_native"
LIMIT_S = 240


def build(folder, sanitizers):
    """Compile the driver with everything that knows no Python; skip where the sanitizer cannot be linked."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler, and a linker that can wrap functions")
    if not SOURCES.is_dir():
        pytest.skip("no C sources beside the tests")
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g", "-O1", "-std=c11", "-pthread"]
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    linked = subprocess.run([compiler, *flags, str(probe), "-o", str(folder / "probe")], capture_output=True, text=True)
    if linked.returncode or subprocess.run([str(folder / "probe")], capture_output=True).returncode:
        pytest.skip(f"the compiler cannot make programs with {sanitizers}: {linked.stderr.strip()[-200:]}")
    files = [str(f) for f in sorted(SOURCES.glob("*.c")) if not f.name.startswith("module")]
    program = str(folder / "driver")
    wraps = ",".join(["-Wl", *(f"--wrap={name}" for name in ("pread", "pwrite", "fdatasync", "close"))])
    strict = ["-Wall", "-Wextra", "-Werror", wraps, f"-I{SOURCES}"]
    made = subprocess.run(
        [compiler, *flags, *strict, str(HERE / "native_driver.c"), *files, "-o", program],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return program


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_the_native_data_path_is_clean(tmp_path, sanitizers):
    program = build(tmp_path, sanitizers)
    for seed in ("1", "2"):
        done = subprocess.run(
            [program, str(tmp_path), seed],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"},
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout == "everything held\n"
