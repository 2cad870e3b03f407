"""What Orbax's args ask for, in one form; what is not honoured is refused by name (may import pccheck, Orbax)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import jax
import orbax.checkpoint as ocp

from pccheck.errors import UsageError
from pccheck_orbax.metadata import TreeMetadata
from pccheck_orbax.shardings import KEY


@final
@dataclass(frozen=True, kw_only=True)
class Request:
    """What to restore.

    Args:
        item: the target; None = everything, as it was saved.
        restore_args: a tree of `ocp.RestoreArgs` beside the item, or beside what is stored.
        structure_only: of the item's leaves only where they are to be placed counts: they come back as they were saved.
        partial: only what the item has.
        strict: False = arrays of another shape are cut or padded with zeros.
        fallback_sharding: for JAX arrays whose place nothing else says.
    """

    item: Any = None
    restore_args: Any = None
    structure_only: bool = False
    partial: bool = False
    strict: bool = True
    fallback_sharding: Any = None


def request_of(args: Any) -> Request:
    """Give what args for restoring ask for; None = everything.

    Raises:
        UsageError: they ask for what pccheck does not do.
    """
    if args is None:
        return Request()
    if isinstance(args, ocp.args.PyTreeRestore):
        for name in ("transforms", "legacy_transform_fn"):
            if getattr(args, name, None) is not None:
                raise UsageError(
                    f"PyTreeRestore({name}=...) is not supported by pccheck: restore the tree as it was saved and "
                    "change it then, or leave leaves out by ocp.PLACEHOLDER or partial_restore=True"
                )
        return Request(
            item=_tree_of(args.item), restore_args=_tree_of(args.restore_args), structure_only=True,
            partial=getattr(args, "partial_restore", False),
        )  # fmt: skip
    if isinstance(args, ocp.args.StandardRestore):
        if getattr(args, "support_layout", False):
            raise UsageError("StandardRestore(support_layout=True) is not supported by pccheck: leave it out")
        return Request(
            item=_tree_of(args.item), strict=args.strict, fallback_sharding=getattr(args, "fallback_sharding", None)
        )
    return Request(item=_tree_of(args.item), partial=getattr(args, "partial", False))


def state_of(args: Any) -> Any:
    """Give the state that args for saving hold, with the dtypes that their `save_args` ask for.

    Raises:
        UsageError: there is no item.
    """
    item, save_args = args.item, getattr(args, "save_args", None)
    if item is None:
        raise UsageError("there is no item to save: it is None")
    if save_args is None:
        return item

    def cast(leaf: Any, how: Any) -> Any:
        dtype = getattr(how, "dtype", None)
        return leaf if dtype is None or not hasattr(leaf, "astype") else leaf.astype(dtype)

    # None stands for "no SaveArgs", and is an empty node to JAX; beside a None of the item stands None, or SaveArgs.
    hows = jax.tree.leaves(save_args, is_leaf=lambda node: node is None or isinstance(node, ocp.SaveArgs))
    leaves, form = jax.tree.flatten(item, is_leaf=lambda node: node is None)
    if len(hows) != len(leaves):
        raise UsageError(f"save_args has {len(hows)} leaves for an item of {len(leaves)}")
    return jax.tree.unflatten(form, [cast(leaf, how) for leaf, how in zip(leaves, hows, strict=True)])


def beside(args: Any, label: str, step: int, shardings: dict[str, Any] | None) -> Mapping[str, Any] | None:
    """Give the small JSON that is saved with an item.

    Custom metadata, shardings, and the step's name if that is no number.
    """
    found: dict[str, Any] = {} if shardings is None else {KEY: shardings}
    if (custom := getattr(args, "custom_metadata", None)) is not None:
        found["custom_metadata"] = custom
    if label != str(step):
        found["step_name"] = label
    return found or None


def _tree_of(item: Any) -> Any:
    """Metadata that was handed out may be handed in."""
    if isinstance(item, TreeMetadata):
        return item.tree
    return item
