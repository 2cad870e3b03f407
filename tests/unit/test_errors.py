"""Every error says what, where and what to do now, carries its facts, and survives a process border."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle

import pytest

from pccheck import errors
from pccheck.errors import PccheckError

IO = OSError(errno.EIO, "Input/output error")
SAMPLES = {
    "OptionError": (("keep", 0, "a whole number from 1 to 1000"), ["keep", "0", "1 to 1000"]),
    "UnsupportedLeafError": (("model/x", "set", "no order"), ["model/x", "set", "no order"]),
    "MismatchError": (
        (["a: missing", "b: unexpected"],),
        ["2 place(s)", "a: missing", "b: unexpected", "partial=True"],
    ),
    "ChangedError": ((7, ["model/w", "model/b"]), ["step 7", "model/w, model/b", "fence()"]),
    "StepNotFoundError": ((7, [9, 3], "/run/ck"), ["/run/ck", "7", "[3, 9]"]),
    "ClosedError": (("closed",), ["closed"]),
    "ForkedError": (("forked",), ["forked"]),
    "MediumError": (("write", "/run/ck/slot-000.pcc", IO, 4096), ["write", "slot-000.pcc", "4096", "Input/output"]),
    "StoreGoneError": (("sync", "/run/ck/CHECK", IO), ["sync", "/run/ck/CHECK"]),
    "FormatError": (("not of this format",), ["not of this format"]),
    "DamagedError": (
        ("slot-000.pcc", "digest differs"),
        ["slot-000.pcc", "digest differs", "pccheck inspect --verify PATH", "restore an older step"],
    ),
    "NoValidCheckpointError": (("/run/ck", ["slot 0: torn"]), ["/run/ck", "slot 0: torn", "inspect --verify"]),
    "ReusedError": (("reused",), ["reused"]),
    "CapacityError": (("/run/ck", 5_000_000, 1_000), ["/run/ck", "5,000,000", "1,000", "lower in_flight"]),
    "PoolMemoryError": ((5_000_000, 1_000), ["memory", "5,000,000", "1,000", "lower buffer_bytes or in_flight"]),
    "DeadlineError": (("checkpoint 3 to be written", 1.25), ["1.2 s", "checkpoint 3 to be written"]),
    "SkippedError": ((12, "both slots are in flight"), ["12", "both slots are in flight"]),
    "RanksError": (("rank 3 was restarted", [3]), ["rank 3 was restarted"]),
    "RankTimeoutError": (("the verdict on step 7", 2.5, [1, 4]), ["2.5 s", "step 7", "missing: ranks 1, 4"]),
    "CoordinatorLostError": (("the store at port 29500 cannot be reached",), ["29500"]),
    "StoreTaken": (("/run/ck", "process 12 on host a"), ["/run/ck", "process 12 on host a", "another directory"]),
}
GROUPS = {
    errors.UsageError: {"OptionError", "UnsupportedLeafError", "MismatchError", "StepNotFoundError"}
    | {"ClosedError", "ForkedError", "ChangedError"},
    errors.MediumError: {"StoreGoneError"},
    errors.RanksError: {"RankTimeoutError", "CoordinatorLostError"},
    errors.ContentError: {"FormatError", "DamagedError", "NoValidCheckpointError", "ReusedError"},
}
BUILTIN = {
    "OptionError": ValueError,
    "UnsupportedLeafError": TypeError,
    "StepNotFoundError": LookupError,
    "MediumError": OSError,
    "DeadlineError": TimeoutError,
    "RankTimeoutError": TimeoutError,
}
CLASSES = {name: c for name, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__}


def make(name):
    return CLASSES[name](*SAMPLES[name][0])


def test_every_error_is_sampled_here():
    bases = {"PccheckError", "UsageError", "ContentError"}
    assert CLASSES.keys() - bases == SAMPLES.keys(), "add a sample of the new error"


@pytest.mark.parametrize("name", SAMPLES)
def test_the_text_says_what_and_where(name):
    text = str(make(name))
    for fact in SAMPLES[name][1]:
        assert fact in text, f"{name} does not say {fact!r}: {text}"
    assert text == text.strip()


@pytest.mark.parametrize("name", SAMPLES)
def test_all_are_caught_by_one_base(name):
    error = make(name)
    assert isinstance(error, PccheckError)
    for group, members in GROUPS.items():
        assert isinstance(error, group) == (name in members or CLASSES[name] is group)
    if name in BUILTIN:
        assert isinstance(error, BUILTIN[name])


@pytest.mark.parametrize("name", SAMPLES)
def test_the_arguments_are_kept_as_attributes(name):
    error = make(name)
    parameters = [
        p for p in inspect.signature(CLASSES[name].__init__).parameters if p not in ("self", "args", "kwargs")
    ]
    renamed = {"error": "cause", "hint": None}
    for parameter, value in zip(parameters, SAMPLES[name][0], strict=False):
        attribute = renamed.get(parameter, parameter)
        if attribute is None:
            continue
        held = getattr(error, attribute)
        assert held == value or held == tuple(value) or held == tuple(sorted(value)), f"{name}.{attribute}"


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("how", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))], ids=["copy", "pickle"])
def test_errors_cross_process_borders(name, how):
    """A worker pool, or a future of another process, hands errors on by pickle."""
    error = make(name)
    other = how(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other).keys() == vars(error).keys()


def test_a_medium_error_is_the_os_error_it_was():
    error = errors.MediumError("write", "/f", OSError(errno.ENOSPC, "No space left on device"), 8192)
    assert error.errno == errno.ENOSPC
    assert error.offset == 8192
    assert "at byte 8192" in str(error)
    assert "at byte" not in str(errors.MediumError("write", "/f", IO))
    assert "unknown" in str(errors.MediumError("write", "/f", OSError("unknown")))


def test_damage_names_leaves_and_bytes_but_not_without_end():
    error = errors.DamagedError("f", "digest differs", offset=65536, length=4096, leaves=[f"w{i}" for i in range(20)])
    assert "65536..69632" in str(error)
    assert "w7 and more" in str(error)
    assert "w8" not in str(error)
    assert len(error.leaves) == 20
    assert "bytes" not in str(errors.DamagedError("f", "torn"))


def test_a_hint_takes_the_place_of_the_general_advice():
    error = errors.StoreTaken("/ck", "process 1", "Pass coordinator= under torchrun.")
    assert "coordinator=" in str(error)
    assert "another directory" not in str(error)


def test_a_leaf_is_told_of_as_it_was_used():
    saving = errors.UnsupportedLeafError("", "set", "no order")
    assert "cannot save a leaf of type set" in str(saving)
    assert "cannot save model/x of type set" in str(saving.at("model/x"))
    restoring = saving.at("", restoring=True)
    assert "cannot restore the state itself of type set: no order" in str(restoring)
    assert (restoring.type_name, restoring.reason, restoring.restoring) == ("set", "no order", True)


def test_where_none_verifies_no_older_step_is_advised():
    told = [f"slot {n}: {make('DamagedError')}" for n in range(2)]
    error = errors.NoValidCheckpointError("/run/ck", told)
    assert "older step" not in str(error)
    assert str(error).count("digest differs") == 2
