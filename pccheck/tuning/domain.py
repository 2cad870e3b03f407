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
    if number < least:
        raise OptionError(field, value, f"a whole number, at least {least}")
    return number


def ratio(field: str, value: float) -> float:
    """Give a slowdown, a ratio of at least 1; raise OptionError for any other, which says what to give instead.

    0.05 in place of 1.05 would make PCcheck's rule ask for intervals twenty times too long, so that it is refused.
    """
    number = _number(value)
    if not 1 <= number < math.inf:
        instead = f"; for at most {number:.1%} slower give {1 + number:g}" if 0 < number < 1 else ""
        raise OptionError(field, value, f"a ratio of times, at least 1 (1.05 = 5 % slower){instead}")
    return number


def share(field: str, value: float) -> float:
    """Give a fraction between 0 and 1, both excluded; raise OptionError for any other value."""
    number = _number(value)
    if not 0 < number < 1:
        raise OptionError(field, value, "a fraction of the time, greater than 0 and less than 1 (0.05 = 5 %)")
    return number


def at_least(value: float) -> int:
    """Give the least whole number from 1 on that is not below a value, which may be too great by rounding errors."""
    return max(1, math.ceil(value - _ROUNDING * max(1.0, value)))


def at_most(value: float) -> int:
    """Give the greatest whole number that is not above a value, which may be too small by rounding errors."""
    return math.floor(value + _ROUNDING * max(1.0, value))


_ROUNDING = 1e-9  # 12 s / (2 * 0.6 s) must be 10 steps, not 11


def _number(value: float) -> float:
    """Give NaN, which no range holds, for what is no real number (a bool and a text neither)."""
    return math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
