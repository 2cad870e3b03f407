"""Options are checked where they are made, and the error names the field, the value and the range."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pccheck.errors import OptionError, PccheckError
from pccheck.options import MIB, Options

WHOLE = {  # field: (lowest, highest)
    "in_flight": (1, 64),
    "keep": (0, 1000),
    "keep_every": (1, 1 << 62),
    "writers": (1, 64),
    "writers_per_checkpoint": (1, 64),
    "chunk_bytes": (4096, 1 << 30),
    "buffer_bytes": (32 * MIB, 1 << 46),
}
SECONDS = ("max_block_s", "write_timeout_s", "lock_timeout_s", "exit_timeout_s", "agree_timeout_s")
CHOICES = {
    "snapshot": ("copy", "lazy", "device", "auto"),
    "when_full": ("block", "skip"),
    "on_error": ("raise", "warn"),
    "pipeline": ("auto", "native", "portable"),
}
FLAGS = {"debug_captures": False, "history": True}


def refused(field, value, **others):
    with pytest.raises(OptionError) as caught:
        Options(**{field: value}, **others)
    error = caught.value
    assert error.field == field
    assert error.value is value
    assert field in str(error)
    assert repr(value) in str(error)
    assert error.allowed in str(error)
    return error


def test_the_defaults_are_the_documented_ones():
    options = Options()
    assert (options.in_flight, options.keep, options.keep_every, options.buffer_bytes) == (2, 1, None, None)
    assert (options.chunk_bytes, options.writers, options.snapshot) == (16 * MIB, 2, "copy")
    assert (options.when_full, options.max_block_s, options.on_error, options.pipeline) == (
        "block", None, "raise", "auto"
    )  # fmt: skip
    assert options.exit_timeout_s == 60.0


def test_every_field_is_held_by_a_test_here():
    assert {f.name for f in dataclasses.fields(Options)} == {*WHOLE, *SECONDS, *CHOICES, *FLAGS, "replicated"}


@pytest.mark.parametrize(("field", "ends"), WHOLE.items())
def test_whole_numbers_have_two_ends(field, ends):
    for value in ends:
        assert getattr(Options(**{field: value}), field) == value
    for value in (ends[0] - 1, ends[1] + 1, -1):
        error = refused(field, value)
        assert str(ends[0]) in error.allowed
        assert str(ends[1]) in error.allowed


@pytest.mark.parametrize("field", WHOLE)
@pytest.mark.parametrize("value", [True, 2.0, "2", b"2", [2], math.nan], ids=repr)
def test_a_whole_number_is_an_int(field, value):
    refused(field, value)


@pytest.mark.parametrize("field", ["in_flight", "keep", "writers", "chunk_bytes", *SECONDS[1:], *CHOICES])
def test_none_is_no_value_where_there_is_a_default(field):
    refused(field, None)


def test_chunks_are_whole_pages():
    assert Options(chunk_bytes=3 * 4096).chunk_bytes == 3 * 4096
    assert "multiple of 4096" in refused("chunk_bytes", 4097).allowed


def test_the_pool_holds_two_chunks():
    assert Options(chunk_bytes=1 * MIB, buffer_bytes=2 * MIB).buffer_bytes == 2 * MIB
    refused("buffer_bytes", 2 * MIB - 1, chunk_bytes=1 * MIB)


@pytest.mark.parametrize("field", SECONDS)
def test_seconds_are_finite_and_not_negative(field):
    for value in (0, 0.0, 1, 2.5):
        assert getattr(Options(**{field: value}), field) == value
    for value in (-1, -0.001, 1e9, math.inf, math.nan, True, "1"):
        with pytest.raises(OptionError) as caught:
            Options(**{field: value})
        assert caught.value.field == field
        assert "seconds" in str(caught.value)


@pytest.mark.parametrize(("field", "names"), CHOICES.items())
def test_choices_are_listed_when_refused(field, names):
    for name in names:
        assert getattr(Options(**{field: name}), field) == name
    for value in ("", names[0].upper(), names[0] + " ", True, 1):
        error = refused(field, value)
        assert all(repr(name) in error.allowed for name in names)


@pytest.mark.parametrize(("field", "default"), FLAGS.items())
def test_flags_are_true_or_false(field, default):
    assert getattr(Options(), field) is default
    assert getattr(Options(**{field: not default}), field) is not default
    for value in (None, 0, 1, "True"):
        assert "True or False" in refused(field, value).allowed


def test_replicated_is_all_nothing_or_paths():
    paths = ["model", "optimizer"]
    options = Options(replicated=paths)
    paths.append("more")
    assert options.replicated == ("model", "optimizer")
    assert (Options().replicated, Options(replicated=True).replicated) == (False, True)
    for value in ("model", None, 1, [1], {"model"}):
        assert "list of paths" in refused("replicated", value).allowed


def test_options_are_frozen_and_keyword_only():
    options = Options()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.keep = 2
    with pytest.raises(TypeError):
        Options(2)
    with pytest.raises(TypeError):
        Options(in_fligth=2)
    assert Options(keep=2) == Options(keep=2) != Options()


def test_a_changed_copy_is_checked_again():
    with pytest.raises(OptionError):
        dataclasses.replace(Options(), keep=-1)


def test_an_option_error_is_a_value_error_of_ours():
    assert issubclass(OptionError, ValueError)
    assert issubclass(OptionError, PccheckError)


def test_a_store_of_links_keeps_nothing():
    assert Options(keep=0).keep == 0
    with pytest.raises(OptionError, match="keep_every"):
        Options(keep=0, keep_every=10)
