"""What a training state holds besides: plain values, and random generators (imports torch, numpy)."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from pccheck.leaves import StoredLeaf
from pccheck_torch.training.sections import KIND, Problems, Section, grouped, told

GENERATORS = (torch.Generator, np.random.Generator)


@final
class Plain(Section):
    """A tree of plain values and arrays, that lies in a mapping under its name.

    Containers that can change are filled in place, and so are arrays of the same shape and dtype: whoever holds them
    sees what was restored. Anything else is put into the mapping anew.
    """

    def __init__(self, holder: MutableMapping[str, Any], name: str) -> None:
        self._holder, self._name = holder, name

    def tree(self) -> Any:
        """Give what is to be saved, as it is now."""
        return self._holder[self._name]

    def check(self, stored: Any, path: str, found: Problems) -> None:
        """Report an array of another shape or dtype; below containers, all may change but the fields of a class."""
        live = self.tree()
        if isinstance(live, (Tensor, np.ndarray)):
            found.leaf(path, live, stored)
        elif isinstance(live, torch.Size):
            if not isinstance(stored, (torch.Size, StoredLeaf)):
                found.differs(path, "type", told(live), told(stored))
        elif isinstance(live, (Mapping, list, tuple)) and not _has_fields(live) and type(live) is not type(stored):
            found.differs(path, "type", told(live), told(stored))
        else:
            _check_fields(live, stored, path, found)

    def load(self, stored: Any) -> None:
        """Load what fits, in place."""
        found = Problems()
        self.check(stored, "", found)
        if not found.found:
            self._holder[self._name] = refilled(self.tree(), stored)


def refilled(live: Any, stored: Any) -> Any:
    """Give what is to stand where `live` stood: itself, filled, where it can take what is stored."""
    if isinstance(live, Tensor) and isinstance(stored, Tensor):
        if live.shape == stored.shape and live.dtype == stored.dtype:
            KIND.assign(live, stored.detach())
            return live
        return stored.clone()
    if isinstance(live, np.ndarray) and isinstance(stored, np.ndarray):
        if live.shape == stored.shape and live.dtype == stored.dtype and live.flags.writeable:
            np.copyto(live, stored)
            return live
        return stored.copy()
    if isinstance(live, MutableMapping) and isinstance(stored, Mapping):
        filled = {key: refilled(live.get(key), value) for key, value in stored.items()}
        live.clear()
        live.update(filled)
        return live
    if type(live) is list and type(stored) is list:
        lives = live + [None] * (len(stored) - len(live))
        live[:] = [refilled(mine, value) for mine, value in zip(lives, stored, strict=False)]
        return live
    if _has_fields(live):
        return _with_fields(live, {name: refilled(getattr(live, name, None), v) for name, v in _fields(stored).items()})
    if type(live) is tuple and type(stored) is tuple and len(live) == len(stored):
        return tuple(map(refilled, live, stored))
    return stored


# Restored is a namedtuple of the same names, or a dict where these are none: nothing is imported from a file.


def _has_fields(value: object) -> bool:
    return (isinstance(value, tuple) and hasattr(value, "_fields")) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _fields(value: Any) -> dict[str, Any]:
    """Give the fields of a namedtuple or dataclass, live or restored; nothing of anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return dict(zip(getattr(value, "_fields", ()), value, strict=False))
    return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)} if _has_fields(value) else {}


def _check_fields(live: Any, stored: Any, path: str, found: Problems) -> None:
    """Report a live namedtuple or dataclass, at any depth, for which something else is stored."""
    if _has_fields(live):
        mine, theirs = _fields(live), _fields(stored)
        if not (_has_fields(stored) or isinstance(stored, Mapping)) or mine.keys() != theirs.keys():
            has = f" with {', '.join(map(str, theirs))}" if theirs else ""
            found.differs(path, "type", f"{told(live)} with {', '.join(mine)}", f"{told(stored)}{has}")
            return
        pairs = [(name, value, theirs[name]) for name, value in mine.items()]
    elif isinstance(live, Mapping) and isinstance(stored, Mapping):
        pairs = [(name, value, stored[name]) for name, value in live.items() if name in stored]
    elif isinstance(live, (list, tuple)) and isinstance(stored, (list, tuple)):
        pairs = [(str(i), *both) for i, both in enumerate(zip(live, stored, strict=False))]
    else:
        return
    for name, value, other in pairs:
        _check_fields(value, other, f"{path}/{name}", found)


def _with_fields(live: Any, fields: Mapping[str, Any]) -> Any:
    """Give a namedtuple or dataclass with these fields: itself, where it can change."""
    if isinstance(live, tuple):
        return tuple.__new__(type(live), [fields[name] for name in live._fields])  # type: ignore[attr-defined]
    made = copy.copy(live) if live.__dataclass_params__.frozen else live
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


@final
class Extras(Section):
    """Whatever a dict of the user's holds now, each thing a section: what is added, replaced or deleted there is seen.

    Args:
        holder: the dict.
        make: gives the section of the thing of a name in it.
    """

    def __init__(
        self, holder: MutableMapping[str, Any], make: Callable[[MutableMapping[str, Any], str], Section]
    ) -> None:
        self._holder, self._make = holder, make
        self._made: dict[str, tuple[Any, Section]] = {}

    def _group(self) -> Section:
        sections: dict[str, Section] = {}
        kept: dict[str, tuple[Any, Section]] = {}
        for name, value in self._holder.items():
            thing, section = self._made.get(name, (None, None))
            if section is None or thing is not value:
                section = self._make(self._holder, name)
            if not isinstance(section, Plain):  # which remembers nothing
                kept[name] = value, section
            sections[name] = section
        self._made = kept
        return grouped(sections, lambda section: section)

    def tree(self) -> Any:
        """Give what is to be saved, as it is now."""
        return self._group().tree()

    def check(self, stored: Any, path: str, found: Problems) -> None:
        """Report what would keep it from being loaded."""
        self._group().check(stored, path, found)

    def asked(self, stored: Any) -> Any:
        """Ask for what each section asks for."""
        return self._group().asked(stored)

    def load(self, stored: Any) -> None:
        """Load what fits, in place."""
        self._group().load(stored)

    def own(self) -> Iterable[str]:
        """Give what each thing has of its own."""
        return self._group().own()


@final
class Generator(Section):
    """A random generator of torch or NumPy that somebody made."""

    def __init__(self, generator: torch.Generator | np.random.Generator) -> None:
        self._generator = generator

    def tree(self) -> Any:
        """Give what is to be saved, as it is now."""
        if isinstance(self._generator, torch.Generator):
            return self._generator.get_state()
        return self._generator.bit_generator.state

    def check(self, stored: Any, path: str, found: Problems) -> None:
        """Report what would keep it from being loaded."""
        live = self.tree()
        if isinstance(live, Tensor):
            found.leaf(path, live, stored)
        elif not isinstance(stored, Mapping) or stored.get("bit_generator") != live["bit_generator"]:
            kind = stored.get("bit_generator") if isinstance(stored, Mapping) else told(stored)
            found.differs(path, "type", live["bit_generator"], kind)

    def load(self, stored: Any) -> None:
        """Load what fits, in place."""
        found = Problems()
        self.check(stored, "", found)
        if found.found:
            return
        if isinstance(self._generator, torch.Generator):
            self._generator.set_state(stored.clone())
        else:
            self._generator.bit_generator.state = stored

    def own(self) -> Iterable[str]:
        """All of it: each rank draws numbers of its own."""
        return ("",)


@final
class Randomness(Section):
    """The generators that everything draws from: of Python, NumPy, torch, and each CUDA device in use.

    CUDA is not woken by looking. A checkpoint from another number of devices loads into those that are in both.
    """

    def tree(self) -> Any:
        """Give what is to be saved, as it is now."""
        version, words, gauss = random.getstate()
        found: dict[str, Any] = {
            "python": (version, np.array(words, np.uint32), gauss),  # 625 numbers in the tree cost 0.5 ms (measured)
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found["cuda"] = torch.cuda.get_rng_state_all()
        return found

    def check(self, stored: Any, path: str, found: Problems) -> None:
        """Report what would keep it from being loaded."""
        for name in ("python", "numpy", "torch"):
            if not isinstance(stored, Mapping):
                found.differs(path, "type", "dict", told(stored))
                return
            if name not in stored:
                found.missing(f"{path}/{name}", "generator")

    def load(self, stored: Any) -> None:
        """Load what fits, in place."""
        if not isinstance(stored, Mapping):
            return
        if "python" in stored:
            version, words, gauss = stored["python"]
            random.setstate((version, tuple(map(int, words)), gauss))
        if "numpy" in stored:
            np.random.set_state(stored["numpy"])
        if "torch" in stored:
            torch.set_rng_state(stored["torch"].clone())
        if torch.cuda.is_available():
            for device, state in zip(range(torch.cuda.device_count()), stored.get("cuda", ()), strict=False):
                torch.cuda.set_rng_state(state.clone(), device)
