"""Which machine, file system and versions the figures are from (bench: imports pccheck)."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from pccheck.pipeline.choose import native_missing


def describe(directory: Path) -> dict[str, str]:
    """Give what a reader must know to compare figures."""
    missing = native_missing()
    if missing is None:
        from pccheck import _native

        native = f"in use, {_native.isa()} kernels"
    else:
        native = f"NOT in use ({missing})"
    names = ("pccheck", "torch", "numpy", "safetensors")
    return {
        "processor": f"{os.cpu_count()} cores, {_processor()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": _file_system(directory),
        "Python": platform.python_version(),
        "versions": ", ".join(f"{name} {version(name)}" for name in names),
        "native extension": native,
        "load average": " ".join(f"{n:.2f}" for n in os.getloadavg()),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    done = subprocess.run(
        ["findmnt", "-n", "-o", "FSTYPE", "--target", str(directory)], text=True, capture_output=True, check=False
    )
    return done.stdout.strip() or "unknown"
