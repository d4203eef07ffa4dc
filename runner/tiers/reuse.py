"""How likely a block is asked for again, from those that were and those that were not."""

from __future__ import annotations

from collections import OrderedDict, deque
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
_MAX_KNOWN = 4096.0

# A block that nobody has asked for in so long counts as not reused, until somebody does. A new
# one says nothing yet: a working set that has gone round once looks like no reuse at all.
_FATE_S = 300.0

# Depths 0, 1-3, 4-15, 16-63, ... in one class each; the last is open.
_MAX_DEPTH_CLASS = 6

# One touch, two, more.
_MAX_TOUCHES = 3

_Class: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class _Counts:
    reused: float = 0.0
    unused: float = 0.0


@dataclass(slots=True)
class _Ghost:
    group: _Class
    is_unused: bool = False


@dataclass(slots=True)
class ReuseHistory:
    """Follows a bounded number of blocks, whether a tier took them or gave them up since.

    Owned by the engine thread. A block counts once its fate is known.
    """

    max_ghosts: int = MAX_GHOSTS
    _ghosts: OrderedDict[KvKey, _Ghost] = field(default_factory=OrderedDict)
    # In order of offering, until their time is over.
    _waiting: deque[tuple[float, KvKey, _Ghost]] = field(default_factory=deque)
    _counts: dict[_Class, _Counts] = field(default_factory=dict)

    def offered(self, key: KvKey, depth: int, touches: int, now_s: float) -> None:
        """Begin to follow a block that was offered for storing; again under its new class."""
        self._settle(now_s)
        group = _class_of(depth, touches)
        known = self._ghosts.get(key)
        if known is not None and known.group == group:
            return
        ghost = self._ghosts[key] = _Ghost(group)
        self._ghosts.move_to_end(key)
        self._waiting.append((now_s, key, ghost))
        while len(self._ghosts) > self.max_ghosts:
            self._count_unused(self._ghosts.popitem(last=False)[1])

    def touched(self, keys: Iterable[KvKey]) -> None:
        """Note that a request asked for blocks; counts once for each time it was offered."""
        for key in keys:
            ghost = self._ghosts.pop(key, None)
            if ghost is None:
                continue
            counts = self._of(ghost.group)
            counts.reused += 1.0
            if ghost.is_unused:
                counts.unused = max(0.0, counts.unused - 1.0)
            _fade(counts)

    def likelihood(self, depth: int, touches: int) -> float:
        """Return the share (0..1) of such blocks that are asked for again."""
        counts = self._counts.get(_class_of(depth, touches)) or _Counts()
        reused = counts.reused + _START_LIKELIHOOD * _START_WEIGHT
        return reused / (counts.reused + counts.unused + _START_WEIGHT)

    def clear(self) -> None:
        """Forget all blocks; the shares stay."""
        self._ghosts.clear()
        self._waiting.clear()

    def _settle(self, now_s: float) -> None:
        """Count what nobody has asked for in time."""
        waiting = self._waiting
        while waiting and (waiting[0][0] <= now_s - _FATE_S or len(waiting) > 2 * self.max_ghosts):
            _, key, ghost = waiting.popleft()
            if self._ghosts.get(key) is ghost:
                self._count_unused(ghost)

    def _count_unused(self, ghost: _Ghost) -> None:
        if not ghost.is_unused:
            ghost.is_unused = True
            counts = self._of(ghost.group)
            counts.unused += 1.0
            _fade(counts)

    def _of(self, group: _Class) -> _Counts:
        return self._counts.setdefault(group, _Counts())


def _fade(counts: _Counts) -> None:
    if counts.reused + counts.unused > _MAX_KNOWN:
        counts.reused /= 2
        counts.unused /= 2


def _class_of(depth: int, touches: int) -> _Class:
    return (
        min((depth.bit_length() + 1) // 2, _MAX_DEPTH_CLASS),
        min(max(touches, 1), _MAX_TOUCHES),
    )
