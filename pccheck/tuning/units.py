"""Amounts as people write them, strictly: bytes, rates, durations, and back to text (floor 0: imports domain)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from pccheck.errors import OptionError
from pccheck.tuning.domain import LEAST_S, MOST_S

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_SIZES = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_SIZES |= {name.lower(): size for name, size in _SIZES.items() if name != "B"}  # "80gb"; "Gb" may be bits
_BITS = {"kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_MOST_BYTES = 1 << 60
# A slot is preallocated: an amount of bytes without its unit is a slip of a factor of 10**9, so it is refused.
_SIZE_FORMS = "a number with its unit, such as 80GB (10**9 bytes), 80GiB (2**30) or 512MiB"
_RATE_FORMS = "a number with its unit, such as 500MB/s, 2GiB/s or 25Gbit/s"
_DIGITS = 9  # after the point
_DURATION_FORMS = "seconds, or a number with its unit (us, ms, s, m, h, d), such as 2, 350ms, 45m or 1h30m"


def parse_bytes(text: str, *, field: str = "size") -> int:
    """Read an amount of bytes: "80GB", "80 GiB", "1.5TB".

    Raises:
        OptionError: anything else, also a bare number, "Gb" (bits?), less than a byte, or above 2**60.
    """
    count = _amount(text, _SIZES)
    if count is None or not 1 <= count <= _MOST_BYTES:
        raise OptionError(field, text, _range(text, count, "1 byte", "2**60 bytes") + _SIZE_FORMS)
    return round(count)


def parse_rate(text: str, *, field: str = "rate") -> float:
    """Read bytes per second: "500MB/s", "2 GiB/s", "25Gbit/s" or "25Gbps" (bits, as of networks).

    Raises:
        OptionError: anything else.
    """
    value = text.strip()
    if value.endswith("bps"):
        value = value.removesuffix("bps") + "bit/s"
    amount, slash, per = value.rpartition("/")
    bits = _amount(amount, _BITS)
    rate = bits / 8 if bits is not None else _amount(amount, _SIZES)
    if not slash or per.strip() != "s":
        raise OptionError(field, text, _RATE_FORMS)
    if rate is None or not 1 <= rate <= _MOST_BYTES:
        raise OptionError(
            field, text, _range(amount, rate, "1 byte per second", "2**60 bytes per second") + _RATE_FORMS
        )
    return rate


def parse_seconds(text: str, *, field: str = "duration", zero: bool = True) -> float:
    """Read a duration in seconds: "2" (seconds), "350ms", "45m" (minutes), "2 h", "1h30m", "1d".

    Raises:
        OptionError: anything else, also nothing at all, less than 10**-9 seconds but not 0, more than 10**10, and
            without `zero` 0.
    """
    above_0 = "" if zero else "greater than 0, from 10**-9 s to 10**10 s: "
    value = text.strip()
    unit = "|".join(sorted(_SECONDS, key=len, reverse=True))
    if re.fullmatch(_NUMBER, value, re.ASCII):
        seconds = float(value)
    elif re.fullmatch(rf"(?:{_NUMBER}\s*(?:{unit})\s*)+", value, re.ASCII):
        parts = re.findall(rf"{_NUMBER}\s*({unit})", value, re.ASCII)
        sizes = [_SECONDS[name] for _, name in parts]
        if sizes != sorted(set(sizes), reverse=True):  # "5m2h" and "5m5m" are slips, not durations
            raise OptionError(field, text, _DURATION_FORMS)
        seconds = sum(float(number) * size for (number, _), size in zip(parts, sizes, strict=True))
    elif value.lower().lstrip("+-") in ("inf", "infinity", "nan"):
        raise OptionError(field, text, f"finite: leave it out, or give {_DURATION_FORMS}")
    else:
        wrong = _range(text, None, "0 s", "10**10 s")
        raise OptionError(field, text, ((wrong and above_0) or wrong) + _DURATION_FORMS)
    if not (LEAST_S <= seconds <= MOST_S or (zero and seconds == 0)):
        wrong = above_0 or _range(text, seconds, "0, or 10**-9 s,", "10**10 s")
        raise OptionError(field, text, wrong + _DURATION_FORMS)
    return seconds


def _range(text: str, amount: float | None, least: str, most: str) -> str:
    """Say what is wrong with an amount before the forms that are right: its sign, its exponent, or its range."""
    if amount is not None:
        return f"from {least} to {most}: "
    if re.match(r"\s*-\s*[\d.]", text, re.ASCII):
        return f"at least {least}, without a sign: "
    if re.match(rf"\s*{_NUMBER}[eE][+-]?\d", text, re.ASCII):
        return f"written without an exponent, at most {most}: "
    return ""


def _amount(text: str, units: Mapping[str, int]) -> float | None:
    found = re.fullmatch(rf"{_NUMBER}\s*([a-zA-Z]+)", text.strip(), re.ASCII)
    if found is None or found[2] not in units:
        return None
    return float(found[1]) * units[found[2]]


def bytes_text(count: float) -> str:
    """Say an amount of bytes with three digits, in the decimal units of storage: "80 GB", "1.25 TB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{_three(count)} {unit}"


def rate_text(bytes_per_s: float) -> str:
    """Say a rate: "500 MB/s"."""
    return bytes_text(bytes_per_s) + "/s"


def seconds_text(seconds: float) -> str:
    """Say a duration as a person would: "5 ms", "2.5 s", "160 s", "8 min 39 s", "3 h 20 min", "12 d"."""
    if not math.isfinite(seconds):
        return "for ever"
    if seconds < 0.9995:
        return f"{_three(seconds * 1000)} ms"
    if seconds < 180:
        return f"{_three(seconds)} s"
    for size, name, below, small in ((60.0, "min", 120, "s"), (3600.0, "h", 48, "min"), (86400.0, "d", 10**6, "h")):
        if seconds / size < below:
            if seconds / size >= 20:
                return f"{round(seconds / size)} {name}"
            step = {"s": 1.0, "min": 60.0, "h": 3600.0}[small]
            head, rest = divmod(round(seconds / step), round(size / step))
            return f"{head} {name}" + (f" {rest} {small}" if rest else "")
    return f"{seconds / 86400:.3g} d"  # more than anybody lives to see


def value_text(field: str, value: object) -> str:
    """Say the value of an option or argument as a person would: sizes, durations and rates with their units."""
    if isinstance(value, (int, float)):
        if field.endswith("_bytes"):
            return bytes_text(value)
        if field.endswith("_s") or field == "seconds":
            return seconds_text(value) if value >= 1e-6 else f"{value:g} s"
        if field in ("disk", "stream", "copy", "read"):
            return rate_text(value)
    return str(value).removesuffix(".0")


def _three(value: float) -> str:
    """Give three digits, or all before the point."""
    if value >= 99.95 or value == 0:
        return f"{value:.0f}"
    digits = min(_DIGITS, max(0, 2 - math.floor(math.log10(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
