"""Small file systems of their own for the tests of this folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """Mount tmpfs file systems of a given size below `tmp_path`; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(size_bytes: int) -> Path:
        place = tmp_path / f"disk-{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "pccheck-test", str(place)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except OSError as error:
            pytest.skip(f"cannot mount a tmpfs here: {error}")
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], capture_output=True, timeout=30, check=True)


@pytest.fixture
def fast_path(tmp_path):
    """A folder in memory where there is one, for tests of very many saves; else one on the disk."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    import tempfile

    with tempfile.TemporaryDirectory(prefix="pccheck-test-", dir=shm) as folder:
        yield Path(folder)
