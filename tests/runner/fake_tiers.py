"""A scripted stand-in for the tiers beneath a pool: deterministic, without threads.

It keeps the bytes of every block it is offered (unless told not to), and the test decides when a
look-up is answered, when a load ends, and how.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from runner.leases import LoanedBlock
from runner.pool.events import removed_event, stored_event
from runner.tiers.types import BlockRecord, Committed, LoadDone, LoadPlan, LoadQuery, TierStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prefix_index.events import Event
    from runner.kvkeys import KvKey
    from runner.leases import LeaseBook
    from runner.pool.blocks import BlockPool
    from runner.tiers.types import BlockMover, Outcome, TierName


@dataclass
class Running:
    """A load that has been started."""

    plan: LoadPlan
    blocks: list[int]
    is_cancelled: bool = False


@dataclass
class FakeTiers:
    """See the module; ``FakeTiers().build`` is what an engine takes.

    Attributes:
        tier: What it calls itself.
        stores: Whether it keeps what it is offered.
        is_pending: Answer every question with "pending".
        is_worth_it: Find loads worth their price.
        most_blocks: Plan no more than these.
        is_held: Loads end only when told (``finish``); else at the next poll.
        good_blocks: Blocks of the next loads that can be had; None for all.
        outcome: How a load ends that is short.
        writes_late: Bytes are written when a load ends, though it was cancelled long ago.
    """

    tier: TierName = "disk"
    stores: bool = True
    is_pending: bool = False
    is_worth_it: bool = True
    most_blocks: int = 1_000
    is_held: bool = False
    good_blocks: int | None = None
    outcome: Outcome = "failed"
    writes_late: bool = True
    wake_in_s: float | None = None
    held: dict[KvKey, tuple[BlockRecord, bytes]] = field(default_factory=dict)
    running: dict[int, Running] = field(default_factory=dict)
    queries: list[LoadQuery] = field(default_factory=list)
    offered: list[Committed] = field(default_factory=list)
    touched: list[list[KvKey]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    steps: list[tuple[int, int, int, float]] = field(default_factory=list)
    num_polls: int = 0
    num_clears: int = 0
    is_closed: bool = False
    has_work: bool = False
    peers: Any = None
    _failed: set[str] = field(default_factory=set)
    _events: list[Event] = field(default_factory=list)
    _ids: Any = field(default_factory=itertools.count)

    def build(
        self,
        *,
        pool: BlockPool,
        leases: LeaseBook,
        mover: BlockMover,
        wake: Callable[[], None],
        **others: Any,
    ) -> FakeTiers:
        self.pool, self.leases, self.mover, self.wake, self.others = (
            pool,
            leases,
            mover,
            wake,
            others,
        )
        return self

    def consider(self, query: LoadQuery, now_s: float) -> LoadPlan | Literal["pending"] | None:
        self.queries.append(query)
        if self.is_pending:
            return "pending"
        keys = query.chain.keys[query.first_block : query.max_blocks]
        found = len(list(itertools.takewhile(lambda key: key in self.held, keys)))
        found = min(found, self.most_blocks)
        if not found or not self.is_worth_it:
            return None
        return LoadPlan(next(self._ids), query, found, 0.001)

    def start(self, plan: LoadPlan, blocks: Sequence[int]) -> None:
        assert len(blocks) == plan.num_blocks
        self.running[plan.id] = Running(plan, list(blocks))

    def cancel(self, owner: str) -> None:
        self.cancelled.append(owner)
        for load in self.running.values():
            load.is_cancelled |= load.plan.query.owner == owner

    def finish(self) -> list[LoadDone]:
        """End every load under way."""
        done = [self._end(load) for load in self.running.values()]
        self.running.clear()
        return done

    def _end(self, load: Running) -> LoadDone:
        query, num_blocks = load.plan.query, load.plan.num_blocks
        if self.good_blocks is not None:
            num_blocks = min(num_blocks, self.good_blocks)
        keys = query.chain.keys[query.first_block :]
        for at, block in enumerate(load.blocks):
            # A transfer that goes wrong leaves rubbish behind.
            good = self.held[keys[at]][1] if at < num_blocks else b"\xff"
            if not load.is_cancelled or self.writes_late:
                payload = good * (self.mover.block_bytes // len(good))
                self.mover.copy_in(memoryview(payload), block)
        if load.is_cancelled:
            num_blocks = 0
        outcome: Outcome = "done" if num_blocks == load.plan.num_blocks else self.outcome
        if outcome != "done":
            self._failed.add(query.owner)
        return LoadDone(load.plan.id, num_blocks, {self.tier: num_blocks}, outcome, 0.001)

    def poll(self, now_s: float) -> list[LoadDone]:
        self.num_polls += 1
        return [] if self.is_held else self.finish()

    def offer(self, blocks: Sequence[Committed], now_s: float) -> None:
        for offered in blocks:
            assert self.pool.block_of(offered.record.key, offered.record.tokens) == offered.block
            self.offered.append(offered)
            if self.stores and offered.can_store and offered.record.key not in self.held:
                self.put(offered)

    def put(self, offered: Committed) -> None:
        payload = bytearray(self.mover.block_bytes)
        self.mover.copy_out(offered.block, memoryview(payload))
        self.held[offered.record.key] = offered.record, bytes(payload)
        at, size = offered.record.depth, self.pool.block_size
        self._events.append(
            stored_event(offered.chain, at, at + 1, block_size=size, medium="STORAGE")
        )

    def touch(self, keys: Sequence[KvKey], now_s: float) -> None:
        self.touched.append(list(keys))

    def observe_step(
        self, num_tokens: int, attended_tokens: int, decode_rows: int, elapsed_s: float
    ) -> None:
        self.steps.append((num_tokens, attended_tokens, decode_rows, elapsed_s))

    def why_missing(self, owner: str, key: KvKey) -> Literal["cold", "evicted", "gated", "failed"]:
        return "gated" if key in self.held else "cold"

    def pin_cpu(self, keys: Sequence[KvKey], owner: str, deadline_s: float) -> list[LoanedBlock]:
        found = itertools.takewhile(lambda key: key in self.held, keys)
        return [LoanedBlock(self.held[key][0], partial(self._copy_out, key)) for key in found]

    def _copy_out(self, key: KvKey, target: memoryview) -> bool:
        target[:] = self.held[key][1]
        return True

    def unpin_cpu(self, owner: str) -> None:
        pass

    def drain_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def stats(self) -> list[TierStats]:
        return [TierStats(self.tier, num_blocks=len(self.held))]

    def decisions(self) -> list[dict[str, object]]:
        return [{"owner": query.owner} for query in self.queries]

    def next_wake_s(self, now_s: float) -> float | None:
        return self.wake_in_s

    def clear(self) -> None:
        self.num_clears += 1
        self._events += [removed_event(key, medium="STORAGE") for key in self.held]
        self.held.clear()

    def close(self) -> None:
        self.is_closed = True
