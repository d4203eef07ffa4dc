"""Requests whose KV is on its way from a lower tier into the pool.

A load holds its request's whole block table from the start: blocks that were hits, LOADING ones
that the transfer writes, and the rest, so that the request runs at once when the load ends. It
always ends with a ``LoadDone``; until then its blocks stay LOADING, even if nobody wants them any
more, since a transfer thread may be writing into them. Engine thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from runner.pool.states import require
from runner.sequence import LoadState
from runner.tiers.types import Committed, LoadQuery

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runner.pool.blocks import BlockPool
    from runner.sequence import Sequence
    from runner.tiers.interface import Tiers
    from runner.tiers.types import LoadDone, LoadPlan


@dataclass(slots=True)
class Load:
    """One load under way.

    Attributes:
        plan: What was started.
        blocks: The LOADING ones, in order.
        sequence: Who waits; None when nobody does any more.
    """

    plan: LoadPlan
    blocks: list[int]
    sequence: Sequence | None


class Loader:
    """Asks the tiers for waiting requests and keeps the loads under way.

    Attributes:
        sequences: Those whose load is under way, oldest load first.
    """

    def __init__(self, pool: BlockPool, tiers: Tiers) -> None:
        self.sequences: list[Sequence] = []
        self._pool = pool
        self._tiers = tiers
        self._loads: dict[int, Load] = {}
        self._offers: list[Committed] = []

    @property
    def blocks(self) -> list[int]:
        """Every LOADING block."""
        return [block for load in self._loads.values() for block in load.blocks]

    def ask(
        self,
        sequence: Sequence,
        first_block: int,
        max_blocks: int,
        waiting_tokens: int,
        now_s: float,
    ) -> LoadPlan | Literal["pending"] | None:
        """Ask the tiers what to load for a sequence; see ``LoadQuery``."""
        request = sequence.request
        query = LoadQuery(
            owner=sequence.owner,
            chain=sequence.chain,
            first_block=first_block,
            max_blocks=max_blocks,
            prompt_tokens=len(sequence.tokens),
            waiting_tokens=waiting_tokens,
            source=request.source,
        )
        answer = self._tiers.consider(query, now_s)
        if answer == "pending":
            sequence.load_state = LoadState.PENDING
        elif answer is None:
            sequence.load_state = LoadState.SETTLED
        else:
            fits = 0 < answer.num_blocks <= max_blocks - first_block
            require(fits and answer.query is query, f"a load plan that nobody asked for: {answer}")
        return answer

    def settle(self, sequence: Sequence) -> None:
        """Let a sequence run without asking further; a look-up under way is forgotten."""
        if sequence.load_state is LoadState.PENDING:
            self._tiers.cancel(sequence.owner)
        sequence.load_state = LoadState.SETTLED

    def begin(self, sequence: Sequence, plan: LoadPlan, hits: list[int], num_rest: int) -> bool:
        """Reserve a sequence's blocks and start its load; False if there is no room after all.

        Args:
            sequence: Whose.
            plan: As just returned for it.
            hits: Blocks of its prompt that the pool holds.
            num_rest: Blocks to compute after the loaded ones.
        """
        pool = self._pool
        pool.take(hits)
        blocks = pool.reserve_loading(plan.num_blocks)
        rest = pool.allocate(num_rest) if blocks is not None else None
        if blocks is None or rest is None:
            pool.release_loading(blocks or ())
            pool.release(hits, sequence.chain)
            self._tiers.cancel(sequence.owner)
            return False
        sequence.blocks = hits + rest
        sequence.num_committed = len(hits)
        sequence.num_computed = len(hits) * pool.block_size
        sequence.load_state = LoadState.LOADING
        self._loads[plan.id] = Load(plan, blocks, sequence)
        self.sequences.append(sequence)
        self._tiers.start(plan, blocks)
        return True

    def end(self, done: LoadDone) -> Load | None:
        """Take note that a load has ended: what was loaded becomes findable.

        Returns:
            The load, its sequence ready to run; None if nobody waited for it.
        """
        load = self._loads.pop(done.plan_id)
        sequence, pool = load.sequence, self._pool
        if sequence is None:
            pool.release_loading(load.blocks)
            return None
        first = load.plan.query.first_block
        last = first + done.num_blocks
        pool.take_loaded(load.blocks)
        sequence.blocks[first:first] = load.blocks
        given = pool.commit(sequence.blocks, sequence.chain, first, last)
        sequence.num_committed = last
        sequence.num_computed = last * pool.block_size
        sequence.load_state = LoadState.SETTLED
        self.sequences.remove(sequence)
        self.offer(sequence, given)
        return load

    def drop(self, sequence: Sequence) -> None:
        """Give up a sequence's load or look-up; blocks being written stay LOADING until its end."""
        state, sequence.load_state = sequence.load_state, LoadState.UNASKED
        if state is LoadState.LOADING:
            self.sequences.remove(sequence)
            for load in self._loads.values():
                if load.sequence is sequence:
                    load.sequence = None
        # Last, so that a sequence is given up even where the tiers fail.
        if state in (LoadState.PENDING, LoadState.LOADING):
            self._tiers.cancel(sequence.owner)

    def note_admission(self, sequence: Sequence, now_s: float) -> None:
        """Tell the tiers what a sequence that has just got its blocks uses of the pool."""
        if sequence.cached_tokens is None:
            num_keys = len(sequence.request.prompt_ids) // self._pool.block_size
            self._tiers.touch(sequence.chain.keys[:num_keys], now_s)
        self.offer(sequence, range(sequence.num_committed))

    def offer(self, sequence: Sequence, indexes: Iterable[int]) -> None:
        """Note findable blocks of a sequence for ``flush_offers``."""
        pool, cap = self._pool, sequence.request.max_offload_tokens
        for index in indexes:
            can_store = cap is None or (index + 1) * pool.block_size <= cap
            block = sequence.blocks[index]
            record = pool.record_of(block)
            self._offers.append(Committed(record, block, sequence.chain, can_store))

    def flush_offers(self, now_s: float) -> None:
        """Offer the noted blocks to the tiers; before any of them may be evicted."""
        if self._offers:
            offers, self._offers = self._offers, []
            self._tiers.offer(offers, now_s)

    def forget_all(self, sequences: Iterable[Sequence]) -> None:
        """Give up everything for all sequences; loads under way end as they would have."""
        self._offers.clear()
        for sequence in sequences:
            self.drop(sequence)
