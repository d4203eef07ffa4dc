"""Host memory in equal slots: the cpu tier's store, and the staging of what leaves the pool."""

from __future__ import annotations

import logging
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)

# Segments are read and written past the page cache, which wants page-aligned memory.
ALIGNMENT_BYTES = 4096

# A power of two, since torch rounds pinned pieces up to one; large enough that a piece's edge,
# where a run of slots ends, is rare.
PIECE_BYTES = 2**30


class ArenaError(RuntimeError):
    """Not even one piece could be had; the message names the option and its size."""


def map_memory(num_bytes: int) -> memoryview:
    """Return private zeroed memory; pages that nobody touches cost nothing.

    Raises:
        OSError: If the system has none.
    """
    return memoryview(mmap.mmap(-1, num_bytes))


def pin_memory(num_bytes: int) -> memoryview:
    """Return page-locked memory, which the device copies from and to by itself.

    Raises:
        RuntimeError: If the system or the driver refuses.
    """
    import torch

    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data


def slot_bytes(block_bytes: int) -> int:
    """Return the distance between the slots of blocks: whole pages."""
    return -(-block_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """Slots of ``block_bytes`` usable bytes each, page-aligned, in a few large pieces.

    Attributes:
        num_slots: As many as could be had, at most what was asked for.
        block_bytes: Usable bytes of a slot.
    """

    def __init__(
        self, num_slots: int, block_bytes: int, pieces: list[memoryview], piece_slots: int
    ) -> None:
        """Use ``allocate_arena``."""
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._stride = slot_bytes(block_bytes)
        self._pieces = pieces
        self._piece_slots = piece_slots

    def view(self, slot: int) -> memoryview:
        """Return the memory of one slot; whoever owns the slot may write it."""
        piece, at = divmod(slot, self._piece_slots)
        start = at * self._stride
        return self._pieces[piece][start : start + self.block_bytes]


def allocate_arena(
    num_bytes: int,
    block_bytes: int,
    *,
    option: str,
    allocators: tuple[Callable[[int], memoryview], ...] = (map_memory,),
    piece_bytes: int = PIECE_BYTES,
) -> Arena:
    """Get memory for as many slots as fit ``num_bytes``.

    The first allocator that gives one piece gives them all; where it stops giving, the arena ends.
    An allocator that gives none is passed over. What is smaller or otherwise than asked is said in
    one line.

    Args:
        num_bytes: Hard bound.
        block_bytes: Usable bytes of a slot.
        option: What the operator set, for messages.
        allocators: Tried in order; they raise MemoryError, OSError or RuntimeError.
        piece_bytes: Taken at once; never less than one slot.

    Raises:
        ArenaError: If there is not room for one block, or no allocator gives any.
    """
    stride = slot_bytes(block_bytes)
    wanted = num_bytes // stride
    if not wanted:
        raise ArenaError(f"{option} {num_bytes}: less than one block of {stride} bytes")
    piece_slots = max(1, min(wanted, piece_bytes // stride))
    refusal: Exception | None = None
    for allocate in allocators:
        pieces, failed = _take(allocate, wanted, piece_slots, stride)
        if pieces:
            num_slots = min(wanted, len(pieces) * piece_slots)
            if failed or refusal:
                _log.warning(
                    "%s %d: got %d bytes from %s (%s)",
                    option,
                    num_bytes,
                    num_slots * stride,
                    allocate.__name__,
                    failed or refusal,
                )
            return Arena(num_slots, block_bytes, pieces, piece_slots)
        refusal = failed
    raise ArenaError(f"{option} {num_bytes}: no memory ({refusal})")


def _take(
    allocate: Callable[[int], memoryview], wanted: int, piece_slots: int, stride: int
) -> tuple[list[memoryview], Exception | None]:
    """Return the pieces that could be had, and what stopped the rest."""
    pieces: list[memoryview] = []
    while len(pieces) * piece_slots < wanted:
        slots = min(piece_slots, wanted - len(pieces) * piece_slots)
        try:
            pieces.append(allocate(slots * stride))
        except (MemoryError, OSError, RuntimeError) as error:
            return pieces, error
    return pieces, None
