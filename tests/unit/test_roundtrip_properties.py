"""Any state comes back the same to the last bit, through one planner that sees them all."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pccheck.leaves import ABSENT
from pccheck.state import manifest, tree
from pccheck.state.assembly import assemble
from pccheck.state.kinds import kind_of
from pccheck.state.planner import Planner
from pccheck.state.structure import Structure
from pccheck.testing.compare import difference
from tests.unit.captured import space_of

SETTINGS = settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)


class Pair(NamedTuple):
    first: Any
    second: Any


class Nothing(NamedTuple):
    pass


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)  # lone surrogates, too
SMALL = (
    st.none() | st.booleans() | st.integers(-(2**90), 2**90) | st.floats(width=64, allow_nan=True)
    | st.complex_numbers() | ANY_TEXT | st.binary(max_size=12)
)  # fmt: skip
LONG = st.builds(lambda t, n: t * n, st.sampled_from(["x", "é", "\ud800"]), st.integers(4090, 4100)) | st.builds(
    bytes, st.integers(4090, 4100)
)
KEYS = st.recursive(SMALL, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3).filter(
    lambda k: "nan" not in repr(k)
)
DTYPES = st.sampled_from([
    *["?", "<i1", "<u2", ">i4", "<u8", "<f2", ">f4", "<f8", "<c8", "<M8[ns]", "<m8[D]", "S3", "<U2", "V5"],
    *[ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.int4, np.dtype([("a", "<i2"), ("b", "<f4", (2,))])],
])  # fmt: skip


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    base = np.zeros(tuple(2 * n for n in shape), dtype)
    if base.size and dtype.kind != "U":
        raw = base.reshape(-1).view(np.uint8)
        top = 2 if dtype.kind == "b" or dtype.name == "int4" else 256
        raw[:] = np.random.default_rng(draw(st.integers(0, 9))).integers(0, top, raw.size, np.uint8)
    cut = base[(*(slice(0, n) for n in shape), ...)]
    array = draw(st.sampled_from([cut, np.ascontiguousarray(cut).reshape(shape), np.asfortranarray(cut), cut.T]))
    if array.shape == () and draw(st.booleans()):
        return array[()]
    return array


def containers(inner):
    items = st.lists(st.tuples(KEYS, inner), max_size=4)
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | items.map(dict)
        | items.map(collections.OrderedDict)
        | items.map(lambda i: collections.defaultdict(list, i))
        | st.builds(Pair, inner, inner)
        | st.builds(Nothing)
        | inner.map(lambda x: [x, x])  # tied
    )


STATES = st.recursive(SMALL | arrays() | LONG, containers, max_leaves=25)


def through(planner, state, like=ABSENT):
    prepared = planner.prepare(state, step=1)
    space = space_of(prepared)
    digests = bytes(16 * len(prepared.layout.chunks))
    data = prepared.encode_manifest(counter=1, incarnation=1, rank=0, world=1, base=0, digests=digests)
    assert len(data) <= prepared.manifest_room
    found = manifest.decode(data)

    def read(index):
        entry = found.leaves[index]
        return memoryview(space)[entry.offset : entry.offset + entry.nbytes]

    return assemble(found, read, kind_of, like=like)[0]


@SETTINGS
@given(STATES)
def test_any_state_comes_back(state):
    planner = Planner(kind_of, 4096)
    assert difference(state, through(planner, state), by_field=True) is None
    assert difference(state, through(planner, state, like=state)) is None


@SETTINGS
@given(st.lists(STATES, min_size=2, max_size=4))
def test_one_planner_never_mixes_states(states):
    planner = Planner(kind_of, 4096)
    for state in [*states, *states[:1]]:
        assert difference(state, through(planner, state), by_field=True) is None
        assert difference(state, through(planner, state), by_field=True) is None


@SETTINGS
@given(STATES)
def test_paths_name_each_leaf_once(state):
    _, leaves, paths = tree.flatten(state, lambda value: kind_of(value) is not None)
    assert len(set(paths)) == len(paths) == len(leaves)
    assert all(path.isprintable() for path in paths)


@SETTINGS
@given(STATES, STATES)
def test_a_structure_fits_itself_and_tells_others_apart(one, other):
    """What the quick route takes for the same has the same skeleton but for values, and the same types of leaves."""

    def told(state):
        skeleton, leaves, paths = tree.flatten(state, lambda value: kind_of(value) is not None, type)
        return repr(skeleton), list(map(type, leaves)), paths

    structure = Structure(one)
    ends = structure.match(one)
    assert ends is not None
    assert sorted(structure.order) == list(range(len(ends)))
    leaves = tree.flatten(one, lambda value: kind_of(value) is not None)[1]
    depth_first = iter([ends[i] for i in structure.order])
    assert all(any(leaf is end for end in depth_first) for leaf in leaves), "in the order of the tree"
    if structure.match(other) is not None and not _has_long_text(one) and not _has_long_text(other):
        assert told(one) == told(other)
    elif not _has_long_text(one) and not _has_long_text(other):
        assert told(one) != told(other)


def _has_long_text(state):
    return any(type(leaf) in (str, bytes) for leaf in tree.flatten(state, lambda value: kind_of(value) is not None)[1])
