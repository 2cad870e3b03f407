"""The default pool: in_flight states, a quarter of the memory that is left, two chunks."""

import subprocess
import sys

import numpy as np
import pytest

import pccheck
from pccheck.pipeline.choose import native_missing
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


def test_what_was_asked_for_is_given_whatever_is_left(available):
    available(0)
    assert sizing.pool_bytes(77 * MIB, 1000 * MIB, 1, 16 * MIB) == 77 * MIB


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_no_more_than_the_states_in_flight_can_use(in_flight):
    """80 MB of state with a pool of 3 GB took 3 GB."""
    assert sizing.pool_bytes(3 * 10**9, 80 * MIB, in_flight, 16 * MIB) == in_flight * 80 * MIB
    assert sizing.pool_bytes(3 * 10**9, 1, 1, 16 * MIB) == 32 * MIB


@pytest.mark.parametrize("pipeline", ["native", "portable"])
def test_a_checkpointer_takes_no_more_and_grows_with_the_state(tmp_path, pipeline):
    if pipeline == "native" and native_missing():
        pytest.skip("not built")
    options = {"in_flight": 2, "chunk_bytes": MIB, "buffer_bytes": 64 * MIB, "pipeline": pipeline}
    with pccheck.Checkpointer(tmp_path, **options) as ck:
        held = []
        for step, size in enumerate((3 * MIB, 12 * MIB, 200 * MIB, MIB)):
            ck.save(step, {"w": np.zeros(size, np.uint8)}).durable.result(60)
            held.append(ck._flight.pipelines.current.memory[1] // MIB)
        assert held == [6, 24, 64, 64]


def test_memory_that_cannot_be_had_is_named_with_what_to_do(tmp_path):
    """Under a limit on the address space, as a container or a batch system sets it."""
    program = (
        "import resource, numpy as np, pccheck\n"
        f"with pccheck.Checkpointer({str(tmp_path)!r}, in_flight=8, buffer_bytes=1 << 40) as ck:\n"
        "    state = {'w': np.zeros(600 << 20, np.uint8)}\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))\n"
        "    try:\n"
        "        ck.save(0, state)\n"
        "    except MemoryError as error:\n"
        "        assert isinstance(error, pccheck.errors.CapacityError), error\n"
        "        print(error)\n"
        "    ck.save(1, {'w': state['w'][:1000]}).durable.result(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no memory for a buffer pool of 5,100,273,664 bytes" in done.stdout
    assert "lower buffer_bytes or in_flight" in done.stdout


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
