"""How a place in a state is written down: readable, and never the same for two places (floor 0: imports nothing).

A path is the components from the root on, joined by "/"; the root itself is "". A component is
  * a str key as it is, with `~` written `~0`, `/` written `~1` (as in JSON Pointer, RFC 6901) and every character that
    does not print written `~{hex}`, so that splitting a path at "/" is always right;
  * the same in double quotes where it is empty, begins with one of `" < @`, or looks like a whole number;
  * a whole number for an int key and for an index of a list or tuple;
  * `<...>` for a key of another type, holding what `repr` gives of it, such as `<None>` or `<(1, 'a')>`;
  * `@name` for an attribute of an OrderedDict (torch keeps module versions in one).
So `{"model": {"layers.0": w}, "opt": {0: m, "0": n}}` has `model/layers.0`, `opt/0` and `opt/"0"`.
"""

from __future__ import annotations

import re
import struct

_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")


def component(key: object) -> str:
    """Give one component of a path for a key of a dict, or for an index."""
    if type(key) is str:
        if _PLAIN.fullmatch(key):
            return key
        text = _escaped(key)
        quote = not key or key[0] in '"<@' or _WHOLE_NUMBER.fullmatch(key)
        return f'"{text}"' if quote else text
    if type(key) is int and -(1 << 63) <= key < 1 << 63:
        return str(key)
    return f"<{_escaped(_written(key))}>"


def attribute(name: str) -> str:
    """Give one component of a path for an attribute."""
    return f"@{_escaped(name)}"


def join(parent: str, part: str, *, is_root: bool) -> str:
    """Give the path of a child; `is_root` tells whether `parent` is the root (whose path is "")."""
    return part if is_root else f"{parent}/{part}"


def _escaped(text: str) -> str:
    text = text.replace("~", "~0").replace("/", "~1")
    return text if text.isprintable() else "".join(c if c.isprintable() else f"~{{{ord(c):x}}}" for c in text)


def _written(key: object) -> str:
    """Like repr, but exact: an int has no limit of digits, and a nan shows its bits."""
    if type(key) is int:
        return str(key) if -(1 << 63) <= key < 1 << 63 else hex(key)
    if type(key) is float and key != key:
        return f"nan:{struct.pack('>d', key).hex()}"
    if type(key) is complex:
        return f"complex({_written(key.real)}, {_written(key.imag)})"
    if type(key) is tuple:
        inside = ", ".join(map(_written, key))
        return f"({inside},)" if len(key) == 1 else f"({inside})"
    return repr(key)
