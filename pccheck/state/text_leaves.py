"""Long strings and bytes as leaves: they go to the payload, not into the manifest (floor 1: imports floor 0)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from pccheck.errors import FormatError
from pccheck.leaves import HostBytes, LeafKind, LeafSpec


def _bytes_in_place(data: bytes, keep: object, alias: object = None) -> HostBytes:
    address = np.frombuffer(data, np.uint8).ctypes.data if data else 0
    return HostBytes(address=address, nbytes=len(data), keep=keep, alias=alias, stable=True)


@final
class BytesKind(LeafKind):
    """`bytes` longer than the tree holds. Stateless, thread-safe."""

    name = "bytes"

    def recognises(self, value: object) -> bool:
        """Tell whether it is bytes, exactly."""
        return type(value) is bytes

    def describe(self, value: Any) -> LeafSpec:
        """Give the spec."""
        return LeafSpec(kind=self.name, dtype="bytes", shape=(len(value),), nbytes=len(value))

    def fingerprint(self, values: Sequence[Any]) -> object:
        """Give the lengths."""
        return list(map(len, values))

    def host_bytes(self, value: Any) -> HostBytes:
        """Give the bytes in place: they cannot change."""
        return _bytes_in_place(value, value)

    def build(self, spec: LeafSpec, data: memoryview) -> Any:
        """Give the bytes."""
        return data.tobytes()

    def like(self, value: object) -> LeafSpec | None:
        """Give the spec of bytes."""
        return self.describe(value) if self.recognises(value) else None

    def convert(self, value: Any, like: Any) -> Any:
        """Give the value as it is."""
        return value


@final
class StrKind(LeafKind):
    """`str` longer than the tree holds, in UTF-8 with lone surrogates let through. Stateless, thread-safe."""

    name = "str"

    def recognises(self, value: object) -> bool:
        """Tell whether it is str, exactly."""
        return type(value) is str

    def describe(self, value: Any) -> LeafSpec:
        """Give the spec."""
        nbytes = len(_utf8(value))
        return LeafSpec(kind=self.name, dtype="utf-8", shape=(nbytes,), nbytes=nbytes)

    def fingerprint(self, values: Sequence[Any]) -> object:
        """Give the lengths in UTF-8."""
        return [len(_utf8(value)) for value in values]

    def host_bytes(self, value: Any) -> HostBytes:
        """Give a copy in UTF-8."""
        data = _utf8(value)
        return _bytes_in_place(data, data)

    def build(self, spec: LeafSpec, data: memoryview) -> Any:
        """Give the string."""
        try:
            return str(data, "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise FormatError(f"a string is not UTF-8: {error}") from None

    def like(self, value: object) -> LeafSpec | None:
        """Give the spec of a string."""
        return self.describe(value) if self.recognises(value) else None

    def convert(self, value: Any, like: Any) -> Any:
        """Give the value as it is."""
        return value


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
