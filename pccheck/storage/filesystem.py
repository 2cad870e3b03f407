"""Which kind of medium suits a file system (floor 1: imports floor 0, fileio).

Chosen by what the file system is, never by trying and seeing what fails: several accept O_DIRECT and then ignore it.
"""

from __future__ import annotations

import os
from pathlib import Path

from pccheck.storage.fileio import Storage

MOUNTS = Path("/proc/self/mountinfo")


def storage_of(fd: int) -> Storage:
    """Give the kind of medium for files on the file system that `fd` is on; "buffered" where nothing is known of it."""
    try:
        mounts = MOUNTS.read_text("utf-8", "surrogateescape")
    except OSError:
        return "buffered"
    device = os.fstat(fd).st_dev
    return classify(mounts, os.major(device), os.minor(device))


def classify(mounts: str, major: int, minor: int) -> Storage:
    """Give the kind of medium for a device out of the text of /proc/self/mountinfo.

    ext4 and xfs take O_DIRECT, which spares the page cache and a copy; on tmpfs, and on ext4 and xfs over persistent
    memory (dax), a store to the mapped file is the write. Everything else is buffered.
    """
    for line in mounts.splitlines():
        # 36 35 98:0 /root /mount options [optional fields] - type source super-options     (proc(5))
        head, _, tail = line.partition(" - ")
        before, after = head.split(), tail.split()
        if len(before) < 6 or len(after) < 1 or before[2] != f"{major}:{minor}":
            continue
        options = {*before[5].split(","), *(after[2].split(",") if len(after) > 2 else ())}
        if after[0] == "tmpfs":
            return "mapped"
        if after[0] in ("ext4", "xfs"):
            return "mapped" if options & {"dax", "dax=always"} else "direct"
        return "buffered"
    return "buffered"
