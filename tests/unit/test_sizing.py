"""The default pool: in_flight states, a quarter of the memory that is left, two chunks."""

import pytest

from pccheck.saving import sizing

MIB = 1 << 20


@pytest.fixture
def available(monkeypatch):
    return lambda n: monkeypatch.setattr(sizing, "available_bytes", lambda: n)


def test_the_pool_follows_in_flight(available):
    available(1 << 40)
    assert sizing.pool_bytes(None, 100 * MIB, 3, 16 * MIB) == 3 * 112 * MIB


def test_at_most_a_quarter_of_what_is_left(available):
    available(400 * MIB)
    assert sizing.pool_bytes(None, 1000 * MIB, 3, 16 * MIB) == 100 * MIB


def test_never_less_than_two_chunks(available):
    available(0)
    assert sizing.pool_bytes(None, 1, 1, 16 * MIB) == 32 * MIB


def test_what_was_asked_for_is_what_is_given(available):
    available(0)
    assert sizing.pool_bytes(77 * MIB, 1, 1, 16 * MIB) == 77 * MIB


def test_this_machine_has_memory_left():
    assert 0 < sizing.available_bytes() < 1 << 50


def test_the_control_group_counts(tmp_path, monkeypatch):
    limit, use = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(sizing, "_CGROUP_FILES", ((str(limit), str(use)),))
    before = sizing.available_bytes()
    limit.write_text("max\n")
    use.write_text("5\n")
    assert sizing.available_bytes() == pytest.approx(before, rel=0.2)
    limit.write_text(f"{3 * MIB}\n")
    use.write_text(f"{MIB}\n")
    assert sizing.available_bytes() == 2 * MIB
