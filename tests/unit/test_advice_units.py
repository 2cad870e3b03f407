"""Amounts as people write them: read strictly, said back shortly."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck.errors import OptionError
from pccheck.tuning.units import bytes_text, parse_bytes, parse_rate, parse_seconds, rate_text, seconds_text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GB", 80 * 10**9), ("80 GB", 80 * 10**9), (" 80GiB ", 80 << 30), ("512MiB", 512 << 20),
        ("80gb", 80 * 10**9), ("2gib", 2 << 30),
        ("1.5TB", 15 * 10**11), (".5kB", 500), ("1KB", 1000), ("4096B", 4096), ("1PiB", 1 << 50),
    ],
)  # fmt: skip
def test_bytes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["80", "80Gb", "80 G", "-1GB", "0B", "0.1B", "GB", "", "1e3GB", "8٠GB", "2000PiB", "1 GB x"]
)
def test_what_is_no_amount_of_bytes_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(OptionError, match="such as 80GB") as caught:
        parse_bytes(text, field="state_bytes")
    assert (caught.value.field, caught.value.value) == ("state_bytes", text)


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (parse_bytes, "-80GB", "without a sign"), (parse_bytes, "0GB", "from 1 byte"),
        (parse_bytes, "1e30GB", "without an exponent"), (parse_bytes, "9999PB", "to 2**60 bytes"),
        (parse_rate, "0MB/s", "from 1 byte per second"), (parse_seconds, "inf", "finite: leave it out"),
        (parse_seconds, "-2", "without a sign"), (parse_seconds, "99999999999", "to 10**10 s"),
        (parse_seconds, "0." + 300 * "0" + "1", "10**-9 s"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_amount_is_said(read: Any, text: str, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(text)
    assert said in caught.value.allowed


@pytest.mark.parametrize(
    ("text", "rate"),
    [("500MB/s", 5e8), ("2 GiB/s", 2 * 2**30), ("25Gbit/s", 25e9 / 8), ("25Gbps", 25e9 / 8), ("1.5 GB / s", 1.5e9)],
)
def test_rates_are_read(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["500MB", "500", "500MB/h", "500Mb/s", "500MBps", "0MB/s", "/s", "bps"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="such as 500MB/s"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 2), ("0.35", 0.35), ("350ms", 0.35), ("2s", 2), ("45m", 2700), ("45min", 2700), ("2 h", 7200),
        ("1h30m", 5400), ("1 h 30 m", 5400), ("1d", 86400), ("250us", 0.00025), ("0", 0),
    ],
)  # fmt: skip
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["", "m", "-2", "1e3", "5m2h", "5m5m", "2 hours", "inf", "nan", "1M", "٣s", "99999999999"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="45m"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.005, "5 ms"), (0.35, "350 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (2.5, "2.5 s"), (160.01, "160 s"),
        (180, "3 min"), (519, "8 min 39 s"), (1550, "26 min"), (12000, "3 h 20 min"), (200_000, "2 d 8 h"),
        (2_626_560, "30 d"), (math.inf, "for ever"), (1e300, "1.16e+295 d"), (1e-300, "0 ms"), (0.0, "0 ms"),
    ],
)  # fmt: skip
def test_durations_are_said(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (999.7, "1 kB"), (80e9, "80 GB"), (1 << 30, "1.07 GB"), (5e15, "5000 TB")],
)
def test_bytes_are_said(count: float, text: str) -> None:
    assert (bytes_text(count), rate_text(count)) == (text, text + "/s")


@given(st.floats(1e-3, 1e9))
def test_what_is_said_of_a_duration_is_read_again(seconds: float) -> None:
    assert parse_seconds(seconds_text(seconds)) == pytest.approx(seconds, rel=0.03)


@given(st.integers(1, 1 << 50))
def test_what_is_said_of_bytes_is_read_again(count: int) -> None:
    assert parse_bytes(bytes_text(count)) == pytest.approx(count, rel=0.006)
