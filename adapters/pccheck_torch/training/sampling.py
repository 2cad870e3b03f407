"""Data that goes on where a checkpoint was: each sample exactly once per epoch (imports torch and pccheck.errors).

What counts is what the training loop was given, not what workers fetched ahead. The order of an epoch is worked out
from (seed, epoch), so that a position is two numbers, whatever the number of workers, and the batch size may change.
"""

from __future__ import annotations

import operator
import warnings
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sized
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from pccheck.errors import OptionError, UsageError

_BLOCK = 1 << 16  # indices made into Python numbers at once
_STALE = (
    "the dataset holds the ResumableSampler, of which persistent workers keep a copy of the epoch in which they began: "
    "its `epoch` is wrong there in all later ones; leave persistent_workers=True out"
)


@final
class ResumableSampler(Sampler[int]):
    """Gives the indices of one rank, from `position` in `epoch` on; for a DataLoader inside a `ResumableLoader`.

    The order of an epoch is a permutation by a generator of (seed, epoch), or 0, 1, 2, ... Of what is left of it, rank
    r of w takes every w-th index from the r-th on: after equally many samples on each rank, the ranks together have
    seen a prefix of it, which is why a run may go on with another number of ranks.

    Args:
        data: the dataset, or its length, at least 1.
        shuffle: permute; False = in order.
        seed: of the permutations; the same on all ranks.
        rank, world: of this process; None = of the default process group, or alone where there is none.
        drop_last: where the ranks cannot get equally many samples, drop the last of the epoch (fewer than `world`);
            False = repeat its first ones. Alone, neither is ever needed.

    Raises:
        OptionError: an argument is out of its range.
    """

    def __init__(
        self,
        data: int | Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self.length = len(data) if isinstance(data, Sized) else operator.index(data)
        self.shuffle, self.seed, self.drop_last = bool(shuffle), operator.index(seed), bool(drop_last)
        self.rank, self.world = _ranks(rank, world)
        if self.length < 1:
            raise OptionError("data", self.length, "of at least 1 sample")
        self.epoch = 0
        self.position = 0  # samples of this epoch that all ranks together were given

    def __len__(self) -> int:
        """Give how many samples of a whole epoch are this rank's."""
        return self.length // self.world if self.drop_last else -(-self.length // self.world)

    def __iter__(self) -> Iterator[int]:
        """Give this rank's indices in what is left of the epoch."""
        mine = self._rest()[self.rank :: self.world]
        return (index for block in torch.split(mine, _BLOCK) for index in block.tolist())

    def _rest(self) -> Tensor:
        """Give what is left of the epoch's order, a multiple of the number of ranks."""
        order = torch.arange(self.length, device="cpu")  # whatever torch.set_default_device() says
        if self.shuffle:
            generator = torch.Generator().manual_seed(_mixed(self.seed, self.epoch))
            order = torch.randperm(self.length, generator=generator, device="cpu")
        rest = order[min(self.position, self.length) :]
        over = len(rest) % self.world
        if over and self.drop_last:
            return rest[:-over]
        if over:
            again = order.repeat(-(-self.world // self.length))  # fewer samples than ranks: several times
            return torch.cat([rest, again[: self.world - over]])
        return rest

    def __repr__(self) -> str:
        return (
            f"<ResumableSampler of {self.length} samples: epoch {self.epoch}, position {self.position}, "
            f"rank {self.rank} of {self.world}>"
        )


@final
class ResumableLoader:
    """Iterates a DataLoader, counts what it hands out, and goes on there after a restart. One thread at a time.

        loader = ResumableLoader(DataLoader(dataset, batch_size=8, sampler=ResumableSampler(dataset), num_workers=2))
        state = TrainingState(model=model, optimizer=optimizer, loader=loader)
        start = state.restore(ck)
        for epoch in range(loader.epoch, epochs):
            for batch in loader:                       # after a restart, first what was left of that epoch
                ...
                ck.save(step, state)                   # after the step: the batch counts as used

    A batch counts as soon as the loop has it. An iteration that was left before the end of the epoch is gone on with by
    the next one. Making iterators draws nothing from torch's global generator, as a plain DataLoader does, so that a
    resumed run can be the same to the bit; what workers draw depends on when they were started.

    Args:
        loader: a DataLoader over a map-style dataset, with a `ResumableSampler` as its `sampler`, or within its
            `batch_sampler` (whose batches must follow that order; their sizes may vary). It is taken as a description:
            this class makes its own from it.

    Warns where the dataset holds the sampler, for its `epoch`, and `persistent_workers` would not see it change.

    Raises:
        UsageError: it is no such DataLoader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.sampler = _sampler_of(loader)
        told = getattr(loader.dataset, "__dict__", {}).values()
        if loader.persistent_workers and any(value is self.sampler for value in told):
            warnings.warn(_STALE, RuntimeWarning, stacklevel=2)
        assert loader.batch_sampler is not None
        self._batches = _Batches(loader.batch_sampler, self.sampler)
        self._generator = torch.Generator() if loader.generator is None else None
        self._loader = _remade(loader, self._batches, self._generator)
        self._iteration = 0

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or will be next, from 0."""
        return self.sampler.epoch

    @property
    def dataset(self) -> Any:
        """The dataset."""
        return self._loader.dataset

    def __len__(self) -> int:
        """Give the number of batches in a whole epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """Iterate what is left of the epoch; the end of that is the beginning of the next epoch."""
        self._iteration += 1
        if self._generator is not None:  # of the seeds of the workers
            self._generator.manual_seed(_mixed(self.sampler.seed, self.epoch, self.sampler.position))
        with torch.device("cpu"):  # on another default device torch's iterators refuse a generator of the CPU
            batches = iter(self._loader)
        return self._iterate(batches, self._batches.sizes, self._iteration)

    def endless(self) -> Iterator[Any]:
        """Give the batches of one epoch after the other, from where it is.

            for step, batch in zip(range(start, steps), loader.endless()):  # range first: no batch too many

        Raises UsageError where a whole epoch has no batch: with drop_last=True and fewer samples than a batch.
        """
        while True:
            whole, empty = not self.sampler.position, True
            for batch in self:
                empty = False
                yield batch
            if whole and empty:  # what was left of an epoch may be nothing; a whole one would be nothing for ever
                raise UsageError(
                    f"an epoch of {self.sampler.length} samples on {self.sampler.world} rank(s) gives no batch; give "
                    "the DataLoader a smaller batch_size, or leave drop_last=True out"
                )

    def _iterate(self, batches: Iterator[Any], sizes: deque[int], iteration: int) -> Iterator[Any]:
        sampler = self.sampler
        while True:
            if iteration != self._iteration:  # before a batch is taken: persistent workers serve the newer one by now
                raise UsageError(
                    "this iteration of a ResumableLoader is over, since another one was begun or load_state_dict was "
                    "called: samples would be seen twice; go on with the newer one"
                )
            try:
                batch = next(batches)
            except StopIteration:
                break
            sampler.position += sizes.popleft() * sampler.world
            yield batch
        sampler.epoch, sampler.position = sampler.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Give the position: what was handed out is behind it."""
        sampler = self.sampler
        position = min(sampler.position, sampler.length)
        return {"epoch": sampler.epoch, "position": position, **self._order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after what was handed out there; an iteration under way is over.

        Raises UsageError, and changes nothing, where the order would be another one: other data, seed or shuffling.
        """
        differences = [
            f"{name} was {state.get(name)!r} and is {value!r}"
            for name, value in self._order().items()
            if state.get(name) != value
        ]
        epoch, position = state.get("epoch"), state.get("position")
        if differences or type(epoch) is not int or type(position) is not int or epoch < 0 or position < 0:
            raise UsageError(
                f"the position in the data cannot be gone on with ({'; '.join(differences) or 'it is no position'}): "
                "give the ResumableSampler what it had; or begin an epoch anew: leave loader= out of the "
                "TrainingState, and restore with partial=True"
            )
        self._iteration += 1
        self.sampler.epoch, self.sampler.position = epoch, position

    def _order(self) -> dict[str, Any]:
        return {"length": self.sampler.length, "shuffle": self.sampler.shuffle, "seed": self.sampler.seed}

    def __repr__(self) -> str:
        return f"<ResumableLoader: {self.sampler!r}>"


@final
class _Batches:
    """Gives another batch sampler's batches, and notes their sizes in the order in which they will be handed out."""

    def __init__(self, batches: Any, sampler: ResumableSampler) -> None:
        self._batches, self._sampler = batches, sampler
        self.sizes: deque[int] = deque()  # of what was fetched ahead

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        self.sizes = deque()
        return self._noted(self.sizes)

    def _noted(self, sizes: deque[int]) -> Iterator[list[int]]:
        order = iter(self._sampler)
        for batch in self._batches:
            indices = list(batch)
            if indices != list(islice(order, len(indices))):
                raise UsageError(
                    f"a {type(self._batches).__qualname__} changed the order of its ResumableSampler, so that no "
                    "position could say which samples were used; give the order by a dataset or by another seed"
                )
            sizes.append(len(indices))
            yield indices


def _sampler_of(loader: object) -> ResumableSampler:
    if not isinstance(loader, DataLoader):
        raise UsageError(f"a ResumableLoader takes a DataLoader, not a {type(loader).__qualname__}")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError("an IterableDataset has no positions; use torchdata's StatefulDataLoader as it is")
    if loader.batch_sampler is None:
        raise UsageError("the DataLoader makes no batches (batch_size=None); give it a batch_size or a batch_sampler")
    if not getattr(loader, "in_order", True):
        raise UsageError("with in_order=False nobody knows which samples were used; leave it out")
    found = [loader.sampler, *vars(loader.batch_sampler).values()]
    sampler = next((s for s in found if isinstance(s, ResumableSampler)), None)
    if sampler is None:
        raise UsageError(_no_position(loader))
    if isinstance(loader.dataset, Sized) and len(loader.dataset) != sampler.length:
        raise UsageError(f"the sampler is of {sampler.length} samples, the dataset has {len(loader.dataset)}")
    return sampler


def _no_position(loader: DataLoader[Any]) -> str:
    """Tell why the order of a DataLoader cannot be gone on with, and what gives the same order and can."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    sampler = loader.sampler if inner is None else inner
    why = f"the DataLoader draws from a {type(sampler).__qualname__}, whose order cannot be gone on with: "
    if type(sampler) is SequentialSampler:
        return why + "give it sampler=pccheck_torch.ResumableSampler(dataset, shuffle=False)"
    if type(sampler) is RandomSampler:
        return why + "leave shuffle= out and give it sampler=pccheck_torch.ResumableSampler(dataset)"
    return why + (
        "put the selection into the dataset (torch.utils.data.Subset), and give the DataLoader a "
        "pccheck_torch.ResumableSampler of that"
    )


def _remade(loader: DataLoader[Any], batches: _Batches, generator: torch.Generator | None) -> DataLoader[Any]:
    """Make the same DataLoader again around other batches."""
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "persistent_workers")
    }
    if loader.num_workers:
        options |= {"multiprocessing_context": loader.multiprocessing_context}
        options |= {"prefetch_factor": loader.prefetch_factor}
    if getattr(loader, "pin_memory_device", ""):
        options["pin_memory_device"] = loader.pin_memory_device
    generator = loader.generator if generator is None else generator
    return DataLoader(loader.dataset, batch_sampler=batches, generator=generator, **options)


def _ranks(rank: int | None, world: int | None) -> tuple[int, int]:
    if (rank is None) != (world is None):
        raise OptionError("rank, world", (rank, world), "given both or neither")
    if rank is None or world is None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return 0, 1
    if world < 1 or not 0 <= rank < world:
        raise OptionError("rank, world", (rank, world), "a world of at least 1, and a rank below it")
    return rank, world


def _mixed(*numbers: int) -> int:
    """Give a seed of all these numbers; torch's CPU generator takes no more than 32 bits of a seed."""
    return zlib.crc32(",".join(map(str, numbers)).encode())
