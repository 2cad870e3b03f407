"""A folder as a volume: what is refused, what is left behind, who has the lock, and what a forked child keeps."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from pccheck.errors import CapacityError, ForkedError, FormatError, MediumError, UsageError
from pccheck.format import CHECK_ADDR_OFFSET, CHECK_BYTES
from pccheck.storage import checkpage, fileio, forks, outside
from pccheck.storage.directory import Directory
from pccheck.testing.promises import read

LONG_S = 60.0


@pytest.fixture
def volume(tmp_path):
    volume = Directory(tmp_path / "store", create=True, write=True)
    yield volume
    volume.close()


def in_child(function):
    """Run a function in a forked child and give its exit status: 0 if it raised nothing."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            function()
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def held(folder, process="self"):
    """Give the names of files below a folder that a process has open."""
    links = [f"/proc/{process}/fd/{n}" for n in os.listdir(f"/proc/{process}/fd")]
    return sorted(n for n in (os.readlink(link) for link in links if os.path.lexists(link)) if str(folder) in n)


# -- opening -----------------------------------------------------------------------------------------------------------


def test_makes_folders_and_their_names_durable(tmp_path, monkeypatch):
    """A crash must not lose the store's own folder, whoever made it: every name on the way is synced."""
    synced = []
    monkeypatch.setattr(fileio, "sync_folder", lambda fd, path: synced.append(path))
    for _ in range(2):
        Directory(tmp_path / "a" / "b" / "store", create=True, write=True).close()
        assert synced[:3] == [str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path)]
        synced.clear()


def test_missing_and_not_a_folder(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path, code in ((tmp_path / "none", errno.ENOENT), (tmp_path / "file", errno.ENOTDIR)):
        for write in (False, True):
            with pytest.raises(MediumError) as caught:
                Directory(path, create=False, write=write)
            assert caught.value.errno == code
            assert str(path) in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file"]
    with pytest.raises(UsageError, match="write=True"):
        Directory(tmp_path, create=True, write=False)


def test_the_users_own_link_to_a_folder_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    volume = Directory(tmp_path / "link", create=True, write=True)
    volume.create("slot-000.pcc", 4096).close()
    assert (tmp_path / "real" / "slot-000.pcc").exists()
    volume.close()


def test_a_moved_folder_is_still_the_store(volume, tmp_path):
    (tmp_path / "store").rename(tmp_path / "moved")
    (tmp_path / "store").mkdir()
    volume.create("slot-000.pcc", 4096).close()
    assert os.listdir(tmp_path / "store") == []
    assert os.listdir(tmp_path / "moved") == ["slot-000.pcc"]


def test_reading_changes_nothing():
    """On a folder that may not be written, by somebody who may not write it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = Directory(folder, create=False, write=True)
        medium = writer.create("slot-000.pcc", 4096)
        medium.write_from(memoryview(b"seen"), 0)
        medium.close()
        page = writer.check_page(create=True)
        page.store(CHECK_ADDR_OFFSET, 9)
        page.close()
        writer.link("slot-000.pcc", "kept/1-c1.pcc")
        writer.close()
        for path in (*folder.rglob("*"), folder):
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in (folder, *folder.rglob("*"))}

        def look():
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            reader = Directory(folder, create=False, write=False)
            assert reader.names() == ["CHECK", "slot-000.pcc"]
            assert reader.names("kept") == ["1-c1.pcc"]
            medium = reader.open("slot-000.pcc")
            assert read(medium, 4, 0) == b"seen"
            assert medium.mapping() is None
            assert medium.lock_shared()
            page = reader.check_page(create=False)
            assert page.load(CHECK_ADDR_OFFSET) == 9
            for call in (
                lambda: reader.create("slot-001.pcc", 4096), lambda: reader.open("slot-000.pcc", write=True),
                lambda: reader.link("slot-000.pcc", "kept/2-c2.pcc"), lambda: reader.remove("slot-000.pcc"),
                reader.sync_names, reader.lock, lambda: reader.check_page(create=True),
                lambda: page.store(CHECK_ADDR_OFFSET, 1), lambda: page.compare_and_swap(CHECK_ADDR_OFFSET, 9, 1),
                lambda: page.write(0, b"x"),
            ):  # fmt: skip
                with pytest.raises(UsageError):
                    call()
            medium.close()
            page.close()
            reader.close()

        assert in_child(look) == 0
        assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in (folder, *folder.rglob("*"))} == before
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)


# -- what is no regular file -------------------------------------------------------------------------------------------


@pytest.fixture
def planted(volume, tmp_path):
    """Plant a symbolic link, a dangling one, a folder and a FIFO under the names of slots."""
    store = tmp_path / "store"
    (tmp_path / "secret").write_bytes(b"secret" * 1000)
    (store / "slot-000.pcc").symlink_to(tmp_path / "secret")
    (store / "slot-001.pcc").symlink_to(tmp_path / "nothing")
    (store / "slot-002.pcc").mkdir()
    os.mkfifo(store / "slot-003.pcc")
    return [f"slot-00{i}.pcc" for i in range(4)]


def test_planted_names_are_refused_by_name(volume, planted, tmp_path):
    for name in planted:
        for call in (
            lambda n=name: volume.open(n), lambda n=name: volume.open(n, write=True), lambda n=name: volume.remove(n),
            lambda n=name: volume.link(n, "kept/1-c1.pcc"),
        ):  # fmt: skip
            with pytest.raises((FormatError, MediumError), match=name):
                call()
        with pytest.raises(MediumError):
            volume.create(name, 4096)
    assert volume.names() == []
    assert (tmp_path / "secret").read_bytes() == b"secret" * 1000
    assert not (tmp_path / "nothing").exists()
    assert len(os.listdir(tmp_path / "store")) == 5  # the planted ones, and `kept`


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_a_planted_check_is_refused(volume, tmp_path, kind):
    check, outside = tmp_path / "store" / "CHECK", tmp_path / "outside"
    outside.write_bytes(b"x" * CHECK_BYTES)
    {"link": lambda: check.symlink_to(outside), "folder": check.mkdir, "fifo": lambda: os.mkfifo(check)}[kind]()
    for call in (lambda: volume.check_page(create=True), lambda: volume.check_page(create=False), volume.lock):
        with pytest.raises(FormatError, match="CHECK"):
            call()
    assert outside.read_bytes() == b"x" * CHECK_BYTES


def test_a_planted_subfolder_is_refused(volume, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "1-c1.pcc").write_bytes(bytes(4096))
    (tmp_path / "store" / "kept").symlink_to(outside)
    volume.create("slot-000.pcc", 4096).close()
    for call in (
        lambda: volume.names("kept"), lambda: volume.open("kept/1-c1.pcc"), lambda: volume.remove("kept/1-c1.pcc"),
        lambda: volume.link("slot-000.pcc", "kept/2-c2.pcc"), lambda: volume.create("kept/3-c3.pcc", 4096),
        lambda: volume.sync_names("kept"),
    ):  # fmt: skip
        with pytest.raises(FormatError, match="kept"):
            call()
    assert os.listdir(outside) == ["1-c1.pcc"]


# -- space -------------------------------------------------------------------------------------------------------------


def test_a_create_that_fails_leaves_nothing(volume, tmp_path):
    before = held(tmp_path)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    try:
        with pytest.raises(MediumError) as caught:
            volume.create("slot-000.pcc", 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(CapacityError) as full:
        volume.create("slot-000.pcc", 1 << 50)
    assert full.value.needed_bytes == 1 << 50
    assert 0 < full.value.free_bytes < 1 << 50
    assert "slot-000.pcc" in full.value.path
    assert os.listdir(tmp_path / "store") == []
    assert held(tmp_path) == before


def test_a_small_disk_that_is_full(tmp_path):
    """A real one: tmpfs of 1 MiB; and what fits still goes in afterwards."""
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "t", tmp_path]).returncode:
        pytest.skip("may not mount here")
    try:
        volume = Directory(tmp_path, create=False, write=True)
        free = volume.free_bytes()
        first = volume.create("slot-000.pcc", 700 << 10)
        with pytest.raises(CapacityError) as caught:
            volume.create("slot-001.pcc", 700 << 10)
        assert (caught.value.needed_bytes, caught.value.free_bytes) == (700 << 10, free - (700 << 10))
        with pytest.raises(CapacityError):
            first.allocate(2 << 20)
        assert volume.names() == ["slot-000.pcc"]
        assert volume.free_bytes() == free - (700 << 10)
        first.close()
        volume.remove("slot-000.pcc")
        volume.create("slot-001.pcc", free).close()
        with pytest.raises(CapacityError):
            volume.check_page(create=True)
        volume.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


# -- links -------------------------------------------------------------------------------------------------------------


def test_copies_where_links_cannot_be(volume, tmp_path, monkeypatch):
    """A copy appears whole or not at all; what a dead writer left half done goes when the lock is taken."""

    def no_links(*args, **kwargs):
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    monkeypatch.setattr(os, "link", no_links)
    medium = volume.create("slot-000.pcc", 3 << 20)
    medium.write_from(memoryview(os.urandom(3 << 20)), 0)
    kept = tmp_path / "store" / "kept"

    def fails(fd, path):
        raise MediumError("sync", path, OSError(errno.EIO, "x"))

    with monkeypatch.context() as patch:
        patch.setattr(fileio, "sync_file", fails)
        with pytest.raises(MediumError):
            volume.link("slot-000.pcc", "kept/1-c1.pcc")
    assert os.listdir(kept) == []
    (kept / ".1-c1.pcc.half").write_bytes(b"left")
    (kept / ".2-c2.pcc.half").write_bytes(b"left")
    assert volume.names("kept") == []
    volume.link("slot-000.pcc", "kept/1-c1.pcc")
    assert sorted(os.listdir(kept)) == [".2-c2.pcc.half", "1-c1.pcc"]
    assert (kept / "1-c1.pcc").read_bytes() == (tmp_path / "store" / "slot-000.pcc").read_bytes()
    assert volume.lock()
    assert os.listdir(kept) == ["1-c1.pcc"]


def test_what_is_no_half_copy_stops_no_opening(volume, tmp_path):
    """Only regular files are left half done by a writer: what else has such a name is somebody's, and is left alone."""
    store = tmp_path / "store"
    (store / "kept").mkdir()
    (tmp_path / "mine").write_bytes(b"mine")
    for folder in (store, store / "kept"):
        (folder / ".x.half").mkdir()
        (folder / ".x.half/mine").write_bytes(b"mine")
        (folder / ".y.half").symlink_to(tmp_path / "mine")
        os.mkfifo(folder / ".z.half")
        (folder / ".w.half").write_bytes(b"left by a writer")
    assert volume.lock()
    for folder in (store, store / "kept"):
        assert sorted(name for name in os.listdir(folder) if name.endswith(".half")) == [
            ".x.half", ".y.half", ".z.half"
        ]  # fmt: skip
        assert (folder / ".x.half/mine").read_bytes() == b"mine"
    assert (tmp_path / "mine").read_bytes() == b"mine"


# -- CHECK -------------------------------------------------------------------------------------------------------------


def test_a_short_check(volume, tmp_path):
    check = tmp_path / "store" / "CHECK"
    check.write_bytes(b"half a superblock")
    with pytest.raises(FormatError, match="17 bytes"):
        volume.check_page(create=False)
    page = volume.check_page(create=True)
    assert page.read(0, CHECK_BYTES) == bytes(CHECK_BYTES)
    assert check.stat().st_size == CHECK_BYTES
    assert check.stat().st_blocks * 512 >= CHECK_BYTES
    page.close()


def test_a_check_that_is_cut_while_open(volume, tmp_path):
    """An error, not SIGBUS."""
    page = volume.check_page(create=True)
    os.truncate(tmp_path / "store" / "CHECK", 0)
    for call in (lambda: page.load(CHECK_ADDR_OFFSET), lambda: page.store(CHECK_ADDR_OFFSET, 1)):
        with pytest.raises(FormatError, match="cut short"):
            call()
    page.close()


@pytest.mark.skipif(checkpage.atomics() is None, reason="the extension was not built")
def test_swaps_are_atomic_between_processes(volume, tmp_path):
    """Children that count through their own openings lose no increment."""
    page, each, children = volume.check_page(create=True), 1000, 3
    assert page.atomic
    program = (
        "import sys; from pccheck.storage.directory import Directory\n"
        "p = Directory(sys.argv[1], create=False, write=True).check_page(create=False)\n"
        f"for _ in range({each}):\n"
        f"    while not p.compare_and_swap({CHECK_ADDR_OFFSET}, w := p.load({CHECK_ADDR_OFFSET}), w + 1): pass\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, tmp_path / "store"]) for _ in range(children)]
    assert [p.wait(LONG_S) for p in running] == [0] * children
    assert page.load(CHECK_ADDR_OFFSET) == each * children
    page.close()


# -- the lock, and forks -----------------------------------------------------------------------------------------------


def test_one_writer(volume, tmp_path):
    other = Directory(tmp_path / "store", create=False, write=True)
    assert volume.lock()
    assert not other.lock()
    assert not other.lock()
    volume.close()
    assert other.lock()
    other.unlock()
    third = Directory(tmp_path / "store", create=False, write=True)
    assert third.lock()
    third.close()
    other.close()


def test_a_lock_on_a_removed_check_is_no_lock(volume, tmp_path):
    """Between open and flock CHECK is removed and made anew: the lock must be on the new one."""
    other = Directory(tmp_path / "store", create=False, write=True)
    assert other.lock()
    other.remove("CHECK")
    assert volume.lock()
    third = Directory(tmp_path / "store", create=False, write=True)
    assert not third.lock()
    for each in (other, third):
        each.close()


def test_no_locks_here(volume, tmp_path, monkeypatch):
    def none(fd, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    monkeypatch.setattr("pccheck.storage.fileio._lock_file", none, raising=False)
    before = held(tmp_path)
    with pytest.raises(MediumError, match="one process only") as caught:
        volume.lock()
    assert caught.value.errno == errno.ENOLCK
    assert held(tmp_path) == before
    medium = volume.create("slot-000.pcc", 4096)
    assert medium.lock_shared()
    assert medium.lock_exclusive()
    medium.unlock()
    medium.close()


PARENT = """
import os, sys, time
from pccheck.storage.directory import Directory
volume = Directory(sys.argv[1], create=True, write=True)
assert volume.lock()
page = volume.check_page(create=True)
medium = volume.create("slot-000.pcc", 4096)
assert medium.lock_exclusive()
child = os.fork()
if child == 0:
    print("child", os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""


def test_the_lock_is_free_at_once_though_a_forked_child_lives_on(tmp_path):
    """An idle DataLoader worker that outlives its killed trainer."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path / "store"], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline().split()[1])
    try:
        volume = Directory(tmp_path / "store", create=False, write=True)
        assert not volume.lock()
        parent.send_signal(signal.SIGKILL)
        parent.wait(LONG_S)
        os.kill(child, 0)  # it is there
        assert volume.lock()
        medium = volume.open("slot-000.pcc")
        assert medium.lock_exclusive()
        assert held(tmp_path, child) == []
        medium.close()
        volume.close()
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


def test_every_call_in_a_forked_child_raises(volume):
    page = volume.check_page(create=True)
    volume.create("slot-000.pcc", 4096).close()
    assert volume.lock()

    def child():
        for call in (
            volume.names, lambda: volume.create("slot-001.pcc", 4096), lambda: volume.open("slot-000.pcc"),
            lambda: volume.link("slot-000.pcc", "kept/1-c1.pcc"), lambda: volume.remove("slot-000.pcc"),
            volume.sync_names, lambda: volume.check_page(create=True), volume.lock, volume.unlock, volume.free_bytes,
            volume.close, lambda: page.load(CHECK_ADDR_OFFSET), lambda: page.store(CHECK_ADDR_OFFSET, 1),
            lambda: page.compare_and_swap(CHECK_ADDR_OFFSET, 0, 1), lambda: page.read(0, 1),
            lambda: page.write(0, b"x"), page.sync, page.links, page.close,
        ):  # fmt: skip
            with pytest.raises(ForkedError, match="forked child"):
                call()
        again = Directory(volume.path, create=False, write=True)
        assert again.names() == ["CHECK", "slot-000.pcc"]
        assert not again.lock()  # the parent still has it
        again.close()

    assert in_child(child) == 0
    assert volume.names() == ["CHECK", "slot-000.pcc"]
    page.store(CHECK_ADDR_OFFSET, 1)
    page.close()


def test_a_fork_while_a_file_is_being_opened(volume, monkeypatch):
    """Forks wait for openings; one that cannot, since storage hangs, goes on, and its child can open stores."""
    monkeypatch.setattr(forks, "FORK_WAIT_S", 0.05)
    inside, leave = threading.Event(), threading.Event()

    def hang():
        with forks.held_off():
            inside.set()
            leave.wait(LONG_S)

    thread = threading.Thread(target=hang)
    thread.start()
    assert inside.wait(5)
    assert in_child(lambda: Directory(volume.path, create=False, write=False).close()) == 0
    leave.set()
    thread.join(LONG_S)
    volume.create("slot-000.pcc", 4096).close()
    assert in_child(lambda: Directory(volume.path, create=False, write=False).close()) == 0


def test_children_have_no_descriptors_however_they_are_timed(volume):
    """Files are opened and closed by threads while the process forks: no child ever has one."""
    stop = threading.Event()

    def churn(number):
        name = f"slot-{number:03d}.pcc"
        volume.create(name, 4096).close()
        while not stop.is_set():
            volume.open(name, write=True).close()

    def child():
        assert not [name for name in held(volume.path) if "slot-" in name]

    threads = [threading.Thread(target=churn, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            assert in_child(child) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join(LONG_S)


# -- where it is -------------------------------------------------------------------------------------------------------


def test_tells_whether_its_path_leads_to_it(volume, tmp_path):
    store, away = tmp_path / "store", tmp_path / "away"
    assert volume.is_at_path()
    store.rename(away)
    assert not volume.is_at_path()
    store.mkdir()
    assert not volume.is_at_path()
    store.rmdir()
    store.write_text("")
    assert not volume.is_at_path()
    store.unlink()
    store.symlink_to(away)
    assert volume.is_at_path()


def test_a_path_that_may_not_be_looked_at_is_believed(tmp_path):
    """A job that gives up its rights once its store is open goes on."""
    closed, store = tmp_path / "closed", tmp_path / "closed/store"
    store.mkdir(parents=True)

    def child():
        fd = os.open(store, os.O_RDONLY | os.O_DIRECTORY)
        closed.chmod(0)
        if os.geteuid() == 0:
            os.setuid(65534)
        with pytest.raises(PermissionError):
            os.stat(store)
        assert outside.leads_to(str(store), fd)

    try:
        assert in_child(child) == 0
    finally:
        closed.chmod(0o700)
