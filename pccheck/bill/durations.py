"""Many durations in little room: counts in buckets of 4 % (floor 0: imports nothing of pccheck)."""

from __future__ import annotations

import math
from collections.abc import Mapping

_RATIO = math.log(1.04)
_LOWEST, _HIGHEST = -350, 600  # 1 microsecond to 500 years: so many buckets at most


def bucket(seconds: float) -> int:
    """Give the bucket of a duration."""
    if seconds <= 0:
        return _LOWEST
    return max(_LOWEST, min(_HIGHEST, math.floor(math.log(seconds) / _RATIO)))


def quantile(counts: Mapping[int, int], part: float, worst_s: float) -> float | None:
    """Give the duration that a part (0..1) of all reach at most, within 2 %; None of none.

    Args:
        counts: how many are in each bucket.
        part: 0.5 = the median.
        worst_s: the greatest of all, which no answer exceeds.
    """
    total, seen = sum(counts.values()), 0
    for number in sorted(counts):
        seen += counts[number]
        if total and seen >= part * total:
            return min(worst_s, math.exp((number + 0.5) * _RATIO))
    return None
