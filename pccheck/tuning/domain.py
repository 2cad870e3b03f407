"""What the formulas of tuning take: numbers in their range, or an error that says it (floor 0: imports errors)."""

from __future__ import annotations

import math
import numbers
import operator
from typing import SupportsIndex

from pccheck.errors import OptionError


def positive(field: str, value: float, *, what: str = "seconds", infinite: bool = False) -> float:
    """Give a number greater than 0, finite unless `infinite`; raise OptionError for any other value."""
    number = _number(value)
    if not (number > 0 and (infinite or number < math.inf)):
        raise OptionError(field, value, f"{what}, greater than 0" + ("" if infinite else " and finite"))
    return number


def not_negative(field: str, value: float, *, what: str = "seconds") -> float:
    """Give a finite number that is 0 or more; raise OptionError for any other value."""
    number = _number(value)
    if not 0 <= number < math.inf:
        raise OptionError(field, value, f"{what}, 0 or more and finite")
    return number


def whole(field: str, value: SupportsIndex, least: int = 1) -> int:
    """Give a whole number of at least `least`; raise OptionError for any other value."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= _MOST:
        raise OptionError(field, value, f"a whole number, at least {least} and of 64 bits")
    return number


def ratio(field: str, value: float) -> float:
    """Give a slowdown, a ratio of at least 1; raise OptionError for any other, which says what to give instead.

    0.05 in place of 1.05 would make PCcheck's rule ask for intervals twenty times too long, so that it is refused.
    """
    number = _number(value)
    if not 1 <= number <= _STEEPEST:
        instead = f"; for at most {number:.1%} slower give {1 + number:g}" if 0 < number < 1 else ""
        above = f"; and at most {_STEEPEST:g}" if number > _STEEPEST else ""
        raise OptionError(field, value, f"a ratio of times, at least 1 (1.05 = 5 % slower){instead}{above}")
    return number


def share(field: str, value: float) -> float:
    """Give a fraction between 0 and 1, both excluded, and not below 1e-9; raise OptionError for any other value."""
    number = _number(value)
    if not LEAST_SHARE <= number < 1:
        raise OptionError(field, value, "a fraction of the time, from 1e-9 to less than 1 (0.05 = 5 %)")
    return number


def duration(field: str, value: float, *, zero: bool = False) -> float:
    """Give the seconds of something that is measured or asked for, 1e-9 to 1e10, or 0 where `zero`; else OptionError.

    The formulas take any time above 0. What people tell is bound here, so that no sum or product of such times is
    infinite, or one of them lost beside another.
    """
    number = _number(value)
    if not (LEAST_S <= number <= MOST_S or (zero and number == 0)):
        least = "0 or more" if zero else "greater than 0"
        raise OptionError(field, value, f"seconds, {least} and finite: from {LEAST_S:g} to {MOST_S:g}")
    return number


def at_least(value: float) -> int:
    """Give the least whole number from 1 on that is not below a value, which may be too great by rounding errors."""
    return max(1, math.ceil(value - _ROUNDING * max(1.0, value)))


def at_most(value: float) -> int:
    """Give the greatest whole number that is not above a value, which may be too small by rounding errors."""
    return math.floor(value + _ROUNDING * max(1.0, value))


LEAST_S, MOST_S = 1e-9, 1e10  # 300 years
_MOST = (1 << 63) - 1
_STEEPEST = 1e9  # of slowdowns
LEAST_SHARE = 1e-9
_ROUNDING = 1e-9  # 12 s / (2 * 0.6 s) must be 10 steps, not 11


def _number(value: float) -> float:
    """Give NaN, which no range holds, for what is no real number (a bool and a text neither)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # of a whole number beyond all floats
        return math.nan
