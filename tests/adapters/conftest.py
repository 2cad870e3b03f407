"""What the tests of adapters share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# Read when JAX starts its backend, which no test of torch does: several CPU devices, to shard arrays over.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture
def fast_path(tmp_path):
    """A folder in memory where there is one, for tests of very many saves; else one on the disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="pccheck-test-", dir="/dev/shm") as folder:
        yield Path(folder)
