"""Makes the golden files of the current format version, under tests/compat/v<version>/.

    python tests/compat/make_golden.py

Files that are there are never replaced: a released version's files are read for ever as they are. To make them anew
while a version is not released yet, delete its folder first. `states()` says what each holds; the test compares it.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import pccheck
from pccheck import format
from pccheck.reading import reader
from pccheck.storage.directory import Directory

HERE = Path(__file__).parent
NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NUMBERS += ("float16", "float32", "float64", "complex64", "complex128")
ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int4", "uint4")
TORCH = ("bool", "uint8", "int8", "int16", "int32", "int64")
TORCH += ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
CHUNK_BYTES = {"chunks": 4096, "one_array": 12288}


class Point(NamedTuple):
    """A namedtuple, which comes back by name and fields."""

    x: Any
    y: Any


@dataclasses.dataclass
class Settings:
    """A dataclass, which comes back as a namedtuple without `like`."""

    rate: float
    name: str


def python_values() -> dict[str, Any]:
    """Give every Python type that a state may hold, with its awkward values."""
    ordered = collections.OrderedDict(b=1, a=2)
    ordered._metadata = {"version": 2}  # type: ignore[attr-defined]
    return {
        "none": None,
        "bools": [True, False],
        "ints": (0, -1, 2**53, 2**53 + 1, -(2**63), 2**70, -(2**200)),
        "floats": [0.0, -0.0, 0.1, 1e-310, 1.7976931348623157e308, float("inf"), float("-inf"), float("nan"),
                   struct.unpack("<d", b"\x01\0\0\0\0\0\xf8\x7f")[0]],
        "complex": [1 + 2j, complex(-0.0, float("inf"))],
        "strings": ["", "plain", "emoji \U0001f600", "nul \0", "lone \ud800", "a/b~c", '"quoted"'],
        "bytes": [b"", b"\0\xff"],
        "long": {"text": "tä" * 3000, "bytes": bytes(range(256)) * 20},
        "empty": [[], (), {}, collections.OrderedDict()],
        "keys": {"1": "text", 1: "int", -7: "negative", None: "none", b"k": "bytes",
                 (1, ("a", 2.5)): "tuple", 0.5: "float", "": "empty", "a/b": "slash", "~": "tilde", 2**70: "large"},
        "ordered": ordered,
        "default": collections.defaultdict(list, {"a": [1]}),
        "counter": collections.Counter("hello"),
        "named": Point(1, [2.0]),
        "dataclass": Settings(0.5, "adam"),
        "deep": [[[[[[[[{"x": (1,)}]]]]]]]],
    }  # fmt: skip


def arrays() -> dict[str, Any]:
    """Give NumPy arrays and scalars of every dtype, shape and order that a state may hold."""
    base = np.arange(-3, 9)
    shared = np.linspace(0, 1, 7)
    return {
        **{name: base.astype(name).reshape(3, 4) for name in NUMBERS},
        **{name: np.arange(-4, 4).clip(0).astype(getattr(ml_dtypes, name)) for name in ML_DTYPES},
        "big_endian": base.astype(">f4"),
        "dates": np.array(["2024-02-29", "NaT"], "M8[D]"),
        "spans": np.array([1, -2], "m8[ns]"),
        "unicode": np.array(["a", "ü\U0001f600"], "<U3"),
        "ascii": np.array([b"ab", b""], "S4"),
        "struct": np.array([(1, 2.5, (3, 4))], [("a", "<i4"), ("b", "<f8"), ("c", "<u2", (2,))]),
        "scalars": [np.float32(0.1), np.int8(-5), np.bool_(True), ml_dtypes.bfloat16(1.5), np.datetime64("2024-01-01")],
        "no_dimensions": np.array(2.5),
        "empty": [np.zeros((0, 3), np.float32), np.zeros((2, 0, 5), np.int64)],
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "transposed": np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(1, 2, 0),
        "strided": np.arange(20.0)[::3],
        "nans": np.frombuffer(bytes.fromhex("010000000000f87f000000000000f0ff"), "<f8"),
        "tied": [shared, {"again": shared}],
    }


def tensors() -> dict[str, Any]:
    """Give torch tensors; needs torch."""
    import torch

    weight = torch.nn.Parameter(torch.arange(12, dtype=torch.float32).reshape(3, 4))
    return {
        **{name: torch.arange(6).to(getattr(torch, name)).reshape(2, 3) for name in TORCH},
        "no_dimensions": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "requires_grad": torch.ones(3, requires_grad=True),
        "parameter": weight,
        "tied": weight,
    }


def states() -> dict[str, Any]:
    """Give what the golden file of each name holds."""
    return {
        "python_values": python_values(),
        "arrays": arrays(),
        "tensors": tensors(),
        "chunks": {
            "a": np.arange(1500, dtype="<f4"),
            "b": np.arange(7, dtype="<i8"),
            "c": np.arange(1000, dtype="<u2"),
        },
        "one_array": np.arange(2000, dtype="<f8"),
        "nothing": {},
    }


def history(folder: Path) -> None:
    """Make a store of two runs, with a roll-back from step 40 to 30 between them, and kept checkpoints on both."""
    with pccheck.Checkpointer(folder, in_flight=1, keep=2, chunk_bytes=4096) as ck:
        for step in (10, 20, 30, 40):
            ck.save(step, {"w": np.full(1000, step, "<i4")}, metadata={"loss": 1 / step}).durable.result()
            if step in (10, 40):
                ck.pin(step)
    with pccheck.Checkpointer(folder, in_flight=1, keep=3, chunk_bytes=8192) as ck:
        ck.restore(step=30)
        ck.save(35, {"w": np.full(1000, 35, "<i4")}, metadata={"loss": 0.02}).durable.result()


def leaves_of(path: Path) -> dict[str, str]:
    """Give the SHA-256 of each leaf's bytes, by path."""
    volume = Directory(path.parent, create=False, write=False)
    medium = volume.open(path.name)
    record = reader.read_record(medium)
    assert record is not None
    manifest = reader.read_manifest(medium, record)
    payload = reader.read_payload(medium, manifest)
    medium.close()
    volume.close()
    return {e.path: hashlib.sha256(payload[e.offset : e.offset + e.nbytes]).hexdigest() for e in manifest.leaves}


def make_file(path: Path, state: Any, chunk_bytes: int) -> None:
    """Save a state, and keep the slot file as far as its manifest goes."""
    with tempfile.TemporaryDirectory() as scratch:
        with pccheck.Checkpointer(scratch, in_flight=1, chunk_bytes=chunk_bytes) as ck:
            ck.save(123, state, metadata={"name": path.stem}).durable.result()
        with pccheck.open(scratch) as view:
            data = Path(scratch, view.checkpoints[0].name).read_bytes()
    record = format.unpack_record(data)
    assert record is not None
    path.write_bytes(data[: record.manifest_offset + format.padded(record.manifest_bytes)])


def main() -> None:
    """Make what is missing."""
    target = HERE / f"v{format.VERSION}"
    target.mkdir(exist_ok=True)
    listed = target / "leaves.json"
    expected: dict[str, dict[str, str]] = json.loads(listed.read_text()) if listed.exists() else {}
    for name, state in states().items():
        path = target / f"{name}.pcc"
        if not path.exists():
            make_file(path, state, CHUNK_BYTES.get(name, 65536))
            expected[path.name] = leaves_of(path)
    if not (target / "store").exists():
        with tempfile.TemporaryDirectory() as scratch:
            history(Path(scratch, "store"))
            shutil.copytree(Path(scratch, "store"), target / "store")
    listed.write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
