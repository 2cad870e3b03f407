"""The handler for Orbax's v1 interface: free functions, checkpointables, its training.Checkpointer, and both ways."""

from __future__ import annotations

import contextvars
import gc

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as v0
import pccheck_orbax
import pytest
from orbax.checkpoint import v1 as ocp
from pccheck_orbax import v1

import pccheck
from pccheck.errors import MismatchError, UnsupportedLeafError
from tests.adapters.orbax_shared import held, same, state

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def context():
    with v1.context():
        yield


def test_several_saves_at_once(tmp_path):
    answers = [ocp.save_async(tmp_path / str(step), state(step)) for step in range(5)]
    for answer in answers:
        answer.result()
    for step in range(5):
        assert same(ocp.load(tmp_path / str(step)), step)
        assert same(ocp.load(tmp_path / str(step), state(0)), step)
    assert held(tmp_path) == 5
    assert not list((tmp_path / ".pccheck_staged").iterdir())


def test_a_tree_of_jax_comes_back_as_the_abstract_one_asks(tmp_path):
    tree = {"w": jnp.arange(8.0), "key": jax.random.key(3), "n": np.arange(3), "step": 7}
    ocp.save(tmp_path / "1", tree)
    plain = ocp.load(tmp_path / "1")
    assert isinstance(plain["w"], jax.Array)
    assert (plain["key"].dtype, type(plain["n"]), plain["step"]) == (tree["key"].dtype, np.ndarray, 7)
    on = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    abstract = {
        "w": jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=on), "key": tree["key"], "n": np.zeros(3, np.float32),
        "step": int,
    }  # fmt: skip
    got = ocp.load(tmp_path / "1", abstract)
    assert (got["w"].dtype, got["w"].sharding, got["n"].dtype, got["step"]) == (jnp.bfloat16, on, np.float32, 7)
    got = ocp.load(tmp_path / "1", abstract | {"w": ocp.PLACEHOLDER, "key": ...})
    assert got["w"] is got["key"] is ...
    for wrong in ({"w": abstract["w"]}, abstract | {"w": jnp.zeros(9)}, abstract | {"more": 1}):
        with pytest.raises(MismatchError):
            ocp.load(tmp_path / "1", wrong)


def test_metadata_is_an_abstract_tree(tmp_path):
    ocp.save(tmp_path / "1", {"w": jnp.zeros((2, 3), jnp.bfloat16), "n": 5, "s": "x"}, custom_metadata={"a": 1})
    found = ocp.metadata(tmp_path / "1")
    assert found.custom_metadata == {"a": 1}
    assert (found.metadata["w"].shape, found.metadata["w"].dtype) == ((2, 3), jnp.bfloat16)
    assert (ocp.load(tmp_path / "1", found)["w"] == 0).all()


def test_checkpointables_side_by_side(tmp_path):
    with v1.context("state", "ema"):
        ocp.save_checkpointables(tmp_path / "1", {"state": state(1), "ema": state(2), "position": {"at": 3}})
        got = ocp.load_checkpointables(tmp_path / "1")
        assert same(got["state"], 1)
        assert same(got["ema"], 2)
        assert got["position"] == {"at": 3}
        assert same(ocp.load_checkpointables(tmp_path / "1", {"ema": state(0)})["ema"], 2)
        assert same(ocp.load(tmp_path / "1", checkpointable_name="ema"), 2)
    assert (tmp_path / "1" / "position").is_dir()
    assert held(tmp_path) == 2


def test_errors_of_leaves_come_out_of_the_call(tmp_path):
    with pytest.raises(UnsupportedLeafError, match="bad"):
        ocp.save_async(tmp_path / "1", {"bad": np.array([object()])})
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(UnsupportedLeafError, match="x"):
        ocp.save_async(tmp_path / "2", {"x": gone})
    ocp.save(tmp_path / "3", state(3))
    assert held(tmp_path) == 1


def test_a_failed_save_leaves_nothing_and_holds_up_nothing(tmp_path):
    answers = [ocp.save_async(tmp_path / name, state(1)) for name in ("x" * 250, "2", "3")]
    with pytest.raises(OSError, match="too long"):
        answers[0].result()
    for answer in answers[1:]:
        answer.result()
    assert same(ocp.load(tmp_path / "3"), 1)
    assert held(tmp_path) == 3
    del answers
    gc.collect()  # the error's traceback holds what Orbax was given
    ocp.save(tmp_path / "4", state(4))
    assert held(tmp_path) == 3


def test_its_own_engine(tmp_path):
    engine = pccheck_orbax.Engine(in_flight=4, chunk_bytes=1 << 20)
    with v1.context(engine=engine):
        for answer in [ocp.save_async(tmp_path / str(step), state(step)) for step in range(4)]:
            answer.result()
    assert same(ocp.load(tmp_path / "2"), 2)  # by the default handler: checkpoints do not tell them apart
    engine.close()
    with pccheck.open(tmp_path / "2" / "state") as view:
        assert (view["w"] == 2).all()


def test_the_training_checkpointer(tmp_path):
    policy = ocp.training.save_decision_policies.FixedIntervalPolicy(1)
    keep = ocp.training.preservation_policies.LatestN(2)
    with ocp.training.Checkpointer(
        tmp_path, context=v1.context(), save_decision_policy=policy, preservation_policy=keep
    ) as checkpointer:
        for step in range(4):
            checkpointer.save_async(step, state(step)).result()
        assert same(checkpointer.load(3), 3)
    assert v0.CheckpointManager(tmp_path).all_steps() == [2, 3]
    assert held(tmp_path) == 2


def _saved_after_a_checkpointer(context, root):
    """Tell how many of two saves within a context are pccheck's: one before a Checkpointer was used, one after."""

    def run():
        with context:
            ocp.save(root / "before", state(1))
            with ocp.training.Checkpointer(root / "run") as checkpointer:
                checkpointer.save(0, state(2))
            ocp.save(root / "after", state(3))
        return held(root / "before"), held(root / "after")

    return contextvars.Context().run(run)  # without the context of this module's tests around it


def test_a_training_checkpointer_within_a_context_does_not_end_it(tmp_path):
    stock = ocp.Context()
    stock.checkpointables.registry = v1.registry()
    assert _saved_after_a_checkpointer(stock, tmp_path / "stock") == (1, 0)  # Orbax's own save, without a word
    assert _saved_after_a_checkpointer(v1.context(), tmp_path / "ours") == (1, 1)


def test_all_that_a_training_checkpointer_does_within_one_context(tmp_path):
    def run():
        with v1.context():
            for step in range(3):
                with ocp.training.Checkpointer(tmp_path) as checkpointer:
                    assert (None if checkpointer.latest is None else checkpointer.latest.step) == (
                        step - 1 if step else None
                    )
                    if step:
                        assert same(checkpointer.load(step - 1, state(0)), step - 1)
                        assert checkpointer.metadata(step - 1).metadata["w"].shape == state(0)["w"].shape
                    assert checkpointer.should_save(step)
                    checkpointer.save(step, state(step))
            with ocp.training.Checkpointer(tmp_path) as checkpointer:
                checkpointer.delete(0)
            assert same(ocp.load(tmp_path / "2", state(0)), 2)
            assert same(ocp.load(tmp_path / "2"), 2)
            assert ocp.metadata(tmp_path / "1").metadata["w"].shape == state(0)["w"].shape
        assert held(tmp_path) == 2
        ocp.save(tmp_path / "stock", {"w": jnp.zeros(3)})  # the block has ended

    contextvars.Context().run(run)
    assert held(tmp_path) == 2


def test_contexts_that_are_entered_again_and_left_out_of_order(tmp_path):
    def entered(context, name):
        with context:
            yield
            ocp.save(tmp_path / name, state(1))
            yield

    def run():
        one, other = v1.context(), v1.context("other")
        with one, other:
            with one:
                with one:
                    pass
                ocp.save(tmp_path / "1", state(1))
            ocp.save_checkpointables(tmp_path / "2", {"other": state(2)})
        first, second = entered(one, "3"), entered(one, "4")
        for each in (first, second, first, second):
            next(each)
        first.close()
        ocp.save(tmp_path / "5", state(1))
        second.close()
        with pytest.raises(ZeroDivisionError), one:
            raise ZeroDivisionError
        with one:
            ocp.save(tmp_path / "6", state(1))

    contextvars.Context().run(run)
    assert {path.parent.parent.name for path in tmp_path.glob("?/*/*.pcc")} >= {"1", "2", "3", "4", "6"}


def test_a_step_of_ours_outside_of_a_context_is_an_error_of_orbax(tmp_path):
    def run():
        with ocp.training.Checkpointer(tmp_path, context=v1.context()) as checkpointer:
            checkpointer.save(0, state(0))
            assert same(checkpointer.load(0, state(0)), 0)
        with pytest.raises(KeyError, match="tree_metadata"):
            ocp.load(tmp_path / "0", state(0))
        assert ocp.metadata(tmp_path / "0").metadata is None
        with (
            ocp.training.Checkpointer(tmp_path) as checkpointer,
            pytest.raises(Exception, match="incompatible handler"),
        ):
            checkpointer.load(0, state(0))
        with v1.context():
            assert same(ocp.load(tmp_path / "0", state(0)), 0)

    contextvars.Context().run(run)


def test_what_the_older_interface_saved_and_the_other_way_round(tmp_path):
    with v0.CheckpointManager(tmp_path / "old", handler_registry=pccheck_orbax.registry()) as manager:
        manager.save(1, args=v0.args.StandardSave(state(1)))
    with v0.CheckpointManager(tmp_path / "old", handler_registry=pccheck_orbax.registry()) as manager:
        manager.save(2, args=v0.args.Composite(state=v0.args.StandardSave(state(2)), it=v0.args.JsonSave({"p": 2})))
    assert same(ocp.load(tmp_path / "old" / "1"), 1)
    assert same(ocp.load(tmp_path / "old" / "1", state(0)), 1)
    got = ocp.load_checkpointables(tmp_path / "old" / "2")
    assert same(got["state"], 2)
    assert got["it"] == {"p": 2}

    ocp.save(tmp_path / "new" / "3", state(3))
    with v0.CheckpointManager(tmp_path / "new", handler_registry=pccheck_orbax.registry("state")) as manager:
        assert manager.all_steps() == [3]
        args = v0.args.Composite(state=v0.args.StandardRestore(state(0)))
        assert same(manager.restore(3, args=args).state, 3)


def test_what_stock_orbax_saved(tmp_path):
    with ocp.Context():
        ocp.save(tmp_path / "1", {"w": jnp.arange(4.0), "n": 3})
    assert (ocp.load(tmp_path / "1")["w"] == jnp.arange(4.0)).all()
    assert ocp.load(tmp_path / "1", {"w": jax.ShapeDtypeStruct((4,), jnp.float16), "n": 0})["w"].dtype == jnp.float16
    assert ocp.metadata(tmp_path / "1").metadata["w"].shape == (4,)
    assert held(tmp_path) == 0
