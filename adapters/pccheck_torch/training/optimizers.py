"""An optimizer's state: live when saved, exact and in place when loaded (imports torch).

The tree holds the optimizer's own inner dicts, so that whatever a step puts into them is what is saved; only the outer
ones are made anew, when parameters or states were added, removed or replaced.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from pccheck import dlpack
from pccheck.leaves import StoredLeaf
from pccheck_torch.leaves.dense import DTYPES
from pccheck_torch.training.sections import KIND, Problems, Section, as_stored, facts_of, is_dtensor, names, told

_params = operator.itemgetter("params")
# What schedulers add to a group of options: there or not, it is the same optimizer.
_OF_SCHEDULERS = frozenset({"params", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
# State of torch's own optimizers that has the shape of its parameter.
_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")


@final
class OptimizerSection(Section):
    """The state of a `torch.optim.Optimizer`; parameters are known by their number, as in its `state_dict`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._params: list[Any] = []
        self._contents = b""
        self._numbers: list[list[int]] = []  # of the parameters of each group
        self._keys: list[Any] = []
        self._inner: list[Any] = []
        self._state: dict[Any, Any] | None = None

    def tree(self) -> Any:
        """Give what `state_dict()` would give now."""
        optimizer = self._optimizer
        if _has_its_own_way(optimizer):
            return optimizer.state_dict()
        if self._state is None or not self._holds():
            self._learn()
        groups = []
        for group, numbers in zip(optimizer.param_groups, self._numbers, strict=True):
            packed = {key: value for key, value in group.items() if key != "params"}
            packed["params"] = numbers
            groups.append(packed)
        return {"state": self._state, "param_groups": groups}

    def _holds(self) -> bool:
        groups, state = self._optimizer.param_groups, self._optimizer.state
        return (
            dlpack.contents(list(map(_params, groups))) == self._contents
            and len(state) == len(self._keys)
            and all(map(operator.is_, state.keys(), self._keys))
            and all(map(operator.is_, state.values(), self._inner))
        )

    def _learn(self) -> None:
        groups, state = self._optimizer.param_groups, self._optimizer.state
        self._params = list(chain.from_iterable(map(_params, groups)))  # alive: so that identity says it all
        self._contents = dlpack.contents(list(map(_params, groups)))
        packed = self._optimizer.state_dict()
        self._numbers = [group["params"] for group in packed["param_groups"]]
        self._state = packed["state"]
        self._keys, self._inner = list(state.keys()), list(state.values())

    # -- loading ------------------------------------------------------------------------------------------------------

    def check(self, stored: Any, path: str, found: Problems) -> None:
        """Report other groups, and state of live parameters that is missing, unexpected, or has another form.

        An optimizer that has not stepped yet has no state: then all that is stored is welcome.
        """
        if not isinstance(stored, Mapping) or not {"state", "param_groups"} <= stored.keys():
            found.differs(path, "type", "the state of an optimizer", told(stored))
            return
        groups = self._optimizer.param_groups
        sizes, stored_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in stored["param_groups"]]
        if len(sizes) != len(stored_sizes):
            found.differs(f"{path}/param_groups", "value", _count(sizes, "group"), _count(stored_sizes, "group"))
        elif sizes != stored_sizes:
            for i, (mine, theirs) in enumerate(zip(sizes, stored_sizes, strict=True)):
                if mine != theirs:
                    where = f"{path}/param_groups/{i}/params"
                    found.differs(where, "value", f"{mine} parameters", f"{theirs} parameters")
        else:
            for i, (group, other) in enumerate(zip(groups, stored["param_groups"], strict=True)):
                self._check_options(group, other, f"{path}/param_groups/{i}", found)
            for number, param in self._numbered(stored):
                self._check_inner(param, stored["state"].get(number), f"{path}/state/{number}", found)

    def _check_options(self, group: Mapping[str, Any], stored: Mapping[str, Any], path: str, found: Problems) -> None:
        """Report the options of another optimizer: each has some that the other lacks.

        Where only one side has more, it is of another release of torch, which fills in what is new.
        """
        mine, theirs = group.keys() - stored.keys() - _OF_SCHEDULERS, stored.keys() - group.keys() - _OF_SCHEDULERS
        if mine and theirs:
            here, there = (", ".join(sorted(map(str, options))) for options in (mine, theirs))
            found.differs(path, "type", f"{type(self._optimizer).__name__} with {here}", f"an optimizer with {there}")

    def _check_inner(self, param: Any, stored: Any, path: str, found: Problems) -> None:
        live = self._optimizer.state.get(param)
        if not live and isinstance(stored, Mapping) and type(self._optimizer).__module__.startswith("torch.optim."):
            for name, facts in ((n, facts_of(stored[n])) for n in _SHAPED if n in stored):
                if facts is not None and facts[1] != tuple(param.shape):
                    found.differs(f"{path}/{name}", "shape", f"{tuple(param.shape)}, as its parameter,", facts[1])
        if not live or not isinstance(stored, Mapping) or not isinstance(live, Mapping):
            return
        for name in names(path, live, stored, found):
            if isinstance(live[name], Tensor) and isinstance(stored[name], (Tensor, StoredLeaf)):
                found.leaf(f"{path}/{name}", live[name], stored[name])

    def asked(self, stored: Any) -> Any:
        """Ask for the part that is here of the state of a DTensor, for a fresh optimizer as well."""
        asked = as_stored(stored)
        if not isinstance(stored, Mapping) or not {"state", "param_groups"} <= stored.keys():
            return asked
        for number, param in self._numbered(stored):
            inner = stored["state"].get(number)
            if is_dtensor(param) and type(inner) is dict:
                for name, leaf in inner.items():
                    if isinstance(leaf, StoredLeaf) and leaf.spec.shape == tuple(param.shape):
                        asked["state"][number][name] = _alike(param, leaf)
        return asked

    def load(self, stored: Any) -> None:
        """Load through `load_state_dict`, with its hooks; into the tensors that are there, where they fit.

        torch would give float state the dtype of its parameter: what was stored in another comes back in that.
        """
        found = Problems()
        self.check(stored, "", found)
        if any(m.problem in ("type", "value") for m in found.found):
            return
        given: dict[Any, Any] = dict(stored["state"])
        numbered = list(self._numbered(stored))
        for number, param in numbered:
            if number in given:
                live, bad = self._optimizer.state.get(param) or {}, Problems()
                self._check_inner(param, given[number], "", bad)
                given[number] = live if bad.found else _given(given[number], live, param)
        groups = copy.deepcopy(stored["param_groups"])
        self._optimizer.load_state_dict({"state": given, "param_groups": groups})
        for number, param in numbered:
            if number in given and not _has_its_own_way(self._optimizer):
                _keep_dtypes(self._optimizer.state[param], given[number])

    def _numbered(self, stored: Any) -> Iterator[tuple[Any, Any]]:
        """Give the stored number of each parameter; they go by their order, as in torch."""
        stored_numbers = chain.from_iterable(map(_params, stored["param_groups"]))
        params = chain.from_iterable(map(_params, self._optimizer.param_groups))
        return zip(stored_numbers, params, strict=False)


def _has_its_own_way(optimizer: Any) -> bool:
    """Tell whether `state_dict()` gives more, or less, than the optimizer's state and groups."""
    return bool(
        type(optimizer).state_dict is not Optimizer.state_dict
        or "state_dict" in vars(optimizer)
        or optimizer._optimizer_state_dict_pre_hooks
        or optimizer._optimizer_state_dict_post_hooks
    )


def _count(things: list[Any], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _alike(param: Any, leaf: StoredLeaf) -> Any:
    """Ask for a leaf with the placements of a parameter."""
    from torch.distributed.tensor import DTensor

    if leaf.spec.kind != KIND.name or leaf.spec.dtype not in DTYPES:
        return leaf
    local = torch.empty_like(param._local_tensor, dtype=DTYPES[leaf.spec.dtype], device="meta")
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _given(stored: Any, live: Any, param: Tensor) -> Any:
    """Give what `load_state_dict` is to put there: live tensors, filled, or new ones that share nothing with a file."""
    if isinstance(stored, Tensor):
        value = stored.detach()
        if isinstance(live, Tensor) and live.shape == value.shape and live.dtype == value.dtype:
            KIND.assign(live, value)
            return live
        if is_dtensor(param) and value.shape == param.shape and not is_dtensor(value):
            made = torch.empty_like(param, dtype=value.dtype).detach()
            KIND.assign(made, value)
            return made
        return value.clone()
    if isinstance(stored, Mapping):
        known = live if isinstance(live, Mapping) else {}
        return {key: _given(value, known.get(key), param) for key, value in stored.items()}
    if type(stored) in (list, tuple):
        lives = live if isinstance(live, (list, tuple)) and len(live) == len(stored) else [None] * len(stored)
        return type(stored)(_given(value, mine, param) for value, mine in zip(stored, lives, strict=True))
    return stored


def _keep_dtypes(live: Any, given: Any) -> None:
    if not isinstance(live, dict) or not isinstance(given, Mapping):
        return
    for key, value in given.items():
        if isinstance(value, Tensor) and isinstance(live.get(key), Tensor) and live[key].dtype != value.dtype:
            live[key] = value.to(live[key].device)
        else:
            _keep_dtypes(live.get(key), value)
