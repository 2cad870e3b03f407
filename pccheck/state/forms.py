"""Which Python types a skeleton can hold, told by class alone (floor 0: imports nothing).

By class, and exactly: a bool is an int, an IntEnum is one too, and a subclass of dict may keep its values elsewhere.
"""

from __future__ import annotations

import collections
import dataclasses
import keyword
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TypeAlias, cast

SMALL_BYTES = 4096  # longer str (characters) and bytes go to the payload
MAX_FIELDS = 1000  # of a namedtuple or dataclass

Form: TypeAlias = Literal[
    "value", "text", "dict", "OrderedDict", "defaultdict", "Counter", "list", "tuple", "namedtuple", "dataclass"
]
EXACT: dict[type, Form] = {
    **dict.fromkeys((type(None), bool, int, float, complex), "value"),
    **dict.fromkeys((str, bytes), "text"),
    dict: "dict",
    collections.OrderedDict: "OrderedDict",
    collections.defaultdict: "defaultdict",
    collections.Counter: "Counter",
    list: "list",
    tuple: "tuple",
}
BUILTIN = (bool, int, float, complex, str, bytes, bytearray, dict, list, tuple, set, frozenset)


def _form_of(cls: type[Any]) -> Form | None:
    """Tell how values of exactly this class are stored; None for leaves and for what cannot be stored."""
    if cls in EXACT:
        return EXACT[cls]
    if issubclass(cls, tuple):
        fields = getattr(cls, "_fields", None)
        named = isinstance(fields, tuple) and all(type(f) is str for f in fields)
        return "namedtuple" if named else None
    if dataclasses.is_dataclass(cls) and not issubclass(cls, BUILTIN):
        return "dataclass"
    return None


def _field_names(cls: type[Any]) -> tuple[str, ...]:
    """Give the fields of a namedtuple or dataclass that are stored."""
    if issubclass(cls, tuple):
        return tuple(cls._fields)  # type: ignore[attr-defined]
    return tuple(f.name for f in dataclasses.fields(cls))


form_of = cast("Callable[[type[Any]], Form | None]", lru_cache(maxsize=4096)(_form_of))
field_names = cast("Callable[[type[Any]], tuple[str, ...]]", lru_cache(maxsize=4096)(_field_names))


@lru_cache(maxsize=4096)
def tuple_class(name: str, fields: tuple[str, ...]) -> Any:
    """Give the namedtuple class of this name and these fields, the same for the same; None where they are not legal."""
    legal = len(fields) <= MAX_FIELDS and all(map(_is_identifier, (name, *fields)))
    if not legal or any(f.startswith("_") for f in fields):
        return None
    return collections.namedtuple(name, fields, module=__name__)


def _is_identifier(name: str) -> bool:
    """Identifiers that Python would fold into another spelling are left out: two of them could become one."""
    return (
        len(name) <= 200
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and unicodedata.normalize("NFKC", name) == name
    )
