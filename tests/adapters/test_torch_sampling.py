"""Each sample is used exactly once per epoch, whatever crashes come between."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from pccheck_torch.training.sampling import ResumableLoader, ResumableSampler  # noqa: E402
from pccheck_torch.training.state import TrainingState  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler  # noqa: E402

import pccheck  # noqa: E402
from pccheck.errors import OptionError, UnsupportedLeafError, UsageError  # noqa: E402


class Numbers(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index


def loader_of(n, batch_size, *, workers=0, drop_last=False, **options):
    options = {name: options[name] for name in options if options[name] is not None}
    sampler = ResumableSampler(n, **options)
    more = {"num_workers": workers, "persistent_workers": workers == 2} if workers else {}
    return ResumableLoader(DataLoader(Numbers(n), batch_size, sampler=sampler, drop_last=drop_last, **more))


def run(make, crashes, epochs):
    """Train in processes that die: give the samples of the committed history, epoch by epoch.

    Each (batches, uncommitted) of `crashes` is one process: it commits after so many batches, does some more, and dies.
    """
    used = [Counter() for _ in range(epochs)]
    committed = make().state_dict()
    for batches, uncommitted in [*crashes, (None, 0)]:
        loader = make()
        loader.load_state_dict(committed)
        done, since = 0, []
        while loader.epoch < epochs and (batches is None or done < batches + uncommitted):
            for batch in loader:
                since.append((loader.epoch, batch.tolist()))
                done += 1
                if batches is None or done <= batches:
                    committed = loader.state_dict()
                    for epoch, samples in since:
                        used[epoch].update(samples)
                    since = []
                if batches is not None and done == batches + uncommitted:
                    break  # SIGKILL: what was prefetched or not committed is gone
    return used


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 40),
    size=st.integers(1, 9),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    crashes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=4),
)
def test_each_sample_is_committed_exactly_once_per_epoch(n, size, shuffle, seed, crashes):
    used = run(lambda: loader_of(n, size, shuffle=shuffle, seed=seed), crashes, epochs=2)
    assert used == [Counter(range(n))] * 2


@pytest.mark.parametrize("workers", [1, 2])
def test_what_workers_fetched_ahead_does_not_count(workers):
    dice = random.Random(workers)
    for n in (31, 8):
        crashes = [(dice.randrange(7), dice.randrange(3)) for _ in range(2)]
        used = run(lambda n=n: loader_of(n, dice.randint(1, 5), workers=workers), crashes, epochs=2)
        assert used == [Counter(range(n))] * 2


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 50),
    runs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4)), max_size=3),
    last=st.integers(1, 4),
)
def test_another_number_of_ranks_goes_on(n, runs, last):
    """Runs of (ranks, batch size, steps) one after the other; only what makes the last round even is seen again."""
    used, state = Counter(), loader_of(n, 1).state_dict()
    for world, size, steps in [*runs, (last, 2, n)]:
        loaders = [loader_of(n, size, rank=r, world=world) for r in range(world)]
        for loader in loaders:
            loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(steps):
            batches = [next(it, None) for it in iterators]
            assert len({batch is None for batch in batches}) == 1, "ranks get equally many batches"
            if batches[0] is None:
                break
            assert len({len(b) for b in batches}) == 1
            used.update(i for b in batches for i in b.tolist())
            state = loaders[0].state_dict()
            assert all(loader.state_dict() == state for loader in loaders)
        if state["epoch"]:
            break
    assert set(used) == set(range(n))
    assert sum(used.values()) - n < max(w for w, *_ in [*runs, (last, 0, 0)])


def test_drop_last_of_ranks_and_of_batches():
    ranks = [loader_of(11, 2, rank=r, world=2, shuffle=False) for r in range(2)]
    assert [[b.tolist() for b in loader] for loader in ranks] == [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9, 0]]]
    sampler = ResumableSampler(11, rank=1, world=2, shuffle=False, drop_last=True)
    loader = ResumableLoader(DataLoader(Numbers(11), 2, sampler=sampler, drop_last=True))
    assert [b.tolist() for b in loader] == [[1, 3], [5, 7]]
    assert (len(loader), loader.epoch) == (2, 1)


def test_a_state_at_the_end_of_an_epoch_goes_on_with_the_next():
    loader = loader_of(6, 2)
    for batch in loader:
        last, state = batch, loader.state_dict()
    assert (state["epoch"], state["position"], loader.epoch) == (0, 6, 1)
    again = loader_of(6, 2)
    again.load_state_dict(state)
    assert list(again) == []
    assert again.epoch == 1
    assert sorted(i for b in again for i in b.tolist()) == list(range(6))
    assert last is not None


def test_epochs_and_seeds_have_orders_of_their_own():
    def orders(seed):
        loader = loader_of(64, 8, seed=seed)
        return [tuple(i for b in loader for i in b.tolist()) for _ in range(3)]

    assert orders(0) == orders(0)
    assert len({*orders(0), *orders(1), *orders(1 << 32)}) == 9


def test_an_iteration_that_was_left_is_gone_on_with():
    loader = loader_of(10, 2)
    for batch in loader:
        seen = batch.tolist()
        break
    seen += [i for b in loader for i in b.tolist()]
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize("position", [0, 4, 8, 10])  # 8: one sample is left, and with drop_last no batch
@pytest.mark.parametrize("drop_last", [False, True])
def test_endless_goes_from_epoch_to_epoch_and_takes_no_batch_too_many(position, drop_last):
    loader = loader_of(9, 2, drop_last=drop_last)
    loader.load_state_dict({**loader.state_dict(), "position": position})
    left = [i for b in loader for i in b.tolist()]
    epochs = [[i for b in loader for i in b.tolist()] for _ in range(2)]

    again = loader_of(9, 2, drop_last=drop_last)
    again.load_state_dict({**again.state_dict(), "position": position})
    steps = -(-len(left) // 2) + -(-len(epochs[0]) // 2) + 3  # three batches of the third epoch that is begun
    seen, given = [], []
    for _, batch in zip(range(steps), again.endless(), strict=False):
        seen += batch.tolist()
        given.append(again.state_dict())
    expected = left + epochs[0] + epochs[1]
    assert seen == expected[: len(seen)]
    assert again.epoch == 2
    assert given[-1] == again.state_dict(), "the end of the range takes no batch"


def test_endless_refuses_to_spin_where_there_is_no_batch():
    loader = loader_of(3, 4, drop_last=True)
    with pytest.raises(UsageError, match=r"3 samples on 1 rank.* gives no batch"):
        next(loader.endless())
    loader.load_state_dict({**loader.state_dict(), "epoch": 5, "position": 2})
    with pytest.raises(UsageError, match="gives no batch"):
        next(loader.endless())
    assert len(next(loader_of(3, 4).endless())) == 3


def test_an_older_iteration_is_refused():
    loader = loader_of(10, 2)
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(UsageError, match="another one was begun"):
        next(old)


@pytest.mark.parametrize("workers", [0, 2])  # two: they persist
def test_an_older_iteration_is_refused_before_its_first_batch_and_at_its_end(workers):
    loader = loader_of(4, 2, workers=workers)
    unused, ended = iter(loader), iter(loader)
    with pytest.raises(UsageError, match="another one was begun"):
        next(unused)
    assert len([next(ended), next(ended)]) == 2
    seen = [i for b in loader for i in b.tolist()]  # nothing is left of the epoch
    assert (seen, loader.epoch) == ([], 1)
    with pytest.raises(UsageError, match="another one was begun"):
        next(ended)
    assert (loader.epoch, loader.sampler.position) == (1, 0)
    begun = iter(loader)
    loader.load_state_dict({**loader.state_dict(), "position": 2})
    with pytest.raises(UsageError, match="load_state_dict was called"):
        next(begun)
    assert sum(len(b) for b in loader) == 2


def test_another_default_device_changes_nothing():
    def batches():
        loader = DataLoader(Numbers(9), 2, sampler=ResumableSampler(9), collate_fn=list)
        return list(ResumableLoader(loader))

    expected = batches()
    torch.set_default_device("meta")
    try:
        assert batches() == expected
    finally:
        torch.set_default_device(None)


def test_a_length_may_be_any_whole_number():
    assert sorted(ResumableSampler(np.int64(5))) == [0, 1, 2, 3, 4]


def test_batches_of_any_size_and_batch_samplers():
    class Growing(BatchSampler):
        def __iter__(self):
            batch, size = [], 1
            for index in self.sampler:
                batch.append(index)
                if len(batch) == size:
                    yield batch
                    batch, size = [], size + 1
            if batch:
                yield batch

    def make():
        batches = Growing(ResumableSampler(23), 1, False)
        return ResumableLoader(DataLoader(Numbers(23), batch_sampler=batches))

    assert run(make, [(2, 1), (3, 0)], epochs=1) == [Counter(range(23))]
    plain = BatchSampler(ResumableSampler(23), 4, False)
    assert run(lambda: ResumableLoader(DataLoader(Numbers(23), batch_sampler=plain)), [(2, 2)], 1)[0].total() == 23


def test_a_batch_sampler_that_reorders_is_refused():
    class Sorted(BatchSampler):
        def __iter__(self):
            indices = sorted(self.sampler)
            yield from (indices[i : i + 4] for i in range(0, len(indices), 4))

    loader = ResumableLoader(DataLoader(Numbers(20), batch_sampler=Sorted(ResumableSampler(20), 4, False)))
    with pytest.raises(UsageError, match="changed the order"):
        next(iter(loader))


def test_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert len(list(loader_of(9, 2))) == 5
    assert torch.equal(torch.get_rng_state(), before)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: DataLoader(Numbers(8), 2, shuffle=True), "RandomSampler"),
        (lambda: DataLoader(Numbers(8), 2), r"SequentialSampler.*shuffle=False"),
        (lambda: DataLoader(Numbers(8), batch_sampler=BatchSampler(RandomSampler(Numbers(8)), 2, False)), "order"),
        (lambda: DataLoader(Numbers(8), None, sampler=ResumableSampler(8)), "batch_size=None"),
        (lambda: DataLoader(Stream(), 2), "IterableDataset"),
        (lambda: DataLoader(Numbers(9), 2, sampler=ResumableSampler(8)), "has 9"),
        (lambda: [1, 2], "takes a DataLoader"),
    ],
)
def test_what_cannot_be_resumed_is_refused(make, reason):
    with pytest.raises(UsageError, match=reason):
        ResumableLoader(make())


def test_positions_in_other_data_are_refused():
    state = loader_of(8, 2, seed=1).state_dict()
    for other in (loader_of(9, 2, seed=1), loader_of(8, 2, seed=2), loader_of(8, 2, seed=1, shuffle=False)):
        with pytest.raises(UsageError, match=r"was .* and is"):
            other.load_state_dict(state)
    with pytest.raises(UsageError, match="no position"):
        loader_of(8, 2, seed=1).load_state_dict({**state, "epoch": -1})


@pytest.mark.parametrize("options", [{"rank": 2, "world": 2}, {"rank": 0}, {"rank": 0, "world": 0}])
def test_ranks_out_of_range(options):
    with pytest.raises(OptionError):
        ResumableSampler(8, **options)
    with pytest.raises(OptionError):
        ResumableSampler(0)


def test_a_sampler_alone_is_no_position():
    """It is ahead of the loop by what was prefetched."""
    with pytest.raises(UsageError, match="ResumableLoader"):
        TrainingState(loader=ResumableSampler(8))


def test_the_position_rides_in_a_checkpoint(tmp_path):
    used = []
    for _ in range(3):
        loader = loader_of(10, 2, seed=3)
        state = TrainingState(loader=loader, rng=False)
        with pccheck.Checkpointer(tmp_path) as ck:
            step = state.restore(ck)
            for batch in loader:
                used += batch.tolist()
                ck.save(step, state)
                if step % 2:
                    break
                step += 1
    assert sorted(used) == list(range(10))


needs_torchdata = pytest.mark.skipif(
    importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed (it is in the dev extra)"
)


@needs_torchdata
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_of_torchdata_goes_on(tmp_path, workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    used = Counter()
    for _ in range(3):
        loader = StatefulDataLoader(Numbers(24), 3, shuffle=True, num_workers=workers)
        state = TrainingState(loader=loader)
        with pccheck.Checkpointer(tmp_path) as ck:
            step = state.restore(ck)
            for batch in loader:
                used.update(batch.tolist())
                ck.save(step, state)
                step += 1
                if step % 3 == 0:
                    break
    assert sorted(used.elements()) == list(range(24))


class Told(Numbers):
    """Gives the epoch that its sampler tells."""

    def __init__(self, n):
        super().__init__(n)
        self.order = ResumableSampler(n)

    def __getitem__(self, index):
        return self.order.epoch


@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataset_that_asks_the_sampler_for_its_epoch_is_told_where_workers_would_not_know(persistent):
    data = Told(4)
    described = DataLoader(data, 4, sampler=data.order, num_workers=1, persistent_workers=persistent)
    if persistent:
        with pytest.warns(RuntimeWarning, match="leave persistent_workers=True out") as told:
            loader = ResumableLoader(described)
        assert told[0].filename == __file__
    else:
        loader = ResumableLoader(described)
    epochs = [batch.tolist() for _, batch in zip(range(3), loader.endless(), strict=False)]
    assert epochs == [[0 if persistent else epoch] * 4 for epoch in range(3)]


@needs_torchdata
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_state_that_cannot_be_stored_is_refused_with_its_path(tmp_path):
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Odd(Numbers):
        def state_dict(self):
            return {"cursor": object()}

        def load_state_dict(self, state):
            raise AssertionError(state)

    loader = StatefulDataLoader(Odd(6), 2)
    batches = iter(loader)
    next(batches)
    with pccheck.Checkpointer(tmp_path) as ck, pytest.raises(UnsupportedLeafError, match=r"loader/.*cursor"):
        ck.save(0, TrainingState(loader=loader))
