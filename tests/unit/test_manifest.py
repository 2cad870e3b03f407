"""Manifests: what is written is read back, and nothing that a file claims is believed unchecked."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pccheck.errors import FormatError, UsageError
from pccheck.state import manifest
from pccheck.state.assembly import assemble
from pccheck.state.boxes import Box
from pccheck.state.kinds import kind_of
from pccheck.state.manifest import MAX_METADATA_BYTES, ChunkEntry, LeafEntry, Manifest, encode_metadata
from pccheck.state.planner import Planner
from tests.unit.captured import space_of

STATE = {
    "a": np.arange(3000, dtype="<f4"), "p": [np.zeros((2, 0)), {"x": (1, -0.0, None)}, b"bytes", "text" * 2000],
    3: np.asfortranarray(np.ones((3, 4))), "r": np.zeros(2, [("u", "<i2"), ("v", "S3", (2,))]),
    "s": np.datetime64(3, "s"),
}  # fmt: skip
STATE["tied"] = STATE["a"]


def written(state=STATE, **about):
    """Give the manifest's bytes and the byte space."""
    prepared = Planner(kind_of, 4096).prepare(state, step=5, metadata=about.pop("metadata", {"loss": 0.5}))
    space = space_of(prepared)
    digests = bytes(range(16)) * len(prepared.layout.chunks)
    known = {"counter": 7, "incarnation": 2, "rank": 0, "world": 1, "base": 3, "digests": digests} | about
    return prepared.encode_manifest(**known), space


DATA, SPACE = written()


def test_what_is_written_is_read_back():
    found = manifest.decode(DATA)
    assert (found.version, found.step, found.counter, found.incarnation) == (1, 5, 7, 2)
    assert (found.rank, found.world, found.base, found.link, found.writer) == (0, 1, 3, None, "")
    assert found.metadata == {"loss": 0.5}
    assert found.data_bytes == len(SPACE)
    assert [e.path for e in found.leaves] == ["a", "p/0", "p/3", "3", "r", "s", "tied"]
    assert found.leaves[0].offset == found.leaves[-1].offset
    assert {c.digest for c in found.chunks} == {bytes(range(16)).hex()}
    assert manifest.decode(manifest.encode(found)) == found
    data, _ = written(link="/a/b", writer="w", rank=2, world=4)
    assert (manifest.decode(data).link, manifest.decode(data).writer, manifest.decode(data).rank) == ("/a/b", "w", 2)


def test_it_is_json_that_people_can_read():
    text = DATA.decode()
    assert '"path":"p/0","kind":"numpy","dtype":"<f8","shape":[2,0]' in text
    assert '"codec":"none"' in text
    assert msgspec.json.decode(DATA)["chunks"][0]["start"] == 0


def test_a_state_without_bytes_has_no_chunks():
    found = manifest.decode(written({"a": 1})[0])
    assert (found.chunks, found.leaves, found.data_bytes) == ([], [], 0)


def edited(*place_and_value):
    """Give the manifest with one thing in it replaced."""
    *place, last, value = place_and_value
    whole = inner = msgspec.json.decode(DATA)
    for key in place:
        inner = inner[key]
    inner[last] = value
    return msgspec.json.encode(whole)


WRONG = {
    "version": ("version", 2),
    "negative version": ("version", -1),
    "no chunk size": ("chunk_bytes", 0),
    "odd chunk size": ("chunk_bytes", 4097),
    "huge chunk size": ("chunk_bytes", 1 << 40),
    "rank beyond world": ("rank", 1),
    "negative counter": ("counter", -1),
    "step beyond 64 bits": ("step", 1 << 63),
    "bytes that no chunk holds": ("data_bytes", len(SPACE) + 1),
    "huge data": ("data_bytes", 1 << 62),
    "float for int": ("data_bytes", 1.5),
    "metadata is a list": ("metadata", []),
    "leaves is an object": ("leaves", {}),
    "chunk gap": ("chunks", 1, "start", 8192),
    "chunk overlap": ("chunks", 1, "start", 0),
    "chunk too long": ("chunks", 0, "data", 8192),
    "chunk empty": ("chunks", 0, "data", 0),
    "chunk short": ("chunks", 0, "data", 100),
    "stored is not padded": ("chunks", 0, "stored", 100),
    "stored is huge": ("chunks", 0, "stored", 1 << 50),
    "offset inside the record": ("chunks", 0, "offset", 0),
    "offset unaligned": ("chunks", 0, "offset", 65537),
    "offset negative": ("chunks", 0, "offset", -65536),
    "offsets collide": ("chunks", 1, "offset", 65536),
    "offset beyond 64 bits": ("chunks", 1, "offset", 1 << 70),
    "digest short": ("chunks", 0, "digest", "00"),
    "digest not hex": ("chunks", 0, "digest", "g" * 32),
    "codec unknown": ("chunks", 0, "codec", "zstd"),
    "leaf out of the data": ("leaves", 0, "offset", 1 << 40),
    "leaf negative": ("leaves", 0, "offset", -64),
    "leaf unaligned": ("leaves", 0, "offset", 1),
    "leaf too long": ("leaves", 2, "nbytes", 1 << 40),
    "leaf of negative length": ("leaves", 0, "nbytes", -1),
    "leaf overlaps": ("leaves", 2, "offset", 64),
    "leaf half tied": ("leaves", 6, "nbytes", 64),
    "path twice": ("leaves", 0, "path", "tied"),
    "shape negative": ("leaves", 0, "shape", [-3]),
    "shape huge": ("leaves", 0, "shape", [1 << 64]),
    "dimensions without end": ("leaves", 0, "shape", [1] * 65),
    "shape is text": ("leaves", 0, "shape", "3"),
    "extra is a list": ("leaves", 0, "extra", []),
    "part beyond the array": ("leaves", 0, "box", [[1], [3000]]),
    "part before the array": ("leaves", 0, "box", [[-1], [3000]]),
    "part of negative size": ("leaves", 0, "box", [[0], [-3000]]),
    "part of another rank": ("leaves", 0, "box", [[0, 0], [3000, 1]]),
    "part without sizes": ("leaves", 0, "box", [[0]]),
    "part of too few bytes": ("leaves", 0, "box", [[0], [2999]]),
    "empty part with bytes": ("leaves", 0, "box", [[0], [0]]),
    "part in another order": ("leaves", 3, "box", [[0, 0], [3, 2]]),
    "no leaf named": ("tree", None),
    "leaf unknown": ("tree", {"is": "leaf", "index": 99}),
    "node unknown": ("tree", {"is": "set", "items": []}),
    "node untagged": ("tree", {"items": []}),
    "node is a float": ("tree", 1.5),
    "factory unknown": ("tree", {"is": "defaultdict", "factory": "eval", "items": []}),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_claim_is_a_format_error(case):
    with pytest.raises(FormatError):
        manifest.decode(edited(*WRONG[case]))


def test_a_part_of_an_array_is_read_back():
    for box, nbytes in ((Box((5,), (3000,)), 12_000), (Box((0,), (3000,)), 12_000)):
        data = edited("leaves", 0, "shape", [4000])
        data = data.replace(
            b'"shape":[4000]', b'"shape":[4000],"box":%s' % msgspec.json.encode([box.offsets, box.sizes])
        )
        spec = manifest.decode(data).leaves[0].spec()
        assert (spec.shape, spec.local_shape, spec.box, spec.nbytes) == ((4000,), (3000,), box, nbytes)
    assert manifest.decode(edited("leaves", 1, "box", [[2, 0], [0, 0]])).leaves[1].spec().box == Box((2, 0), (0, 0))
    whole = manifest.decode(edited("leaves", 3, "box", [[0, 0], [3, 4]])).leaves[3].spec()
    assert (whole.box, whole.extra["stride"]) == (Box.whole((3, 4)), [1, 3]), "all of an array may be in any order"
    assert manifest.decode(edited("leaves", 1, "box", None)).leaves[1].spec().box is None
    assert b"box" not in DATA, "what is whole says nothing of parts"


DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.mark.parametrize(
    ("heading", "struct"), [("The manifest", Manifest), ("A leaf", LeafEntry), ("A chunk", ChunkEntry)]
)
def test_the_document_tells_every_member(heading, struct):
    text = DOCUMENT.read_text().split("\n## The manifest\n")[1].split("\n## ")[0]
    part = text if heading == "The manifest" else text.split(f"\n{heading}:\n")[1]
    rows = re.search(r"\|[-|]+\|\n((?:\|.*\n)+)", part)[1].splitlines()
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(told) == sorted(struct.__struct_fields__)


@pytest.mark.parametrize("cut", [0, 1, 100, len(DATA) - 1])
def test_a_cut_manifest_is_a_format_error(cut):
    with pytest.raises(FormatError):
        manifest.decode(DATA[:cut])


def test_more_than_a_manifest_is_a_format_error():
    for more in (b"x", b"{}", b"\0" * 4096):
        with pytest.raises(FormatError):
            manifest.decode(DATA + more)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"is":"list","items":[', b'{"is":"dict","items":[[1,'])
@pytest.mark.parametrize("where", [b'"tree":', b'"metadata":', b""])
def test_nesting_without_end_is_a_format_error(opening, where):
    bomb = opening * 200_000
    data = DATA.replace(where, where + bomb, 1) if where else bomb
    with pytest.raises(FormatError):
        manifest.decode(data)


def test_it_can_be_read_from_deep_inside_a_program():
    """The decoder counts the caller's frames: 100 levels must fit all the same."""
    state = np.zeros(1)
    for _ in range(100):
        state = {"k": state}
    data = written(state)[0]

    def deep(n):
        return manifest.decode(data) if n == 0 else deep(n - 1)

    assert len(deep(sys.getrecursionlimit() // 4).leaves) == 1


def test_claims_cost_no_memory_before_they_are_checked():
    import tracemalloc

    claims = [
        edited("data_bytes", 1 << 62),
        edited("leaves", 0, "nbytes", 1 << 62),
        edited("leaves", 1, "shape", [1 << 62, 0]),
    ]
    tracemalloc.start()
    try:
        for claim in claims:
            try:
                manifest.decode(claim)
            except FormatError:
                pass
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


# -- fuzzing ---------------------------------------------------------------------------------------------------------

SETTINGS = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from([0, 1, 64, 4096, 65536, len(SPACE), -1, 2**31, 2**63])
    | st.sampled_from(["", "leaf", "dict", "list", "namedtuple", "<f4", "struct", "bfloat16", "|V0", "<U0", "str"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def try_to_restore(data):
    """Whatever the bytes are: a state within the space that is there, or a FormatError."""
    try:
        found = manifest.decode(data)
    except FormatError:
        return
    if found.data_bytes > len(SPACE):
        return  # the caller holds it against the file
    space = memoryview(bytearray(SPACE))

    def read(index):
        entry = found.leaves[index]
        assert 0 <= entry.offset <= entry.offset + entry.nbytes <= len(space)
        return space[entry.offset : entry.offset + entry.nbytes]

    try:
        assemble(found, read, kind_of)
    except FormatError:
        pass


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_flipped_bytes_give_a_state_or_a_format_error(flips):
    data = bytearray(DATA)
    for place, value in flips:
        data[place] = value
    try_to_restore(bytes(data))


@SETTINGS
@given(st.data())
def test_replaced_parts_give_a_state_or_a_format_error(data):
    whole = inner = msgspec.json.decode(DATA)
    while True:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = data.draw(st.sampled_from(keys))
        child = inner[key]
        if not isinstance(child, (dict, list)) or not child or data.draw(st.booleans()):
            break
        inner = child
    action = data.draw(st.sampled_from(["replace", "remove", "double"]))
    if action == "replace":
        inner[key] = data.draw(JUNK)
    elif action == "remove":
        del inner[key]
    elif isinstance(inner, list):
        inner.insert(key, child)
    try:
        encoded = msgspec.json.encode(whole)
    except UnicodeEncodeError:
        return
    try_to_restore(encoded)


# -- metadata --------------------------------------------------------------------------------------------------------


def test_metadata_comes_back():
    about = {
        "loss": 0.1,
        "n": -(2**63),
        "tags": ["a", {"b": None}],
        "ok": True,
        "t": (1, 2),
        "np": np.float64(0.5),
        "é": "😀",
    }
    found = msgspec.json.decode(encode_metadata(about))
    assert found == {**about, "t": [1, 2]}
    assert encode_metadata(None) == encode_metadata({}) == b"{}"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"a": float("nan")}, r"metadata\['a'\] is nan"), ({"a": [1, float("inf")]}, r"metadata\['a'\]\[1\]"),
        ({"a": 2**63}, "int"), ({1: 2}, "key 1"), ({"a": {2: 3}}, "key 2"), ({"a": object()}, "object"),
        ({"a": np.zeros(2)}, "ndarray"), ({"a": b"x"}, "bytes"), ({"a": "x" * MAX_METADATA_BYTES}, "65,536"),
        ({"a": "\ud800"}, "Unicode"), ({"\ud800": 1}, "Unicode"), ("text", "must be a dict"), ([], "must be a dict"),
    ],
)  # fmt: skip
def test_other_metadata_is_refused_with_its_place(wrong, text):
    with pytest.raises(UsageError, match=text):
        encode_metadata(wrong)


def test_metadata_that_contains_itself_is_refused():
    loop = {}
    loop["a"] = loop
    with pytest.raises(UsageError, match="nested"):
        encode_metadata(loop)
