"""Any tree of torch's leaves comes back exactly, or is refused by save() with its path (case 36)."""

from __future__ import annotations

import collections
import math
import tempfile

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from pccheck_torch.leaves.kind import DTYPES, QUANTIZED  # noqa: E402

import pccheck  # noqa: E402
from pccheck.errors import UnsupportedLeafError  # noqa: E402
from pccheck.testing.compare import difference  # noqa: E402

Parameter = torch.nn.Parameter
Pair = collections.namedtuple("Pair", "left right")
Empty = collections.namedtuple("Empty", "")
NAMES = sorted(set(DTYPES) - QUANTIZED)
shapes = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def dense(draw):
    dtype, shape = DTYPES[draw(st.sampled_from(NAMES))], draw(shapes)
    count = math.prod(shape)
    top = 2 if dtype is torch.bool else 256
    if not count:
        return torch.empty(shape, dtype=dtype)
    seed = draw(st.integers(0, 99))
    raw = torch.randint(0, top, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype).view(shape)


@st.composite
def views(draw):
    tensor = draw(dense())
    for _ in range(draw(st.integers(0, 2))):
        how = draw(st.sampled_from(["permute", "every other", "first", "expand", "tail"]))
        if how == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif tensor.dim() and how == "every other":
            tensor = tensor[::2]
        elif tensor.dim() and tensor.shape[0] and how == "first":
            tensor = tensor[0]
        elif tensor.dim() and how == "tail":
            tensor = tensor[1:]
        elif how == "expand":
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


@st.composite
def gradients(draw):
    tensor = draw(views())
    if tensor.is_floating_point() or tensor.is_complex():
        how = draw(st.sampled_from(["plain", "parameter", "frozen", "leaf"]))
        if how == "leaf":
            return tensor.detach().requires_grad_()
        return tensor if how == "plain" else Parameter(tensor, requires_grad=how == "parameter")
    return tensor


@st.composite
def lazy(draw):
    numbers = draw(st.lists(st.complex_numbers(max_magnitude=9, width=64), min_size=1, max_size=4))
    z = torch.tensor(numbers, dtype=torch.complex64)
    return draw(st.sampled_from([z.conj(), z.conj().imag, torch._neg_view(z.real), z.imag]))


small = st.one_of(
    shapes.map(torch.Size), st.sampled_from(NAMES).map(DTYPES.get), st.sampled_from(["cpu", "cuda:1"]).map(torch.device)
)
values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.complex_numbers(), st.text(max_size=9),
    st.binary(max_size=9),
)  # fmt: skip
leaves = st.one_of(gradients(), gradients(), lazy(), small, values, st.just(Empty()), st.just({}), st.just(()))
keys = st.one_of(st.text(max_size=4), st.integers(0, 9))


def containers(inner):
    return st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=3).map(tuple), st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict), st.builds(Pair, inner, inner),
        inner.map(lambda leaf: [leaf, leaf]),
    )  # fmt: skip


trees = st.recursive(leaves, containers, max_leaves=12)
thorough = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.fixture(scope="module")
def checkpointer():
    """Give one Checkpointer for all trees: each new structure is a new plan after another."""
    with tempfile.TemporaryDirectory() as folder, pccheck.Checkpointer(folder, chunk_bytes=1 << 16) as ck:
        yield ck


@pytest.mark.filterwarnings("ignore:.*ComplexHalf.*")
@thorough
@given(tree=trees)
def test_any_tree_comes_back_to_the_bit(checkpointer, tree):
    checkpointer.save(1, tree)
    checkpointer.wait()
    back = checkpointer.restore().state
    assert difference(tree, back, by_field=True) is None
    again = checkpointer.restore(like=tree).state
    assert difference(tree, again) is None


@pytest.mark.filterwarnings("ignore:.*ComplexHalf.*")
@thorough
@given(tree=trees, other=trees)
def test_what_is_saved_next_is_never_of_the_plan_before(checkpointer, tree, other):
    for step, state in enumerate([[tree, 1], [other, 1], [tree, 2]]):
        checkpointer.save(step, state)
        checkpointer.wait()
        assert difference(state, checkpointer.restore().state, by_field=True) is None


class Unknown:
    pass


class Sub(torch.Tensor):
    pass


@thorough
@given(tree=trees, bad=st.sampled_from([Unknown(), torch.ones(2).as_subclass(Sub), torch.nn.Linear(1, 1)]))
def test_what_cannot_be_stored_is_refused_with_its_path_and_nothing_is_lost(checkpointer, tree, bad):
    checkpointer.save(1, tree)
    checkpointer.wait()
    with pytest.raises(UnsupportedLeafError) as caught:
        checkpointer.save(2, {"good": tree, "bad": [0, bad]})
    assert caught.value.path == "bad/1"
    assert difference(tree, checkpointer.restore().state, by_field=True) is None


@pytest.mark.filterwarnings("ignore:.*ComplexHalf.*")
@thorough
@given(tensor=gradients())
def test_ties_stay_ties(checkpointer, tensor):
    checkpointer.save(1, {"a": tensor, "b": [tensor], "c": tensor.detach()})
    checkpointer.wait()
    back = checkpointer.restore().state
    assert back["a"] is back["b"][0] or not tensor.numel()
    assert back["c"].untyped_storage().data_ptr() == back["a"].untyped_storage().data_ptr() or not tensor.numel()
