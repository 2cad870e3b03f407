"""Folders that the conformance tests share."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from pccheck.storage.filesystem import storage_of


@pytest.fixture
def shared_memory():
    """Give a folder on tmpfs."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm here")
    folder = tempfile.mkdtemp(dir="/dev/shm", prefix="pccheck-test-")
    fd = os.open(folder, os.O_RDONLY)
    storage = storage_of(fd)
    os.close(fd)
    if storage != "mapped":
        shutil.rmtree(folder)
        pytest.skip("/dev/shm is no tmpfs here")
    yield folder
    shutil.rmtree(folder)
