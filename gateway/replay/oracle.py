"""The oracle: any worker may use any block of one pooled cache for free. Nobody can build it.

It shows what is left to gain: the pool is as large as all workers' caches together, forgets the
least recently used block, and moves KV in no time. Requests go to the least estimated TTFT.
"""

from __future__ import annotations

from collections import OrderedDict
from math import ceil
from typing import TYPE_CHECKING

from gateway.replay import policies
from gateway.replay.fleet import Pull
from gateway.replay.peers import PeerRouter
from gateway.routing.cost import MEMORY_FILL, OUTPUT_ALLOWANCE_TOKENS, prefill_s
from prefix_index.blocks import usable_blocks
from prefix_index.index import Hit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from gateway.replay.fleet import Fleet, Placement
    from gateway.replay.kv_cache import Change
    from gateway.replay.peers import View
    from gateway.replay.shared_load import Hub
    from gateway.replay.traces import Request
    from prefix_index.blocks import BlockHash


class PooledCache:
    """Blocks that anybody computed; the least recently used are forgotten.

    Args:
        capacity_blocks: How many it keeps; 0 = all.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()

    def announce(self, holder: str, change: Change, now_s: float) -> None:
        """Take what a worker computed."""
        if change.stored and change.tier == "gpu":
            self._use(change.blocks)

    def match(self, blocks: Sequence[BlockHash]) -> int:
        """Return how many leading blocks are there, and use them."""
        pooled = self._blocks
        count = next((i for i, block in enumerate(blocks) if block not in pooled), len(blocks))
        self._use(blocks[:count])
        return count

    def _use(self, blocks: Sequence[BlockHash]) -> None:
        pooled = self._blocks
        for block in reversed(blocks):
            pooled[block] = None
            pooled.move_to_end(block)
        while self._capacity_blocks and len(pooled) > self._capacity_blocks:
            pooled.popitem(last=False)


class OracleRouter(PeerRouter):
    """Least estimated TTFT with the pooled hit on every worker.

    Args:
        fleet: The fleet.
        hub: What the gateways tell each other.
        rng: Draws ties.
        pool: The pooled cache.
    """

    def __init__(self, fleet: Fleet, hub: Hub, rng: Random, pool: PooledCache) -> None:
        super().__init__(fleet, self._least_ttft, hub, rng, books_blocks=True)
        self._pool = pool
        self._pooled_tokens = 0
        fleet.listen(pool.announce)

    def route(self, request: Request, gateway: int, now_s: float) -> Placement:
        """Choose, and hand over all pooled blocks at once."""
        size = self._fleet.model.block_tokens
        num_usable = usable_blocks(request.prompt_tokens, size)
        num_pooled = self._pool.match(request.blocks[:num_usable])
        self._pooled_tokens = num_pooled * size
        placement = super().route(request, gateway, now_s)
        placement.pull = Pull(None, num_pooled, is_free=True)
        return placement

    def _hits(self, request: Request, gateway: int, now_s: float) -> dict[str, Hit]:
        hit = Hit(gpu=self._pooled_tokens)
        return dict.fromkeys(self.books[gateway], hit)

    def _least_ttft(self, view: View) -> list[int]:
        """Wait, own prefill, shared decode steps, and the wait for memory that is not there."""
        model = view.fleet.model
        cost, tokens = model.cost, view.request.prompt_tokens
        uncached = max(1, tokens - self._pooled_tokens)
        own_s = prefill_s(cost, uncached, tokens)
        whole = len(view.request.blocks) * model.block_tokens
        costs = []
        for i, books in enumerate(view.books):
            progress_s = max(0.0, view.fleet.now_s - books.progress_at_s)
            queued = view.queued_tokens[i]
            steps = ceil((queued + uncached) / model.max_batched_tokens)
            decode_s = cost.context_s * books.context_tokens + cost.token_s * view.in_flight[i]
            new = whole - books.common_tokens(view.request.blocks)
            demand = view.active_tokens[i] + new + OUTPUT_ALLOWANCE_TOKENS
            missing = max(0.0, demand - MEMORY_FILL * model.gpu_tokens)
            costs.append(
                max(0.0, view.queued_s[i] - progress_s)
                + own_s
                + steps * (cost.step_s + decode_s)
                + cost.token_s * missing
            )
        return policies.least(costs)
