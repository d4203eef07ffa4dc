"""The cpu tier's bytes: a second arena in host memory, verified like every other tier."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.tiers.arena import Arena
    from runner.tiers.types import BlockRecord, Deliver, Outcome, Place


class HostStore:
    """Blocks in an arena's slots, each with its checksum; a ``BlockStore``.

    A slot is written by one thread while the books have it reserved, then read by any.

    Attributes:
        block_bytes: Of a block.
        num_slots: Hard bound of what it holds.
    """

    def __init__(self, arena: Arena, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.block_bytes = arena.block_bytes
        self.num_slots = arena.num_slots
        self._arena = arena
        self._clock = clock
        # What each slot holds and its xxh3; None: nothing that may be read.
        self._sealed: list[tuple[BlockRecord, int] | None] = [None] * arena.num_slots
        # Found by threads, for the engine's to forget.
        self._damaged: deque[Place] = deque()

    def target(self, slot: int) -> memoryview:
        """Return a reserved slot's memory to copy a block into; it holds nothing until sealed."""
        self._sealed[slot] = None
        return self._arena.view(slot)

    def seal(self, place: Place) -> None:
        """Take a slot's bytes for those of ``place``'s block."""
        self._sealed[place.slot] = (
            place.record,
            xxh3_64_intdigest(self._arena.view(place.slot)),
        )

    def view(self, slot: int) -> memoryview:
        """Return a sealed slot's memory for reading; valid while the slot is pinned."""
        return self._arena.view(slot).toreadonly()

    def copy_out(self, place: Place, target: memoryview) -> bool:
        """Copy a pinned block for another runner; any thread.

        Returns:
            False if ``target`` has not got what was stored: it is the copy that is verified.
        """
        sealed = self._sealed[place.slot]
        if sealed is None or not _is_same(sealed[0], place.record):
            return False
        target[:] = self._arena.view(place.slot)
        is_sound = xxh3_64_intdigest(target) == sealed[1]
        if not is_sound:
            self._damaged.append(place)
        return is_sound

    def drain_damaged(self) -> list[Place]:
        """Return the blocks that ``copy_out`` found damaged since the last call."""
        return [self._damaged.popleft() for _ in range(len(self._damaged))]

    def read(self, wanted: Sequence[Place], deliver: Deliver, deadline_s: float) -> Outcome:
        """See ``BlockStore.read``."""
        for index, place in enumerate(wanted):
            if self._clock() >= deadline_s:
                return "stopped"
            sealed = self._sealed[place.slot]
            if sealed is None or not _is_same(sealed[0], place.record):
                return "missing"
            view = self.view(place.slot)
            if xxh3_64_intdigest(view) != sealed[1]:
                return "damaged"
            if not deliver(index, view):
                return "stopped"
        return "done"

    def write(self, places: Sequence[Place], payloads: Sequence[memoryview]) -> list[bool]:
        """See ``BlockStore.write``."""
        for place, payload in zip(places, payloads, strict=True):
            self.target(place.slot)[:] = payload
            self.seal(place)
        return [True] * len(places)

    def invalidate(self, slots: Sequence[int]) -> None:
        """Forget what slots hold."""
        for slot in slots:
            self._sealed[slot] = None

    def close(self) -> None:
        """Let go of the memory's contents; the memory goes with the last view of it."""
        self._sealed = [None] * self.num_slots


def _is_same(held: BlockRecord, wanted: BlockRecord) -> bool:
    return held.key == wanted.key and held.tokens == wanted.tokens
