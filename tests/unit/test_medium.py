"""Files as media: what is tried again, what is an error, which kind is chosen, and what a forked child keeps."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import resource
from contextlib import contextmanager

import pytest

from pccheck.errors import CapacityError, ForkedError, MediumError
from pccheck.storage import fileio
from pccheck.storage.filesystem import classify, storage_of
from pccheck.storage.media import FileMedium
from pccheck.storage.memory import MemoryMedium
from pccheck.testing.promises import read

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
28 27 259:1 / /fast rw,noatime - xfs /dev/nvme0n1p1 rw,attr2,inode64
29 27 259:2 / /pmem rw,relatime - ext4 /dev/pmem0 rw,dax=always
30 27 259:3 / /pmem2 rw,relatime,dax - xfs /dev/pmem1 rw
31 27 259:4 / /inode rw,relatime - ext4 /dev/pmem2 rw,dax=inode
32 27 0:25 / /dev/shm rw,nosuid master:3 - tmpfs tmpfs rw,size=100k
33 27 0:40 / /home/with\\040space rw - nfs4 server:/x rw,vers=4.2
34 27 0:41 / /merged rw - overlay overlay rw,lowerdir=/a
35 27 8:1 / /old rw - ext3 /dev/sda1 rw
broken line
36 27 8:2 / /odd rw
"""


@pytest.mark.parametrize(
    ("device", "storage"),
    [
        ((254, 0), "direct"), ((259, 1), "direct"), ((259, 2), "mapped"), ((259, 3), "mapped"), ((259, 4), "direct"),
        ((0, 25), "mapped"), ((0, 40), "buffered"), ((0, 41), "buffered"), ((8, 1), "buffered"),
        ((8, 2), "buffered"), ((99, 9), "buffered"),
    ],
)  # fmt: skip
def test_chosen_by_what_the_file_system_is(device, storage):
    assert classify(MOUNTS, *device) == storage


def test_chosen_without_a_list_of_mounts(tmp_path, monkeypatch):
    monkeypatch.setattr("pccheck.storage.filesystem.MOUNTS", tmp_path / "none")
    fd = os.open(tmp_path, os.O_RDONLY)
    assert storage_of(fd) == "buffered"
    os.close(fd)


def steps(*answers):
    """Give a step that answers with these counts and errors, one after the other."""
    rest = list(answers)

    def step(done):
        answer = rest.pop(0)
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        return answer

    step.rest = rest
    return step


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(fileio, "FIRST_PAUSE_S", 0.0)


EIO, EINTR, ESTALE, EAGAIN, ENOSPC = errno.EIO, errno.EINTR, errno.ESTALE, errno.EAGAIN, errno.ENOSPC


@pytest.mark.parametrize(
    "answers",
    [
        (10,), (3, 7), (1,) * 10, (-EINTR,) * 50 + (10,), (-EIO,) * 5 + (10,), (-EIO, 5, -EIO, -ESTALE, 5),
        (5, -EAGAIN, -EAGAIN, -EAGAIN, -EAGAIN, -EAGAIN, 2, -EIO, -EIO, -EIO, -EIO, -EIO, 3),
    ],
)  # fmt: skip
def test_tried_again_until_done(no_pauses, answers):
    step = steps(*answers)
    assert fileio.transfer("write", "f", 0, 10, step) == 10
    assert not step.rest


@pytest.mark.parametrize(
    ("answers", "code", "offset"),
    [
        ((-EIO,) * 6, EIO, 100), ((4,) + (-ESTALE,) * 6, ESTALE, 104), ((4, 2, -ENOSPC), ENOSPC, 106),
        ((-errno.EBADF,), errno.EBADF, 100), ((3, -EIO, -EIO, -errno.EROFS), errno.EROFS, 103),
    ],
)  # fmt: skip
def test_failures_say_where(no_pauses, answers, code, offset):
    with pytest.raises(MediumError) as caught:
        fileio.transfer("write", "the file", 100, 10, steps(*answers))
    error = caught.value
    assert (error.errno, error.offset, error.path, error.operation) == (code, offset, "the file", "write")
    assert "the file" in str(error)
    assert str(offset) in str(error)


def test_short_direct_writes_go_on_at_a_whole_page(no_pauses):
    seen, answers = [], [4096 + 512, 300, 8192 - 512, 4096, 4096]

    def step(done):
        seen.append(done)
        return answers.pop(0)

    assert fileio.transfer("write", "f", 0, 4 * 4096, step, 4096) == 4 * 4096
    assert seen == [0, 4096, 4096, 8192, 12288]


def test_a_write_of_nothing_is_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    medium = a_file(tmp_path)
    with pytest.raises(MediumError) as caught:
        medium.write_from(memoryview(b"x"), 7)
    assert (caught.value.errno, caught.value.offset) == (ENOSPC, 7)


def a_file(folder, storage="buffered", *, write=True, size=4096):
    path = f"{folder}/slot"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, size)
    return FileMedium(fd, path, storage=storage, write=write)


@contextmanager
def largest_file(size):
    """Let this process write files of at most `size` bytes: the kernel then answers as a full disk does."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("storage", ["buffered", "direct"])
def test_a_short_write_is_continued_and_fails_where_it_must(tmp_path, storage):
    medium = a_file(tmp_path, storage)
    with largest_file(3 * 4096), pytest.raises(MediumError) as caught:
        medium.write_from(memoryview(mmap.mmap(-1, 8 * 4096)), 4096)
    assert (caught.value.errno, caught.value.offset) == (errno.EFBIG, 3 * 4096)


def test_a_failed_allocation_takes_nothing(tmp_path):
    medium = a_file(tmp_path)
    with largest_file(1 << 20), pytest.raises(MediumError, match="allocation"):
        medium.allocate(2 << 20)
    assert medium.size() == 4096


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_room(tmp_path, monkeypatch, code):
    """What other writers leave no room for is taken back, and the error tells how much is needed and free."""
    medium = a_file(tmp_path)

    def some_then_full(fd, offset, length):
        os.ftruncate(fd, length // 2)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", some_then_full)
    with pytest.raises(CapacityError) as caught:
        medium.allocate(1 << 20)
    assert medium.size() == 4096
    error = caught.value
    assert error.path == medium.path
    assert error.needed_bytes == 1 << 20
    assert error.free_bytes == os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize or error.free_bytes > 0


@pytest.mark.parametrize("storage", ["buffered", "direct"])
def test_allocation_where_fallocate_is_missing(tmp_path, monkeypatch, storage):
    """NFS before 4.2: zeros are written, behind what is there only."""

    def missing(fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", missing)
    medium = a_file(tmp_path, storage, size=5000)
    flags = fcntl.fcntl(medium.fileno(), fcntl.F_GETFL)
    medium.write_from(memoryview(b"kept"), 4996)
    medium.allocate(3 << 20)
    status = os.stat(medium.path)
    assert status.st_size == 3 << 20
    assert status.st_blocks * 512 >= (3 << 20) - 8192
    assert read(medium, 8, 4996) == b"kept" + bytes(4)
    assert fcntl.fcntl(medium.fileno(), fcntl.F_GETFL) == flags


def test_allocated_space_is_really_taken(tmp_path):
    medium = a_file(tmp_path)
    medium.allocate(1 << 20)
    assert os.stat(medium.path).st_blocks * 512 >= 1 << 20


def test_the_mapping_of_a_sparse_file_takes_its_space_first(tmp_path):
    medium = a_file(tmp_path, "mapped", size=1 << 20)
    assert os.stat(medium.path).st_blocks == 0
    assert medium.mapping().nbytes == 1 << 20
    assert os.stat(medium.path).st_blocks * 512 >= 1 << 20


def test_a_failed_sync_is_never_tried_again(tmp_path):
    """The kernel forgets lost pages once it has told of them; so a later, successful fdatasync proves nothing."""
    reader, writer = os.pipe()
    medium = FileMedium(writer, "a pipe", storage="buffered", write=True)
    with pytest.raises(MediumError) as first:
        medium.sync()
    assert first.value.operation == "sync"
    good = os.open(tmp_path / "good", os.O_RDWR | os.O_CREAT)
    os.dup2(good, writer)
    os.fdatasync(writer)
    with pytest.raises(MediumError) as second:
        medium.sync()
    assert second.value is first.value
    medium.close()
    os.close(good)
    os.close(reader)


def test_direct_is_direct(tmp_path):
    medium = a_file(tmp_path, "direct")
    if medium.storage != "direct":
        pytest.skip("no O_DIRECT here")
    assert fcntl.fcntl(medium.fileno(), fcntl.F_GETFL) & os.O_DIRECT
    assert medium.alignment == 4096
    medium.close()


def test_drop_cache_drops_the_cache(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    on_disk = storage_of(fd) == "direct"
    os.close(fd)
    if not on_disk or not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("no disk or no way to see what is cached")
    medium = a_file(tmp_path, size=1 << 20)
    medium.write_from(memoryview(bytes(range(256)) * 4096), 0)
    medium.sync()
    room = bytearray(4096)
    assert os.preadv(medium.fileno(), [room], 0, os.RWF_NOWAIT) == 4096
    medium.drop_cache()
    with pytest.raises(BlockingIOError):
        os.preadv(medium.fileno(), [room], 512 << 10, os.RWF_NOWAIT)
    assert read(medium, 1 << 20, 0) == bytes(range(256)) * 4096


@pytest.mark.parametrize("storage", ["buffered", "direct", "mapped", "memory"])
def test_a_forked_child_has_nothing(tmp_path, storage):
    if storage == "memory":
        medium = MemoryMedium(4096)
    else:
        medium = a_file(tmp_path, storage)
        medium.mapping()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            for call in (medium.size, medium.sync, medium.fileno, medium.mapping, medium.links, medium.close):
                with pytest.raises(ForkedError):
                    call()
            links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
            held = [os.readlink(link) for link in links if os.path.lexists(link)]
            assert not [name for name in held if name.startswith(str(tmp_path))]
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    medium.write_from(memoryview(b"x"), 0)
    assert read(medium, 1, 0) == b"x"
    medium.close()


def test_opened_for_reading_gives_no_mapping(tmp_path):
    path = tmp_path / "slot"
    path.write_bytes(bytes(8192))
    medium = FileMedium(os.open(path, os.O_RDONLY), str(path), storage="mapped", write=False)
    assert medium.mapping() is None
    with pytest.raises(MediumError) as caught:
        medium.write_from(memoryview(b"x"), 0)
    assert caught.value.errno == errno.EBADF
    medium.close()


def test_descriptors_come_back(tmp_path):
    """When closed, and when dropped without."""

    def count():
        links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
        return sum(os.readlink(link).startswith(str(tmp_path)) for link in links if os.path.lexists(link))

    for _ in range(50):
        medium = a_file(tmp_path, "mapped")
        view = medium.mapping()
        medium.close()
        assert bytes(view[:1]) == b"\0"
        del view
    for _ in range(50):
        a_file(tmp_path, "mapped").mapping()
    gc.collect()
    assert count() == 0
