"""What a container is that the core does not know: the protocol that adapters implement (floor 0: imports nothing)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class ContainerKind(ABC):
    """Containers of one framework that the core does not know, such as registered pytree nodes.

    An adapter package offers one under the entry point group "pccheck.containers", named after a top-level module: it
    is asked only in processes in which that module is loaded, and never of Python's own containers and namedtuples.
    Implementations are final, stateless and thread-safe.
    """

    @abstractmethod
    def recognises(self, value: object) -> bool:
        """Tell whether it is such a container; the same for all values of a class."""

    @abstractmethod
    def open(self, value: Any) -> tuple[tuple[Any, ...], Sequence[Any]]:
        """Give the keys (what keys of a dict may be) and the children, in an order that is the same each time.

        What is not among the children, as static fields are not, is not stored: `like` brings it.
        """

    @abstractmethod
    def close(self, like: Any, children: Sequence[Any]) -> Any:
        """Give a container like this one, with these children in the order of its own."""
