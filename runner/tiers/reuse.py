"""How likely a block is asked for again, from those that were and those that were not."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runner.kvkeys import KvKey

# About 100 bytes each; longer than any tier's content of a busy hour is not needed for a share.
MAX_GHOSTS = 65_536

# Before there is any experience three blocks of ten come back: what public traces show.
_START_LIKELIHOOD = 0.3
_START_WEIGHT = 20.0

# A class's counts are halved at this many, so that what is true now outweighs what was.
_MAX_OFFERED = 4096.0

# Depths 0, 1-3, 4-15, 16-63, ... in one class each; the last is open.
_MAX_DEPTH_CLASS = 6

# One touch, two, more.
_MAX_TOUCHES = 3

_Class: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class _Counts:
    offered: float = 0.0
    reused: float = 0.0


@dataclass(slots=True)
class ReuseHistory:
    """Follows a bounded number of blocks, whether a tier took them or gave them up since.

    Owned by the engine thread. A block that nobody asks for before it is forgotten here has not
    been reused.
    """

    max_ghosts: int = MAX_GHOSTS
    _ghosts: OrderedDict[KvKey, _Class] = field(default_factory=OrderedDict)
    _counts: dict[_Class, _Counts] = field(default_factory=dict)

    def offered(self, key: KvKey, depth: int, touches: int) -> None:
        """Begin to follow a block that was offered for storing; again under its new class."""
        group = _class_of(depth, touches)
        if self._ghosts.get(key) == group:
            return
        self._ghosts[key] = group
        self._ghosts.move_to_end(key)
        counts = self._counts.setdefault(group, _Counts())
        counts.offered += 1.0
        if counts.offered > _MAX_OFFERED:
            counts.offered /= 2
            counts.reused /= 2
        while len(self._ghosts) > self.max_ghosts:
            self._ghosts.popitem(last=False)

    def touched(self, keys: Iterable[KvKey]) -> None:
        """Note that a request asked for blocks; counts once for each time it was offered."""
        for key in keys:
            group = self._ghosts.pop(key, None)
            if group is not None:
                self._counts[group].reused += 1.0

    def likelihood(self, depth: int, touches: int) -> float:
        """Return the share (0..1) of such blocks that are asked for again."""
        counts = self._counts.get(_class_of(depth, touches)) or _Counts()
        reused = counts.reused + _START_LIKELIHOOD * _START_WEIGHT
        return min(1.0, reused / (counts.offered + _START_WEIGHT))

    def clear(self) -> None:
        """Forget all blocks; the shares stay."""
        self._ghosts.clear()


def _class_of(depth: int, touches: int) -> _Class:
    return (
        min((depth.bit_length() + 1) // 2, _MAX_DEPTH_CLASS),
        min(max(touches, 1), _MAX_TOUCHES),
    )
