"""How much of a form of a request the workers hold, or would hold had it been sent before."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from gateway.routing.dispatch import MAX_INLINE_CHARS
from prefix_index.blocks import usable_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.routing.dispatch import Inbound, Plan
    from gateway.routing.pool import Pool
    from prefix_index.blocks import BlockHash

# Blocks of rewritten prompts that were never forwarded: 1M tokens at 16 a block, about 8 MB.
_MAX_BLOCKS = 65_536


class Imagined:
    """Blocks that workers would hold if rewritten forms had been sent; bounded, oldest first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()

    def num_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks are among them."""
        for i, block in enumerate(hashes):
            if block not in self._blocks:
                return i
        return len(hashes)

    def add(self, hashes: Sequence[BlockHash]) -> None:
        """Add a prompt's blocks, the last ones as the oldest: they are the first to go."""
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > _MAX_BLOCKS:
            self._blocks.popitem(last=False)


def held_tokens(pool: Pool, plan: Plan) -> int | None:
    """Return the most prompt tokens that any worker holds; None where that cannot be told."""
    if pool.index is None or plan.hashes is None:
        return None
    return max((hit.total for hit in pool.index.match(plan.hashes).values()), default=0)


def known_held_tokens(pool: Pool, inbound: Inbound) -> int | None:
    """Return how much is held of the form as sent, as far as its text is known here.

    Text that is new to this gateway was not sent to a worker either, so nothing is tokenized to
    find that it is not held.
    """
    if pool.index is None or pool.reader is None:
        return None
    try:
        draft = pool.reader.chat(
            inbound.body,
            adapter=pool.adapter_of(inbound.model),
            salt=inbound.cache_salt,
        )
        if draft.unknown_chars <= MAX_INLINE_CHARS:
            prompt = draft.complete()
            hashes = prompt.block_hashes[: usable_blocks(prompt.num_tokens, prompt.block_size)]
        else:
            hashes = draft.beginning().hashes
    except Exception:  # templates raise what they like
        return None
    return max((hit.total for hit in pool.index.match(hashes).values()), default=0)
