"""What `item_metadata` gives of an item: its tree with descriptions in place of leaves (may import pccheck, Orbax)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Self, final

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from pccheck.leaves import StoredLeaf
from pccheck_orbax.paths import Path, plain
from pccheck_orbax.shardings import saved_shardings


@final
@dataclasses.dataclass(repr=False, eq=False)
class StoredArray(ocp.metadata.ArrayMetadata):
    """An array, as Orbax describes one; in a target it asks for the array as it was saved.

    Args:
        given: the shape, dtype and sharding that it was given out with.
    """

    given: tuple[Any, ...] = ()

    def is_as_given(self) -> bool:
        """Tell whether nothing was changed since."""
        return self.given == (self.shape, self.dtype, self.sharding)


@final
@jax.tree_util.register_pytree_with_keys_class
class TreeMetadata:
    """The tree of an item, as Orbax's class of this name: a pytree that may be used as a target to restore.

    Args:
        tree: plain containers with `ocp.metadata` descriptions in them.
        custom_metadata: what was saved beside the item.
    """

    def __init__(self, tree: Any, custom_metadata: Any = None) -> None:
        self._tree, self._custom_metadata = tree, custom_metadata

    @property
    def tree(self) -> Any:
        """The plain tree."""
        return self._tree

    @property
    def custom_metadata(self) -> Any:
        """What was saved beside the item."""
        return self._custom_metadata

    @property
    def use_zarr3(self) -> bool:
        """False: nothing is stored by Zarr."""
        return False

    @classmethod
    def build(cls, tree: Any, *, custom_metadata: Any = None, use_zarr3: bool = False) -> Self:
        """Give the metadata of a tree."""
        return cls(tree, custom_metadata)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        """Give the children of the tree's root with their keys, and what makes it again."""
        tree = self._tree
        if isinstance(tree, dict):
            children = [(DictKey(key), value) for key, value in tree.items()]
            return children, (dict, tuple(tree), self._custom_metadata)
        if isinstance(tree, (list, tuple)):
            return [(SequenceKey(i), value) for i, value in enumerate(tree)], (type(tree), None, self._custom_metadata)
        return [(GetAttrKey("tree"), tree)], (None, None, self._custom_metadata)

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """Give the children of the tree's root, and what makes it again."""
        children, made_by = self.tree_flatten_with_keys()
        return [value for _, value in children], made_by

    @classmethod
    def tree_unflatten(cls, made_by: Any, children: Any) -> Self:
        """Give the metadata of the tree with these children at its root."""
        form, keys, custom_metadata = made_by
        if form is dict:
            return cls(dict(zip(keys, children, strict=True)), custom_metadata)
        return cls(form(children) if form is not None else next(iter(children)), custom_metadata)

    def __getitem__(self, key: Any) -> Any:
        return self._tree[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._tree

    def __len__(self) -> int:
        return len(self._tree)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tree)

    def get(self, key: str, default: Any = None) -> Any:
        """Give the value of a key at the root, or the default."""
        return self._tree.get(key, default)

    def keys(self) -> Any:
        """Give the keys at the root."""
        return self._tree.keys()

    def values(self) -> Any:
        """Give the values at the root."""
        return self._tree.values()

    def items(self) -> Any:
        """Give the keys and values at the root."""
        return self._tree.items()

    def __repr__(self) -> str:
        return f"TreeMetadata(tree={self._tree!r}, custom_metadata={self._custom_metadata!r})"


def describe(tree: Any, folder: str, about: Mapping[str, Any]) -> TreeMetadata:
    """Give the metadata of an item: an outline's tree with Orbax's descriptions in place of its leaves and values.

    Args:
        tree: with a StoredLeaf in place of each leaf.
        folder: where the item is.
        about: what was saved beside it.
    """
    directory = epath.Path(folder)
    shardings = saved_shardings(about, tree)

    def leaf(path: Path, value: Any) -> Any:
        name = ".".join(path)
        if isinstance(value, (str, bytes)) or (isinstance(value, StoredLeaf) and value.spec.kind in ("str", "bytes")):
            return ocp.metadata.StringMetadata(name=name, directory=directory)
        if isinstance(value, StoredLeaf):
            shape, dtype, sharding = given = (value.spec.shape, dtype_of(value), shardings.get(path))
            return StoredArray(name=name, directory=directory, shape=shape, dtype=dtype, sharding=sharding, given=given)
        if type(value) in _PYTHON:
            return ocp.metadata.ScalarMetadata(name=name, directory=directory, dtype=_PYTHON[type(value)])
        return value

    return TreeMetadata(plain(tree, leaf), about.get("custom_metadata"))


def dtype_of(stored: StoredLeaf) -> Any:
    """Give the NumPy dtype of a stored array, of keys that of their data; None where NumPy has none."""
    spec = stored.spec
    try:
        return jax.numpy.dtype(spec.extra.get("bits", spec.dtype))
    except TypeError:
        return None


_PYTHON = {
    bool: np.dtype(bool),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
}
