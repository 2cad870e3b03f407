"""How much work to do between two checkpoints when failures are random (floor 0: imports tuning.domain).

Failures come at random at a mean rate of one in `mtbf_s` (exponential). `stall_s` is what one checkpoint costs the
trainer, not what it takes to become durable: how long that takes lowers the useful fraction by a factor that does not
depend on the interval, so that it moves none of these (Vaidya, IEEE Transactions on Computers 46(8), 1997).
"""

from __future__ import annotations

import math

from pccheck.errors import OptionError
from pccheck.tuning.domain import not_negative, positive


def young(stall_s: float, mtbf_s: float) -> float:
    """Give Young's work between checkpoints in seconds, sqrt(2 c M).

    First order in c/M: 6 % too long at c/M = 1/60, 32 % at 0.3. Young, Communications of the ACM 17(9), 1974.

    Args:
        stall_s: seconds of the trainer that one checkpoint costs (c), 0 or more.
        mtbf_s: mean seconds between failures of the job (M), greater than 0; infinity = it never fails.

    Raises OptionError for a value out of its range. Pure, as all of `pccheck.tuning`: any thread may call it.
    """
    return _young(not_negative("stall_s", stall_s), positive("mtbf_s", mtbf_s, infinite=True))


def daly_first_order(stall_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Give Daly's first-order work between checkpoints in seconds, sqrt(2 c (M + R)) - c; M from c = 2 M on.

    Daly, Future Generation Computer Systems 22(3), 2006.

    Args:
        stall_s: seconds of the trainer that one checkpoint costs (c), 0 or more.
        mtbf_s: mean seconds between failures (M), greater than 0; infinity = never.
        restart_s: seconds from a failure until training goes on (R), 0 or more.

    Raises OptionError for a value out of its range.
    """
    c, m = not_negative("stall_s", stall_s), positive("mtbf_s", mtbf_s, infinite=True)
    r = not_negative("restart_s", restart_s)
    return m if c >= 2 * m else _young(c, m + r) - c


def daly(stall_s: float, mtbf_s: float) -> float:
    """Give Daly's higher-order work between checkpoints in seconds.

    sqrt(2 c M) (1 + sqrt(c / 2M) / 3 + (c / 2M) / 9) - c for c < 2 M, else M: within 0.003 % of the optimum for
    c/M < 0.02. Daly, Future Generation Computer Systems 22(3), 2006, equation 37.

    Args:
        stall_s: seconds of the trainer that one checkpoint costs (c), 0 or more.
        mtbf_s: mean seconds between failures (M), greater than 0; infinity = never.

    Raises OptionError for a value out of its range.
    """
    c, m = not_negative("stall_s", stall_s), positive("mtbf_s", mtbf_s, infinite=True)
    if c >= 2 * m:
        return m
    x = math.sqrt(c / m / 2)
    return _young(c, m) * (1 + x / 3 + x * x / 9) - c


def optimum(stall_s: float, mtbf_s: float) -> float:
    """Give the work between checkpoints in seconds that makes the useful fraction greatest, exactly.

    M (1 + W0(-exp(-1 - c/M))), W0 = the principal branch of Lambert's W. It is the optimum for blocking checkpoints
    (Daly 2006, from the exact time per unit of work), and for concurrent ones, however long they take to become durable
    (Vaidya 1997). Exact to rounding for every c/M, tiny and huge.

    Args:
        stall_s: seconds of the trainer that one checkpoint costs (c), 0 or more; 0 gives 0: as often as can be.
        mtbf_s: mean seconds between failures (M), greater than 0; infinity = never, which gives infinity for c > 0.

    Raises OptionError for a value out of its range.
    """
    c, m = not_negative("stall_s", stall_s), positive("mtbf_s", mtbf_s, infinite=True)
    if c == 0:
        return 0.0
    if m == math.inf:
        return math.inf
    return -m * math.expm1(_log_lambert(c / m))


def lambert_w0(z: float) -> float:
    """Give the principal branch of Lambert's W, the w >= -1 with w exp(w) = z, for -1/e <= z <= 0.

    Args:
        z: the number, from -1/e to 0. Close to -1/e its last digits decide on w + 1: `optimum` avoids that.

    Raises OptionError for another z.
    """
    if isinstance(z, bool) or not -1 / math.e - 1e-16 <= z <= 0:
        raise OptionError("z", z, "a number from -1/e to 0")
    return -math.exp(_log_lambert(max(0.0, -1 - math.log(-z)))) if z else 0.0


def exponential_excess(x: float) -> float:
    """Give exp(x) - 1 - x without the loss of digits that the subtraction would bring for a small x."""
    if abs(x) > 0.5:
        return math.expm1(x) - x
    total, term, k = 0.0, x * x / 2, 3
    while abs(term) > 1e-18 * total:  # at most 15 terms
        total, term, k = total + term, term * x / k, k + 1
    return total


def _young(c: float, m: float) -> float:
    return math.sqrt(2 * c) * math.sqrt(m) if c else 0.0  # each root by itself: the product could overflow


def _log_lambert(a: float) -> float:
    """Give v = log(-W0(-exp(-1 - a))), the v <= 0 with exp(v) - 1 - v = a, for a >= 0.

    In this form neither a tiny a cancels nor a huge one underflows. From a start below the root Newton's steps rise to
    it and never pass it, since the left side is convex and falls.
    """
    v = -(math.sqrt(2 * a) + a)
    for _ in range(100):  # seven are enough, in practice
        slope = math.expm1(v)
        if slope == 0:
            break
        step = (exponential_excess(v) - a) / slope
        v -= step
        if abs(step) <= 1e-15 * abs(v):
            break
    return v
