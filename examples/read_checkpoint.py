"""An independent reader of a pccheck slot file, written from docs/format.md alone: standard library and NumPy only.

    python examples/read_checkpoint.py STORE_OR_SLOT_FILE

Prints every leaf of the newest checkpoint: path, dtype, shape, first values, and a SHA-256 of its bytes. It checks the
geometry, not the XXH3 digests, which need the xxhash package: `pccheck inspect --verify` does.
"""

import hashlib
import json
import struct
import sys
from pathlib import Path

import numpy as np

SEALED = 2
RECORD = struct.Struct("<8sII16sIIIIQQqQQQQ16s16sq")  # the table "The record", up to its zeros
# fmt: off
NAMES = [
    "magic", "version", "state", "store_id", "slot", "rank", "world", "digest_algorithm", "incarnation", "counter",
    "step", "base", "payload_bytes", "manifest_offset", "manifest_bytes", "manifest_digest", "link_digest", "time_ns",
]
# fmt: on


def read_record(path):
    """Give a slot's record as a dict; None where no sealed checkpoint is."""
    with open(path, "rb") as file:
        sector = file.read(512)
    if len(sector) < 512 or sector[:8] != b"PCCSLOT\0":
        return None
    record = dict(zip(NAMES, RECORD.unpack_from(sector), strict=True))
    if record["version"] != 1 or record["digest_algorithm"] != 1:
        raise SystemExit(f"{path}: version {record['version']} cannot be read by this program")
    return record if record["state"] == SEALED else None


def abandoned_counters(store):
    """Give the (low, high) ranges of the newer valid-looking copy in CHECK."""
    best, check = (-1, []), store / "CHECK"
    data = check.read_bytes() if check.exists() else b""
    for offset in (8192, 12288):
        page = data[offset : offset + 4096]
        if page[:8] == b"PCCABAND":
            sequence, count = struct.unpack_from("<QI", page, 8)
            ranges = [struct.unpack_from("<QQ", page, 24 + 16 * i) for i in range(min(count, 200))]
            best = max(best, (sequence, ranges))
    return best[1]


def newest(store):
    """Give the slot file with the greatest counter that no roll-back abandoned."""
    ranges = abandoned_counters(store)
    found = []
    for path in [*store.glob("slot-*.pcc"), *store.glob("kept/*.pcc")]:
        record = None if path.is_symlink() else read_record(path)
        if record and not any(low <= record["counter"] <= high for low, high in ranges):
            found.append((record["counter"], str(path)))
    if not found:
        raise SystemExit(f"{store}: no checkpoint")
    return Path(max(found)[1])


def read_leaf(file, manifest, leaf):
    """Give the bytes of one leaf: the chunks that cover it, joined and cut."""
    size = manifest["chunk_bytes"]
    first, last = leaf["offset"] // size, (leaf["offset"] + leaf["nbytes"] - 1) // size
    data = b""
    for chunk in manifest["chunks"][first : last + 1] if leaf["nbytes"] else []:
        if chunk.get("codec", "none") != "none":
            raise SystemExit(f"codec {chunk['codec']} cannot be read by this program")
        file.seek(chunk["offset"])
        data += file.read(chunk["data"])
    start = leaf["offset"] - first * size
    return data[start : start + leaf["nbytes"]]


def as_array(leaf, data):
    """Give the leaf as a NumPy array; small floats as float32, other types that NumPy lacks as raw bytes."""
    name, extra = leaf["dtype"], leaf.get("extra", {})
    shape = tuple(leaf["box"][1] if leaf.get("box") else leaf["shape"])  # of a part: its sizes
    if leaf["kind"] in ("str", "bytes"):
        return np.frombuffer(data, np.uint8)
    if name == "bfloat16":
        flat = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    elif name == "struct" or name.startswith(("float8", "float4", "float6", "int4", "uint4", "int2", "uint2", "int1")):
        flat = np.frombuffer(data, np.dtype((np.void, max(1, len(data) // max(1, int(np.prod(shape)))))))
    else:
        try:
            flat = np.frombuffer(data, np.dtype(name))
        except TypeError:
            return np.frombuffer(data, np.uint8)
    if "stride" not in extra:
        return flat.reshape(shape)
    return np.lib.stride_tricks.as_strided(flat, shape, [s * flat.itemsize for s in extra["stride"]])


def main(where):
    """Print what a store's newest checkpoint, or a slot file, holds."""
    path = newest(where) if where.is_dir() else where
    record = read_record(path)
    if record is None:
        raise SystemExit(f"{path}: no sealed checkpoint")
    with open(path, "rb") as file:
        file.seek(record["manifest_offset"])
        manifest = json.loads(file.read(record["manifest_bytes"]))
        assert manifest["counter"] == record["counter"], "record and manifest are of two checkpoints"
        print(f"{path.name}: step {record['step']}, counter {record['counter']}, metadata {manifest['metadata']}")
        for leaf in manifest["leaves"]:
            data = read_leaf(file, manifest, leaf)
            array, digest = as_array(leaf, data), hashlib.sha256(data).hexdigest()
            values = np.array2string(array.ravel()[:4], separator=", ", threshold=4)
            print(f"{leaf['path']}  {leaf['kind']} {leaf['dtype']} {leaf['shape']}  {values}  sha256 {digest[:16]}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
