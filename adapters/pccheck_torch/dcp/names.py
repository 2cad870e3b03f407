"""How DCP names what is in a state, and where that is (imports torch).

DCP joins the keys that lead to a value with dots ("optimizer.state.0.exp_avg") and takes the value out of dicts, and
out of lists that hold dicts or tensors; a tuple, and a list of plain values, is one value. pccheck keeps the keys
themselves, so that `{"a.b": x}` and `{"a": {"b": y}}`, or 0 and "0", are two places there and the same name here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from pccheck_torch.outlines import Keys


class Leaf(NamedTuple):
    """One value, as DCP takes a state apart.

    Args:
        keys: keys of dicts and indices of lists that lead to it, as they are.
        mapping: the same as DCP has them: keys of dicts as text.
        value: what is there.
    """

    keys: Keys
    mapping: tuple[str | int, ...]
    value: Any

    @property
    def fqn(self) -> str:
        """DCP's name of it."""
        return ".".join(map(str, self.mapping))


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def flat(state: Any, is_tensor: Callable[[object], bool] = _is_tensor) -> Iterator[Leaf]:
    """Give the values of a state in order, as DCP's flatten_state_dict does, which cannot tell some keys apart."""
    yield from _below(state, (), (), is_tensor)


def _below(
    value: Any, keys: Keys, mapping: tuple[str | int, ...], is_tensor: Callable[[object], bool]
) -> Iterator[Leaf]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _below(child, (*keys, key), (*mapping, str(key)), is_tensor)
    elif isinstance(value, list) and not _is_one_value(value, is_tensor):
        for index, child in enumerate(value):
            yield from _below(child, (*keys, index), (*mapping, index), is_tensor)
    else:
        yield Leaf(keys, mapping, value)


def _is_one_value(value: list[Any], is_tensor: Callable[[object], bool]) -> bool:
    for entry in value:
        if is_tensor(entry) or isinstance(entry, Mapping):
            return False
        if isinstance(entry, list) and not _is_one_value(entry, is_tensor):
            return False
    return True


def nested(values: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """Put values together again at the places that their mappings say."""
    root: dict[str, Any] = {}
    for mapping, value in values.items():
        put(root, mapping, value)
    return root


def put(root: Any, mapping: tuple[str | int, ...], value: Any) -> None:
    """Set the value at a place, and make the dicts and lists that lead to it where they are not there."""
    for part, following in pairwise(mapping):
        root = _step(root, part, {} if isinstance(following, str) else [])
    _make_room(root, mapping[-1])
    root[mapping[-1]] = value


def _step(here: Any, part: str | int, empty: Any) -> Any:
    if isinstance(here, dict):
        return here.setdefault(part, empty)
    _make_room(here, part)
    if here[part] is None:
        here[part] = empty
    return here[part]


def _make_room(here: Any, part: str | int) -> None:
    if isinstance(here, list):
        here.extend([None] * (int(part) + 1 - len(here)))
