"""Public bug reports of other checkpoint libraries, each as a test of its whole kind: what a save captures."""

from __future__ import annotations

import numpy as np
import pytest

import pccheck
from tests.faults.helpers import (
    CHUNK,
    WAIT_S,
    pool_of,
    throttled,
)

MIB = 1 << 20


# -- A. snapshot consistency ------------------------------------------------------------------------------------------


def aliased(kind: str, tmp_path):
    """Give a leaf of 1s and a function that sets all of it to 2, through some other name of the same memory."""
    if kind.startswith("torch"):
        torch = pytest.importorskip("torch")
        base = torch.ones(60_000)
        leaf = {"torch": base, "torch view": base[7:-7], "torch strided": base.view(200, 300).T[::2],
                "torch from numpy": base}[kind]  # fmt: skip
        if kind == "torch from numpy":
            array = np.ones(60_000, np.float32)
            return torch.from_numpy(array), lambda: array.fill(2)
        return leaf, lambda: base.fill_(2)
    if kind == "memory map":
        array = np.memmap(tmp_path / "weights.bin", np.float32, "w+", shape=(60_000,))
        array.fill(1)
    else:
        array = np.ones(60_000, np.float32)
    leaf = {"view": array[7:-7], "strided": array.reshape(200, 300).T[::2], "reversed": array[::-1],
            "broadcast": np.broadcast_to(array[:1], (99, 99)), "read-only": array.view()}.get(kind, array)  # fmt: skip
    if kind == "read-only":
        leaf.flags.writeable = False
    return leaf, lambda: array.fill(2)


@pytest.mark.parametrize(
    "kind",
    ["numpy", "view", "strided", "reversed", "broadcast", "read-only", "memory map", "torch", "torch view",
     "torch strided", "torch from numpy"],
)  # fmt: skip
def test_case_1_what_is_assigned_after_the_call_is_not_stored(tmp_path, kind):
    """Case 1: on slow storage, through a pool smaller than the state, the value at the time of the call is stored."""
    with throttled(tmp_path / "s", 4 * MIB, buffer_bytes=2 * CHUNK) as ck:
        leaf, overwrite = aliased(kind, tmp_path)
        save = ck.save(1, {"a": [leaf], "b": {"same": leaf}})
        overwrite()
        assert save.durable.result(WAIT_S) == 1
        restored = ck.restore().state
        for found in (restored["a"][0], restored["b"]["same"]):
            assert tuple(found.shape) == tuple(leaf.shape)
            assert (np.asarray(found) == 1).all()


@pytest.mark.parametrize("kind", ["numpy", "strided", "torch"])
def test_case_1_in_lazy_mode_after_the_fence(tmp_path, kind):
    """Case 1: in lazy mode the fence is what must come first, and it is enough."""
    with throttled(tmp_path / "s", 4 * MIB, buffer_bytes=2 * CHUNK, snapshot="lazy") as ck:
        leaf, overwrite = aliased(kind, tmp_path)
        save = ck.save(1, {"a": leaf})
        assert ck.fence(WAIT_S) >= 0
        assert save.captured.result(WAIT_S) == 1
        overwrite()
        assert save.durable.result(WAIT_S) == 1
        assert (np.asarray(ck.restore().state["a"]) == 1).all()


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_case_2_all_leaves_are_from_one_step(fast_path, snapshot):
    """Case 2: AdamW's 0-d step counters, moments, weights and Python numbers, 200 rounds, training on at once."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.999)
    data = torch.randn(16, 64)
    checks: dict[int, tuple] = {}

    def totals():
        state = optimizer.state_dict()["state"]
        return (
            sum(float(p.detach().double().sum()) for p in model.state_dict().values()),
            sum(float(s["exp_avg"].double().sum()) for s in state.values()),
            scheduler.last_epoch,
        )

    with pccheck.Checkpointer(fast_path / "s", in_flight=3, snapshot=snapshot, chunk_bytes=CHUNK) as ck:
        for k in range(1, 201):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            ck.fence(WAIT_S)
            optimizer.step()
            scheduler.step()
            checks[k] = totals()
            ck.save(k, {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "k": k})  # fmt: skip
            if k % 10:
                continue
            with pccheck.open(fast_path / "s") as view:
                restored = view.restore()
            if restored is None:
                continue
            state, step = restored.state, restored.step
            assert state["k"] == step
            for leaf in state["optimizer"]["state"].values():
                assert float(leaf["step"]) == step
            weights, moments, epoch = checks[step]
            assert state["scheduler"]["last_epoch"] == epoch
            assert sum(float(p.double().sum()) for p in state["model"].values()) == weights
            moment_sum = sum(float(s["exp_avg"].double().sum()) for s in state["optimizer"]["state"].values())
            assert moment_sum == moments


@pytest.mark.parametrize("writers", [1, 3])
def test_case_4_a_buffer_returns_only_when_its_write_is_acknowledged(tmp_path, writers):
    """Case 4: two buffers, slow storage, five saves with a fill of their own under way: each kept step is uniform."""
    with throttled(tmp_path / "s", 3 * MIB, in_flight=5, keep=5, buffer_bytes=2 * CHUNK, writers=writers) as ck:
        for step in range(1, 6):
            array = np.full(40_000, step, np.uint8)
            ck.save(step, {"w": array})
            array.fill(255)
        ck.wait(WAIT_S)
        assert ck.steps() == [1, 2, 3, 4, 5]
        for step in range(1, 6):
            assert np.array_equal(ck.restore(step, branch=False).state["w"], np.full(40_000, step, np.uint8))
        assert pool_of(ck) == (2, 2)
        assert ck.stats().pool_wait_s > 0
