"""Makers of pipelines and media that the tests of both pipelines share."""

from __future__ import annotations

import itertools
import os

import pytest

from pccheck.pipeline.choose import make_pipeline, native_missing
from pccheck.storage.directory import Directory
from pccheck.storage.media import FileMedium

MISSING = native_missing()
PIPELINES = [
    "portable",
    pytest.param("native", marks=pytest.mark.skipif(MISSING is not None, reason=f"native not built: {MISSING}")),
]


def maker(name, writers, **more):
    """Give a maker of pipelines."""
    return lambda buffer_bytes, chunk_bytes: make_pipeline(name, buffer_bytes, chunk_bytes, writers, **more)


def of_volume(folder, storage=None):
    """Give a maker of media as the volume chooses them; skips where these are not of the kind that is asked for."""
    volume, numbers = Directory(folder, create=True, write=True), itertools.count()
    if storage not in (None, volume.storage):
        pytest.skip(f"{folder} is {volume.storage}, not {storage}")
    return lambda size: volume.create(f"slot-{next(numbers):03d}.pcc", size)


def files(folder, storage, wrap=lambda medium: medium):
    """Give a maker of media of one kind in a folder."""
    numbers = itertools.count()

    def make(size):
        path = f"{folder}/{next(numbers)}"
        medium = FileMedium(os.open(path, os.O_RDWR | os.O_CREAT), path, storage=storage, write=True)
        assert medium.storage == storage
        medium.allocate(size)
        return wrap(medium)

    return make


class Changed:
    """A pipeline whose `submit` is another: what the checks must find; `change` gets the pipeline and the arguments."""

    def __init__(self, inner, change):
        self.inner, self.change = inner, change

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def submit(self, *args, **kwargs):
        return self.change(self.inner, args, kwargs)


def hasty(inner, args, kwargs):
    """Submit a job that says at once that it needs the caller's memory no more."""
    return _Hasty(inner.submit(*args, **kwargs))


class _Hasty:
    def __init__(self, job):
        self.job = job

    def __getattr__(self, name):
        return getattr(self.job, name)

    def wait_captured(self, timeout_s=None, *, chunks=None):
        return True
