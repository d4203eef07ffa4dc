"""Brings blocks up: weighs a load, starts it on the tiers' threads, and settles how it ended."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from runner.tiers.decision import Run
from runner.tiers.loads import Load, Piece
from runner.tiers.types import BlockRecord, LoadDone, LoadPlan, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.kvkeys import BlockChain, KvKey
    from runner.tiers.announce import Announcer
    from runner.tiers.decision import GainDecision
    from runner.tiers.finder import Finder
    from runner.tiers.gain import Gain
    from runner.tiers.loads import Read
    from runner.tiers.peer import PeerStore
    from runner.tiers.tier import Tier
    from runner.tiers.transfers import Job
    from runner.tiers.types import BlockMover, LoadQuery, Outcome, TierName, TransferObserver

_T = TypeVar("_T")

# Small enough that several threads share a load, large enough that a piece is one long read.
MIN_PIECE_BLOCKS = 8
MAX_PIECE_BLOCKS = 64

# A pin outlives its load's deadline by this much before it counts as forgotten.
LEASE_SLACK_S = 5.0

# Loads that are expected to take less are over before a copy by layer groups hides anything.
MIN_GROUPED_S = 0.002

# Remembered are the outcomes of as many requests as can be in an engine at a time.
MAX_OWNERS = 4096


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan handed out: what it came from."""

    plan: LoadPlan
    decision: GainDecision
    sources: list[TierName]


class Loader:
    """Loads of all requests; engine thread only."""

    def __init__(
        self,
        tiers: dict[TierName, Tier],
        finder: Finder,
        gain: Gain,
        mover: BlockMover,
        announcer: Announcer,
        *,
        block_size: int,
        peers: PeerStore | None,
        observer: TransferObserver,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """Use ``build_tiers``."""
        self._tiers = tiers
        self._finder = finder
        self._gain = gain
        self._mover = mover
        self._announcer = announcer
        self._block_size = block_size
        self._peers = peers
        self._peer_urls = frozenset(peers.figures()) if peers is not None else frozenset()
        self._observer = observer
        self._clock = clock
        self._wake = wake
        self._is_next_step_held = False
        self._num_plans = 0
        self._planned: dict[str, _Planned] = {}
        self._loads: dict[int, tuple[Load, GainDecision]] = {}
        # Keys that a request's load was to bring and did not.
        self._failed: OrderedDict[str, frozenset[KvKey]] = OrderedDict()
        # Requests whose refusal has been counted.
        self._gated: OrderedDict[str, None] = OrderedDict()
        # For each peer the block that was last wanted first from it: to try it with.
        self.wanted: dict[str, Place] = {}

    @property
    def num_open(self) -> int:
        """Loads under way."""
        return len(self._loads)

    def consider(self, query: LoadQuery, now_s: float) -> LoadPlan | None:
        """Return a load worth its price; see ``Tiers.consider``, look-ups being answered."""
        self._planned.pop(query.owner, None)
        if query.owner in self._failed:
            return None
        found = self._finder.find(query, now_s)
        num_lent = self._peer_blocks(query)
        if not found and not num_lent:
            return None
        decision = self._gain.decide(
            [Run(tier, len(list(blocks))) for tier, blocks in groupby(found)],
            query,
            queued={name: tier.reader.queued_bytes for name, tier in self._tiers.items()},
            now_s=now_s,
            peer_runs=[Run("peer", num_lent)] if num_lent else (),
        )
        if not decision.num_blocks:
            self._count_refusal(query.owner, found[0] if found else "peer")
            return None
        self._num_plans += 1
        expected_s = decision.restore_s + decision.management_s
        plan = LoadPlan(self._num_plans, query, decision.num_blocks, expected_s)
        sources = [run.tier for run in decision.runs for _ in range(run.num_blocks)]
        self._planned[query.owner] = _Planned(plan, decision, sources)
        return plan

    def start(self, plan: LoadPlan, blocks: Sequence[int]) -> None:
        """Begin a planned load; see ``Tiers.start``."""
        started_s = self._clock()
        planned = self._planned.pop(plan.query.owner)
        if planned.plan is not plan or len(blocks) != plan.num_blocks:
            raise ValueError(f"plan {plan.id} is not the latest of its request, or lacks blocks")
        deadline_s = started_s + planned.decision.patience_s
        load = Load(plan, self._pieces(planned, blocks), started_s, deadline_s)
        self._loads[plan.id] = load, planned.decision
        for piece in load.pieces:
            if piece.tier.leases is not None:
                slots = [place.slot for place in piece.places]
                piece.lease = piece.tier.leases.take(
                    plan.query.owner, "load", deadline_s + LEASE_SLACK_S, slots
                )
            piece.tier.reader.submit(self._job(load, piece, planned.decision))
        self._gain.pricing.overhead.observe_submit(
            len(planned.decision.runs), self._clock() - started_s
        )

    def _job(self, load: Load, piece: Piece, decision: GainDecision) -> Job:
        read = self._reader_of(piece.tier, decision.source)
        settle = partial(self._settle, load, piece, decision.source)
        groups = self._mover.groups
        if groups is None or piece.tier.name != "cpu" or not self._hides(load, decision):
            return piece.make_job(read, self._mover, load.deadline_s, settle)
        return piece.make_grouped_job(
            read, self._mover, groups, load.deadline_s, settle, self._wake
        )

    def _hides(self, load: Load, decision: GainDecision) -> bool:
        """Whether a load is long enough, and what is computed after it, to hide a part of it."""
        query = load.plan.query
        loaded_tokens = (query.first_block + load.plan.num_blocks) * self._block_size
        has_tail = query.prompt_tokens - loaded_tokens >= self._block_size
        return has_tail and decision.restore_s > MIN_GROUPED_S

    def was_step_held(self) -> bool:
        """Whether the step just computed waited for a load; asked once after each."""
        was_held, self._is_next_step_held = self._is_next_step_held, False
        return was_held

    def cancel(self, owner: str) -> None:
        """Forget a request; its load ends soon."""
        self._planned.pop(owner, None)
        self._failed.pop(owner, None)
        self._gated.pop(owner, None)
        for load, _ in self._loads.values():
            if load.plan.query.owner == owner:
                load.is_cancelled = True

    def cancel_all(self) -> None:
        """End every load soon."""
        for load, _ in self._loads.values():
            load.is_cancelled = True

    def poll(self, now_s: float) -> list[LoadDone]:
        """Return the loads that have ended; those past their deadline end now."""
        done = []
        for load, decision in list(self._loads.values()):
            if now_s >= load.deadline_s and not load.is_late and load.first_short is None:
                load.is_late = True
            if load.has_ended():
                done.append(self._finish(load, decision, now_s))
        return done

    def is_reading(self, tier: Tier) -> bool:
        """Whether a load waits for a tier."""
        return any(
            piece.tier is tier and piece.outcome is None
            for load, _ in self._loads.values()
            for piece in load.pieces
        )

    def has_failed(self, owner: str, key: KvKey) -> bool:
        """Whether a request's load was to bring a block and did not."""
        return key in self._failed.get(owner, ())

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline of a load; None without one."""
        return min((load.deadline_s for load, _ in self._loads.values()), default=None)

    def _peer_blocks(self, query: LoadQuery) -> int:
        """Blocks that the request's peer claims to have, from the first missing one on."""
        if query.source is None or query.source.url not in self._peer_urls:
            return 0
        claimed = min(query.source.tokens // self._block_size, query.max_blocks)
        if claimed <= query.first_block:
            return 0
        self.wanted[query.source.url] = Place(_record(query.chain, query.first_block))
        return claimed - query.first_block

    def _count_refusal(self, owner: str, tier: TierName) -> None:
        if owner not in self._gated:
            _remember(self._gated, owner, None)
            self._tiers[tier].counters.gated += 1

    def _pieces(self, planned: _Planned, blocks: Sequence[int]) -> list[Piece]:
        """Cut a plan where the tier changes, and so that a tier's threads can share it."""
        pieces: list[Piece] = []
        at = 0
        for name, group in groupby(planned.sources):
            tier = self._tiers[name]
            end = at + len(list(group))
            places = self._places(tier, planned.plan.query, at, end)
            size = _piece_blocks(tier, len(places))
            for start in range(0, len(places), size):
                part = places[start : start + size]
                first = at + start
                pieces.append(Piece(tier, part, blocks[first : first + len(part)]))
            if len(places) < end - at:
                break
            at = end
        return pieces

    def _places(self, tier: Tier, query: LoadQuery, start: int, end: int) -> list[Place]:
        """Where blocks are, up to the first that has gone since it was found."""
        chain, places = query.chain, []
        for at in range(query.first_block + start, query.first_block + end):
            key, tokens = chain.keys[at], chain.tokens[at]
            if tier.books is None:
                places.append(Place(_record(chain, at)))
                continue
            entry = tier.books.find(key, tokens)
            if entry is None:
                break
            places.append(Place(entry.record, entry.slot))
        return places

    def _reader_of(self, tier: Tier, source: str) -> Read:
        if tier.store is not None:
            return tier.store.read
        if self._peers is None:
            raise ValueError(f"tier {tier.name} has nothing to read from")
        return partial(self._peers.read_from, source)

    def _settle(self, load: Load, piece: Piece, source: str, job: Job) -> None:
        """Take note that a piece's thread is done with it, even if it was closed before."""
        tier, now_s = piece.tier, self._clock()
        outcome = piece.end()
        _release(piece)
        num_bytes = piece.num_done * self._mover.block_bytes
        transfers = self._gain.pricing.transfers
        if num_bytes:
            tier.moved("read", piece.num_done, num_bytes)
            transfers.observe(tier.name, "read", num_bytes, job.elapsed_s, source)
            self._observer.transferred(tier.name, "read", job.elapsed_s, num_bytes)
        elif load.is_late:
            # All of it takes at least as long as none came in: a store may read it in one go.
            all_bytes = len(piece.places) * self._mover.block_bytes
            transfers.observe(tier.name, "read", all_bytes, job.elapsed_s, source)
        if tier.name == "peer":
            return
        if outcome == "done":
            tier.reading.succeeded()
        elif outcome == "failed":
            tier.reading.failed(now_s, job.error)
        if outcome in ("damaged", "missing", "failed"):
            tier.lose(piece.places[piece.num_done], outcome, now_s)

    def _finish(self, load: Load, decision: GainDecision, now_s: float) -> LoadDone:
        query = load.plan.query
        del self._loads[load.plan.id]
        for piece in load.pieces:
            if piece.job is not None:
                piece.tier.reader.withdraw(piece.job)
            self._let_go(piece)
        blocks_by_tier = self._arrived(load)
        num_blocks = sum(blocks_by_tier.values())
        short = load.first_short
        outcome: Outcome = "missing" if short is None else short.outcome or "stopped"
        if num_blocks == load.plan.num_blocks:
            outcome = "done"
        elif not load.is_cancelled:
            (short.tier if short else self._tiers[decision.runs[0].tier]).counters.load_failed += 1
            lost = slice(query.first_block + num_blocks, query.first_block + load.plan.num_blocks)
            _remember(self._failed, query.owner, frozenset(query.chain.keys[lost]))
        done = LoadDone(load.plan.id, num_blocks, blocks_by_tier, outcome, now_s - load.started_s)
        # A load closed for being late was not given up by its request: the tier has lost.
        judged = replace(done, outcome="failed") if load.is_late and outcome != "done" else done
        self._gain.observe_load(decision, judged, now_s)
        ended_s = [piece.job.ended_s for piece in load.pieces if piece.job and piece.job.ended_s]
        if outcome == "done" and ended_s:
            self._gain.pricing.overhead.observe_turn(now_s - max(ended_s))
        return done

    def _let_go(self, piece: Piece) -> None:
        """End a piece's pin, unless the device still copies from there: then at its end."""
        if piece.outcome is not None:
            _release(piece)
            return
        under_way, groups = piece.under_way, self._mover.groups
        if under_way is not None and groups is not None:
            groups.announce(under_way)
            self._is_next_step_held = True

    def _arrived(self, load: Load) -> dict[TierName, int]:
        """Count the leading blocks that came, by tier, and announce what was not yet."""
        arrived: dict[TierName, int] = {}
        at = load.plan.query.first_block
        for piece in load.pieces:
            if piece.num_done:
                tier = piece.tier
                arrived[tier.name] = arrived.get(tier.name, 0) + piece.num_done
                tier.counters.hit_tokens += piece.num_done * self._block_size
                self._announce(piece, load.plan.query, at)
            at += piece.num_done
            if not piece.is_complete:
                break
        return arrived

    def _announce(self, piece: Piece, query: LoadQuery, first: int) -> None:
        """Announce blocks whose salt and adapter only the request that hit them could tell."""
        tier = piece.tier
        for at in range(first, first + piece.num_done):
            key, tokens = query.chain.keys[at], query.chain.tokens[at]
            if tier.index is not None:
                tier.index.announce(query.chain, at)
                continue
            entry = None if tier.books is None else tier.books.find(key, tokens)
            if entry is not None and not entry.is_announced:
                entry.is_announced = True
                self._announcer.stored(tier.name, query.chain, at)


def _release(piece: Piece) -> None:
    if piece.lease is not None and piece.tier.leases is not None:
        piece.tier.leases.release(piece.lease)


def _record(chain: BlockChain, index: int) -> BlockRecord:
    return BlockRecord(chain.keys[index], chain.parent(index), chain.tokens[index], index)


def _piece_blocks(tier: Tier, num_blocks: int) -> int:
    """Return how many blocks of a load one thread reads at a time."""
    if tier.name == "peer":
        # One answer streams them all.
        return max(1, num_blocks)
    share = -(-num_blocks // tier.reader.num_threads)
    return max(MIN_PIECE_BLOCKS, min(MAX_PIECE_BLOCKS, share))


def _remember(memory: OrderedDict[str, _T], owner: str, value: _T) -> None:
    memory[owner] = value
    if len(memory) > MAX_OWNERS:
        memory.popitem(last=False)
