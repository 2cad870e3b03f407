"""Keeps the memory of many arrays as it is, and tells where it lies (floor 1: imports the extension).

Array libraries that give the memory of a living array away (JAX's donation) leave it be while something that was
exported from it is alive: a buffer, or a DLPack capsule. One native object holds those of thousands of arrays; an
object of Python's for each would set off the garbage collector, in the thread that saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    from pccheck._native import hold_buffers as _hold
except ImportError:  # not built: also where `_native` is but a checkout's folder of C files
    NATIVE = False
else:
    NATIVE = True


def hold(exporters: Sequence[Any]) -> tuple[object, NDArray[np.uint64]]:
    """Give what keeps the memory of each as it is until it is dropped, and where that memory begins.

    May wait until the arrays are computed. Call it only where NATIVE. Thread-safe.

    Args:
        exporters: each an object with the buffer protocol, or a DLPack capsule of host memory that nobody has used.

    Raises:
        BufferError, TypeError: one of them is neither, or not laid out in C order; or else what it raises when asked.
            None is held then.
    """
    addresses = np.empty(len(exporters), np.uint64)
    return _hold(exporters, addresses.data), addresses
