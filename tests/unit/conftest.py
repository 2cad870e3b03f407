"""Fixtures of several unit tests."""

import errno
import fcntl

import pytest


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without locks, such as some mounts over a network are."""

    def refuse(fd, how):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr("pccheck.storage.fileio._lock_file", refuse, raising=False)
