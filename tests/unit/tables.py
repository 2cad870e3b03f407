"""Finds the kinds of pccheck, and one more."""

from __future__ import annotations

from pccheck.state.kinds import kind_of
from pccheck.state.shards import Shard, ShardKind


class TableWith:
    """The kinds of pccheck, and this one, which is asked first."""

    def __init__(self, kind):
        self.kind, self.shards = kind, ShardKind(kind)

    def __call__(self, value):
        if isinstance(value, Shard) and self.kind.recognises(value.array):
            return self.shards
        return self.kind if self.kind.recognises(value) else kind_of(value)

    def named(self, name):
        return self.kind if name == self.kind.name else kind_of.named(name)

    def like(self, value):
        spec = self.kind.like(value)
        return kind_of.like(value) if spec is None else (self.kind, spec)

    def container(self, value):
        return kind_of.container(value)
