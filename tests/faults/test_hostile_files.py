"""Case 40: files made to harm whoever opens them, opened by a process that has little memory and is watched."""

from __future__ import annotations

import json
import os
import pickle
import random
import socket
from pathlib import Path

import numpy as np
import pytest

from pccheck import format
from pccheck.format import SlotState
from pccheck.testing.slotfiles import STORE_ID, check_file, slot_file
from tests.faults.helpers import run_python

READER = """
import json, os, resource, signal, sys, time
import numpy as np
import pccheck
from pccheck import errors
import pccheck.audit, pccheck.reading.reader, pccheck.view

root, limit = sys.argv[1], int(sys.argv[2])
seen, armed = [], []
bytes(4).decode("utf-32-le"), bytes(4).decode("utf-32-be")  # codecs are loaded when they are first used

def hook(event, args):
    if not armed:
        return
    if event == "open":
        path = args[0]
        ours = (root, "/proc/", sys.prefix, sys.base_prefix)
        if isinstance(path, str) and path.startswith("/") and not path.startswith(ours) and not root.startswith(path):
            seen.append(f"open {path}")  # (a writer makes the names of the folders above its store durable)
    elif event == "import" and args[0] in ("pickle", "_pickle", "marshal", "shelve", "dill", "torch", "payload"):
        seen.append(f"import {args[0]}")
    elif event == "socket.gethostname":
        pass  # the holder of the lock says where it is
    elif event.startswith(("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess", "socket.", "pickle.",
                           "ctypes.dlopen", "marshal.", "code.__new__", "os.fork")) or event in ("exec", "compile"):
        seen.append(event)

sys.addaudithook(hook)

def vsz():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()

def attempt(call):
    del seen[:]
    armed.append(True)
    began = time.monotonic()
    try:
        call()
        outcome = "ok"
    except errors.PccheckError as error:
        outcome = type(error).__name__
    except BaseException as error:
        outcome = f"NOT OURS: {error!r}"[:300]
    finally:
        armed.clear()
    return {"outcome": outcome, "seen": list(seen), "seconds": time.monotonic() - began}

def view(path):
    with pccheck.open(path) as view:
        view.steps(), view.latest(), view.checkpoints
        restored = view.restore()
        for name in list(view.keys())[:20] if restored else ():
            view[name]

def write(path):
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pccheck.Checkpointer(path, chunk_bytes=4096, lock_timeout_s=0) as ck:
            ck.restore()

good = os.path.join(root, "good")
view(good), write(good), pccheck.audit.audit(good, verify=True)  # what is loaded late is loaded now
resource.setrlimit(resource.RLIMIT_AS, (vsz() + limit, resource.RLIM_INFINITY))
for name in sorted(os.listdir(root)):
    path = os.path.join(root, name)
    signal.alarm(30)
    told = {"view": attempt(lambda: view(path))}
    told["audit"] = attempt(lambda: pccheck.audit.audit(path, verify=True))
    if os.path.isdir(path):
        told["write"] = attempt(lambda: write(path))
    print(json.dumps([name, told]), flush=True)
"""

MARK = "/tmp/pccheck-hostile-code-was-run"


class Payload:
    def __reduce__(self):
        return os.system, (f"touch {MARK}",)


STATE = {"w": np.arange(2000.0), "b": np.ones(3, np.int8), "n": [1, "x"]}


def edits():
    """Give every hostile manifest by name: a function that changes the manifest's dict."""

    def leaf(**changes):
        return lambda m: m["leaves"][0].update(changes)

    def chunk(**changes):
        return lambda m: m["chunks"][0].update(changes)

    def top(**changes):
        return lambda m: m.update(changes)

    def many(kind, dtype, scalar=False):
        def edit(m):  # every one a copy of the same bytes, and no two alike
            first = m["leaves"][0]
            extra = {"scalar": True} if scalar else {}
            shape = [] if scalar else [first["nbytes"]]
            m["leaves"] = [
                {**first, "path": f"x{i}", "kind": kind, "dtype": dtype or f"<U{first['nbytes'] // 4}", "shape": shape,
                 "extra": {**extra, "i": i}} for i in range(20_000)
            ]  # fmt: skip
            m["tree"] = {"is": "list", "items": [{"is": "leaf", "index": i} for i in range(20_000)]}

        return edit

    def parts(count, shift=0, **changes):
        def edit(m):  # parts of one array, each with all the bytes of the leaf
            first, *others = m["leaves"]
            n = first["shape"][0]
            entries = [{**first, "shape": [count * n], "box": [[i * n], [n]], **changes} for i in range(count)]
            for i, entry in enumerate(entries):
                entry["offset"] += i * shift
            m["leaves"] = entries + others
            m["tree"]["items"][1][1]["index"] += count - 1

        return edit

    def nest(make, depth):
        def edit(m):
            node = None
            for _ in range(depth):
                node = make(node)
            m["tree"] = node

        return edit

    huge = (1 << 63) - 1
    return {
        "huge data": top(data_bytes=huge), "huge chunks": top(chunk_bytes=1 << 30),
        "vast chunks": top(chunk_bytes=huge),
        "negative data": top(data_bytes=-1), "other version": top(version=2), "no tree": lambda m: m.pop("tree"),
        "huge leaf": leaf(nbytes=huge), "huge shape": leaf(shape=[huge]),
        "shape that wraps": leaf(shape=[1 << 32, 1 << 32]),
        "shape that wraps to its size": leaf(shape=[1 << 62, 4, 2000]),
        "empty but huge": leaf(shape=[huge, 0], nbytes=0),
        "negative shape": leaf(shape=[-2000]), "10**9 leaves of shape": leaf(shape=[1] * 10_000),
        "negative leaf": leaf(offset=-64), "leaf behind the end": leaf(offset=1 << 40),
        "overlapping leaves": lambda m: m["leaves"][1].update(offset=m["leaves"][0]["offset"] + 64),
        "object dtype": leaf(dtype="|O8"), "object array": leaf(dtype="|O", shape=[2000]),
        "code for a dtype": leaf(dtype="__import__('os').system('true')"), "void": leaf(dtype="|V8"),
        "huge string dtype": leaf(dtype="<U2147483647"), "dtype of commas": leaf(dtype="f8,O,f8"),
        "struct of objects": leaf(dtype="struct", extra={"fields": [["a", "|O8"]]}),
        "kind os": leaf(kind="os:system"), "kind pickle": leaf(kind="pickle"), "kind of a module": leaf(kind="payload"),
        "path up": leaf(path="../../../etc/passwd"), "path absolute": leaf(path="/etc/passwd"),
        "path of NUL": leaf(path="a\0b"), "path long": leaf(path="x" * 1_000_000),
        "chunk before the payload": chunk(offset=0), "chunk negative": chunk(offset=-65536),
        "chunk behind the file": chunk(offset=1 << 50), "chunk huge": chunk(stored=huge), "codec": chunk(codec="zstd"),
        "digest": chunk(digest="zz"), "digest long": chunk(digest="0" * 1_000_000),
        "many copies of bytes": many("bytes", "bytes"), "many copies of str": many("str", "utf-8"),
        "many copies of scalars": many("numpy", "", scalar=True), "many arrays": many("numpy", "|u1"),
        "parts that share their bytes": parts(1000), "parts without end": parts(100_000, nbytes=0),
        "parts half shared": parts(2, shift=64), "parts of nothing": parts(1000, nbytes=0, shape=[huge]),
        "deep lists": nest(lambda n: {"is": "list", "items": [n]}, 400),
        "deep dicts": nest(lambda n: {"is": "dict", "items": [["k", n]]}, 300),
        "huge int": top(tree={"is": "int", "value": "f" * 3_000_000}),
        "huge float": top(tree={"is": "float", "value": "1e" + "9" * 1_000_000}),
        "namedtuple of code": top(tree={"is": "namedtuple", "name": "x);import os;os.abort()#", "fields": ["a"],
                                        "items": [1]}),
        "record of keywords": top(tree={"is": "record", "name": "class", "fields": ["__class__", "def"],
                                    "items": [1, 2]}),
        "unknown node": top(tree={"is": "eval", "value": "1"}),
        "leaf that is not there": top(tree={"is": "leaf", "index": 99}),
        "one leaf 10**5 times": top(tree={"is": "list", "items": [{"is": "leaf", "index": 0}] * 100_000}),
        "link": top(link="/etc/passwd"), "step of another": top(step=11),
        "metadata deep": top(metadata={"a": [[[[]]]] * 1000}),
    }  # fmt: skip


def stores(root: Path) -> dict[str, Path]:
    """Make a store for each thing that could be in one; they are opened in this order."""
    made = {}

    def store(name: str, slot: bytes | None = None, check: bytes | None = None) -> Path:
        folder = root / name.replace("/", "-")
        folder.mkdir()
        (folder / "CHECK").write_bytes(check_file(word=format.NO_WORD) if check is None else check)
        if slot is not None:
            (folder / "slot-000.pcc").write_bytes(slot)
        made[folder.name] = folder
        return folder

    store("good", slot_file(STATE, chunk_bytes=4096))
    big = {"w": np.arange(100_000.0), "b": np.ones(3, np.int8)}
    for name, edit in edits().items():
        store(f"manifest {name}", slot_file(big if "many" in name else STATE, chunk_bytes=4096, edit=edit))
    huge = (1 << 64) - 1
    for field in ("payload_bytes", "manifest_offset", "manifest_bytes"):
        for value in (0, 1, 1 << 40, (1 << 63) - 1, huge):
            store(f"record {field} {value}", slot_file(STATE, **{field: value}))
    for field, value in (("counter", format.MAX_COUNTER), ("incarnation", (1 << 63) - 1), ("step", -(1 << 63)),
                         ("slot", 65535), ("world", 1 << 31), ("state", SlotState.FILLING)):  # fmt: skip
        store(f"record {field}", slot_file(STATE, **{field: value}))
    for text in (
        b"",
        b"[" * 200_000,
        b'{"tree":' * 100_000,
        b"\xff" * 5000,
        b"null",
        b"1e999999",
        b'"' + b"\\u0000" * 9000 + b'"',
    ):
        store(f"manifest text {len(made)}", manifest_text(text))
    harmful = pickle.dumps(Payload())
    for protocol in range(6):
        store(f"pickle {protocol}", pickle.dumps(Payload(), protocol).ljust(100_000, b"\0"))
    store("pickle as the manifest", manifest_text(harmful))
    store("check of pickle", bytes(slot_file(STATE)), check=harmful.ljust(65536, b"\0"))
    store("check of random bytes", bytes(slot_file(STATE)), check=random.Random(1).randbytes(65536))
    store("check that is short", bytes(slot_file(STATE)), check=b"PCC")
    store(
        "check word of no slot", bytes(slot_file(STATE)), check=bytes(check_file(word=format.MAX_COUNTER << 16 | 65535))
    )
    sparse = store("sparse and huge", bytes(slot_file(STATE, manifest_bytes=1 << 40)))
    os.truncate(sparse / "slot-000.pcc", 1 << 42)
    sparse = store("sparse check", bytes(slot_file(STATE)))
    os.truncate(sparse / "CHECK", 1 << 42)
    outside = root.parent / "outside.pcc"
    outside.write_bytes(bytes(slot_file(STATE)))
    for name in ("slot-000.pcc", "CHECK", "kept"):
        folder = store(f"link for {name}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/etc" if name == "kept" else outside)
    for name in ("slot-000.pcc", "CHECK"):
        for kind in ("fifo", "folder", "socket"):
            folder = store(f"{kind} for {name}")
            (folder / name).unlink(missing_ok=True)
            if kind == "fifo":
                os.mkfifo(folder / name)
            elif kind == "folder":
                (folder / name).mkdir()
            else:
                here = os.getcwd()
                os.chdir(folder)
                with socket.socket(socket.AF_UNIX) as s:
                    s.bind(name)
                os.chdir(here)
    folder = store("names")
    for name in (
        "slot-999999.pcc",
        "slot-00.pcc",
        "slot--01.pcc",
        "slot-000.pcc ",
        "slot-000.pcc.half",
        "SLOT-000.PCC",
    ):
        (folder / name).write_bytes(bytes(slot_file(STATE)))
    for name in ("kept.pcc", "x.pcc"):
        (root / name).write_bytes(harmful)
        made[name] = root / name
    return made


def manifest_text(text: bytes) -> bytes:
    """Give a slot file whose manifest is these bytes, with a digest and a record that are right."""
    import xxhash

    data = slot_file(STATE)
    record = format.unpack_record(bytes(data[:512]))
    digest = xxhash.xxh3_128_digest(text)
    start = record.manifest_offset
    record = slot_file(STATE, manifest_bytes=len(text), manifest_digest=digest)[:512]
    return bytes(record) + bytes(data[512:start]) + text.ljust(format.padded(len(text)), b"\0")


def test_case_40_hostile_files_are_refused(tmp_path):
    """Case 40: no code runs, nothing is unpickled or followed, little memory is taken, all ends with our errors."""
    root = tmp_path / "stores"
    root.mkdir()
    made = stores(root)
    done = run_python(READER, root, 256 << 20, timeout_s=280)
    told = dict(json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 0, f"after {list(told)[-1:]}: {done.stderr}"
    assert set(told) == set(made)
    assert not Path(MARK).exists()
    wrong = {
        f"{name}, {how}": attempt
        for name, attempts in told.items()
        for how, attempt in attempts.items()
        if attempt["seen"] or attempt["outcome"].startswith("NOT OURS") or attempt["seconds"] > 20
    }
    assert wrong == {}
    for name in ("good", "check word of no slot", "sparse check"):
        assert told[name]["view"]["outcome"] == "ok", told[name]
    refused = [n for n, t in told.items() if t["view"]["outcome"] != "ok"]
    assert len(refused) > len(made) // 2
    for name in made:
        if name.startswith("pickle") or "object" in name or "code for" in name:
            assert told[name]["view"]["outcome"] != "ok", name


@pytest.mark.parametrize("seed", [1, 2])
def test_case_40_random_changes_behind_right_digests(tmp_path, seed):
    """Case 40: 60 manifests, each with a few random changes of its text, and a digest that is right."""
    root = tmp_path / "stores"
    root.mkdir()
    chance = random.Random(seed)
    template = slot_file(STATE)
    record = format.unpack_record(bytes(template[:512]))
    text = bytes(template[record.manifest_offset : record.manifest_offset + record.manifest_bytes])
    tokens = [b"-1", b"1e400", b"9223372036854775807", b"null", b"[]", b"{}", b'"|O8"', b'"\\ud800"', b"4096", b"true"]
    for number in range(61):
        data = bytearray(text)
        for _ in range(0 if number == 60 else chance.randrange(1, 5)):
            at = chance.randrange(len(data))
            if chance.random() < 0.5:
                data[at] = chance.randrange(256)
            else:
                digits = [i for i, c in enumerate(data) if chr(c).isdigit()]
                at = chance.choice(digits)
                data[at : at + 1] = chance.choice(tokens)
        folder = root / ("good" if number == 60 else f"{number:03}")
        folder.mkdir()
        (folder / "CHECK").write_bytes(check_file(store_id=STORE_ID))
        (folder / "slot-000.pcc").write_bytes(manifest_text(bytes(data)))
    done = run_python(READER, root, 256 << 20, timeout_s=280)
    assert done.returncode == 0, done.stderr
    told = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(told) == 61
    wrong = {
        name: attempts
        for name, attempts in told.items()
        if any(a["seen"] or a["outcome"].startswith("NOT OURS") for a in attempts.values())
    }
    assert wrong == {}
