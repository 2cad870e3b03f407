"""What a skeleton is made of: one typed JSON node per container or small value (floor 0: imports errors).

None, True, False, strings and ints of up to 53 bits stand for themselves. Everything else is an object with the type
in "is". No float is ever a bare JSON number: readers and writers of JSON round them, and have no nan, inf or -0.0.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec

from pccheck.errors import FormatError

MAX_DEPTH = 100  # of containers; a level takes three of JSON, and Python's decoders give up at about 1,000
BARE_INT = 1 << 53  # ints beyond this do not survive readers that hold numbers as doubles
Factory: TypeAlias = Literal["int", "float", "complex", "bool", "str", "bytes", "list", "tuple", "dict"]
FACTORIES: dict[str, Callable[[], Any]] = {
    t.__name__: t for t in (int, float, complex, bool, str, bytes, list, tuple, dict)
}


class Leaf(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="leaf"):
    """An array or another leaf of the payload: `index` in the leaf table."""

    index: int


class Float(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="float"):
    """A float: the shortest decimal that gives the same bits, "inf", "nan", or "nan:" and its bits in 16 hex digits."""

    value: str


class Int(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="int"):
    """An int of more than 53 bits, in hex (decimal would be quadratic, and Python limits its digits)."""

    value: str


class Complex(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="complex"):
    """A complex number: two floats."""

    real: str
    imag: str


class Bytes(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="bytes"):
    """Bytes, as base64."""

    value: bytes


class Text(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="str"):
    """A string that is no Unicode text, as lone surrogates are not: base64 of its UTF-8 with surrogates let through."""

    value: bytes


class KeyTuple(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="tuple"):
    """A tuple that is a key of a dict."""

    items: list[Key]


Value: TypeAlias = bool | int | str | Float | Int | Complex | Bytes | Text | None
Key: TypeAlias = Value | KeyTuple
Items: TypeAlias = "list[tuple[Key, Node]]"


class Dict(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="dict"):
    """A dict: keys and values in its order."""

    items: Items


class Ordered(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="is", tag="OrderedDict"):
    """An OrderedDict, and the attributes it carries (a torch state_dict has `_metadata`)."""

    items: Items
    attributes: Items = []


class Default(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="defaultdict"):
    """A defaultdict, and its default_factory by name."""

    factory: Factory | None
    items: Items


class Counter(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="Counter"):
    """A collections.Counter."""

    items: Items


class List(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="list"):
    """A list."""

    items: list[Node]


class Tuple(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="tuple"):
    """A tuple."""

    items: list[Node]


class Named(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="namedtuple"):
    """A namedtuple by field; `name` is its class's name, which nothing is imported by."""

    name: str
    fields: list[str]
    items: list[Node]


class Data(msgspec.Struct, frozen=True, gc=False, tag_field="is", tag="dataclass"):
    """A dataclass by field; `name` is its class's name, which nothing is imported by."""

    name: str
    fields: list[str]
    items: list[Node]


Node: TypeAlias = Value | Leaf | Dict | Ordered | Default | Counter | List | Tuple | Named | Data


def encode_float(value: float) -> str:
    """Give a float as text from which the same 64 bits come back."""
    if value == value:
        return repr(value)
    bits = struct.pack(">d", value).hex()
    return "nan" if bits == "7ff8000000000000" else f"nan:{bits}"


def decode_float(text: str) -> float:
    """Give the float that `encode_float` wrote."""
    if re.fullmatch(r"nan:[0-9a-f]{16}", text):
        value: float = struct.unpack(">d", bytes.fromhex(text[4:]))[0]
        if value != value:
            return value
    elif re.fullmatch(r"nan|-?inf|-?[0-9.]{1,24}(e[+-]?[0-9]{1,3})?", text):
        try:
            return float(text)
        except ValueError:
            pass
    raise FormatError(f"{text[:40]!r} is no float")


def encode_value(value: object) -> Value:
    """Give the node of a None, bool, int, float, complex, str or bytes (these types exactly, no subclasses)."""
    if value is None or value is True or value is False:
        return value
    if type(value) is int:
        return value if -BARE_INT <= value <= BARE_INT else Int(hex(value))
    if type(value) is float:
        return Float(encode_float(value))
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return Text(value.encode("utf-8", "surrogatepass"))
        return value
    if type(value) is bytes:
        return Bytes(value)
    if type(value) is complex:
        return Complex(encode_float(value.real), encode_float(value.imag))
    raise TypeError(f"it is a {type(value).__name__}")


def decode_value(node: Value) -> Any:
    """Give the value of such a node; FormatError where it holds none."""
    if node is None or isinstance(node, (bool, int, str)):
        return node
    if isinstance(node, Float):
        return decode_float(node.value)
    if isinstance(node, Bytes):
        return node.value
    if isinstance(node, Complex):
        return complex(decode_float(node.real), decode_float(node.imag))
    try:
        if isinstance(node, Text):
            return node.value.decode("utf-8", "surrogatepass")
        return int(node.value, 16)
    except ValueError as error:
        raise FormatError(f"a value cannot be read: {error}") from None


def encode_key(key: object, depth: int = 0) -> Key:
    """Give the node of a key: a value, or a tuple of such; TypeError for any other."""
    if type(key) is tuple:
        if depth == MAX_DEPTH:
            raise TypeError(f"it is a tuple nested more than {MAX_DEPTH} deep")
        return KeyTuple([encode_key(k, depth + 1) for k in key])
    return encode_value(key)


def decode_key(node: Key, depth: int = 0) -> Any:
    """Give the key of such a node."""
    if isinstance(node, KeyTuple):
        if depth == MAX_DEPTH:
            raise FormatError(f"a key is a tuple nested more than {MAX_DEPTH} deep")
        return tuple([decode_key(k, depth + 1) for k in node.items])
    return decode_value(node)
