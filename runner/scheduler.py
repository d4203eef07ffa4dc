"""Who computes what in the next step: continuous batching over one KV pool.

Called from the engine thread alone. Order of a step: every running sample that decodes gets its
token, then running prefills get the rest of the token budget, then waiting requests are admitted
while blocks last. The oldest running sample always advances and anything admitted fits the pool
alone, so there is no deadlock.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, cast

from runner.intake import Intake
from runner.loading import Loader
from runner.plan import Plan, Work
from runner.pool.states import BlockState
from runner.reuse import ReuseFigures
from runner.sequence import LoadState, Sequence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.kvkeys import KvKey
    from runner.plan import Limits
    from runner.pool.blocks import BlockPool
    from runner.tiers.interface import Tiers
    from runner.tiers.types import LoadDone
    from runner.types import EngineRequest, HitSource

_BY_ORDER = attrgetter("order")


class Scheduler:
    """Queues of one engine.

    Args:
        pool: Holds the KV.
        namespace: Of the base model.
        limits: See there.
        adapters: Generation of each LoRA adapter by name (``Adapter.digest``).
        tiers: Beneath the pool; None for none.

    Attributes:
        running: Sequences that compute, oldest first.
        waiting: Sequences holding no blocks, oldest first.
        reuse: Hits and misses so far.
        preemptions_total: See ``EngineStats``, as the others.
    """

    def __init__(
        self,
        pool: BlockPool,
        namespace: KvKey,
        limits: Limits,
        adapters: Mapping[str, str] | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self._pool = pool
        self._intake = Intake(pool, namespace, limits, adapters or {})
        self._limits = limits
        self._loader = None if tiers is None else Loader(pool, tiers)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.reuse = ReuseFigures(pool, tiers)
        self.preemptions_total = 0

    @property
    def num_running(self) -> int:
        """Samples holding blocks, counting all samples of a prompt still prefilling."""
        return sum(len(sequence.indexes) for sequence in self.running)

    @property
    def loading(self) -> list[Sequence]:
        """Sequences whose KV is on its way from a lower tier; they hold all their blocks."""
        return self._loader.sequences if self._loader is not None else []

    @property
    def loading_blocks(self) -> list[int]:
        """Blocks that a transfer may be writing, also those nobody waits for any more."""
        return self._loader.blocks if self._loader is not None else []

    @property
    def has_work(self) -> bool:
        """Whether any request is in the engine."""
        return bool(self.running or self.waiting or self.loading)

    @property
    def waits_for_tiers(self) -> bool:
        """Whether a request would compute if its KV, or word of it, were there."""
        if self.running or self._loader is None:
            return False
        is_pending = (sequence.load_state is LoadState.PENDING for sequence in self.waiting)
        return bool(self.loading) or any(is_pending)

    def live(self) -> list[Sequence]:
        """Return every sequence in the engine."""
        return [*self.running, *self.loading, *self.waiting]

    def refusal(self, request: EngineRequest) -> str | None:
        """Return why a request can never run, naming the limit; None if it can."""
        return self._intake.refusal(request)

    def add(self, request: EngineRequest) -> None:
        """Queue a request that ``refusal`` has nothing against."""
        self.waiting.append(self._intake.sequence(request))

    def schedule(self, now_s: float) -> Plan:
        """Plan one step; reserves its blocks, preempting the youngest where they run out."""
        plan = Plan()
        for sequence in self.running.copy():
            # Preempting for an older one may have removed it meanwhile.
            if sequence.is_decoding and self._reserve_next(sequence, plan):
                plan.work.append(Work(sequence, 1))
        budget = self._limits.max_batched_tokens - len(plan.work)
        # Decode rows may use up the budget; the oldest prefill advances all the same.
        budget = self._plan_prefills(plan, max(budget, self._pool.block_size))
        self._admit(plan, budget, now_s)
        return plan

    def _reserve_next(self, sequence: Sequence, plan: Plan) -> bool:
        """Make room for one more token; False if the sequence itself had to be preempted."""
        pool = self._pool
        is_block_start = sequence.num_computed == len(sequence.blocks) * pool.block_size
        # Preempting a sample of the same prompt may leave this one alone with its last block.
        while is_block_start or pool.is_shared(sequence.blocks[-1]):
            if (allocated := pool.allocate(1)) is None:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False
            elif is_block_start:
                sequence.blocks += allocated
                return True
            else:
                # Copy on write: other samples of the prompt still read this block.
                plan.copies.append((sequence.blocks[-1], allocated[0]))
                pool.replace_last(sequence.blocks, allocated[0])
                return True
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._drop_blocks(sequence)
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=_BY_ORDER)
        self.preemptions_total += 1

    def _drop_blocks(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks, sequence.chain)
        sequence.blocks = []
        sequence.num_computed = sequence.num_committed = 0
        sequence.load_state = LoadState.UNASKED

    def _plan_prefills(self, plan: Plan, budget: int) -> int:
        for sequence in self.running:
            if not sequence.is_decoding and (count := self._chunk_size(sequence, budget)):
                plan.work.append(Work(sequence, count))
                budget -= count
        return budget

    def _chunk_size(self, sequence: Sequence, budget: int) -> int:
        """Return how many tokens to compute: all that are left, or up to a block's end."""
        if sequence.num_pending <= budget:
            return sequence.num_pending
        end = sequence.num_computed + budget
        return max(0, end - end % self._pool.block_size - sequence.num_computed)

    def _admit(self, plan: Plan, budget: int, now_s: float) -> None:
        if not self.waiting:
            return
        block_size = self._pool.block_size
        num_free_seqs = self._limits.max_seqs - self.num_running
        num_free_seqs -= sum(len(sequence.indexes) for sequence in self.loading)
        arriving = self._arriving_keys()
        # Blocks of older requests that only wait for their turn to compute.
        spoken_for = 0
        # No further than could run: a long queue must not cost a look-up per request and step.
        for sequence in self.waiting[: self._limits.max_seqs]:
            can_compute = budget >= block_size
            if len(sequence.indexes) > num_free_seqs or not (can_compute or self._loader):
                return
            if self._next_key(sequence) in arriving:
                # It is being computed or loaded for another one: then it will be a hit.
                continue
            if self._loader is not None:
                answer = self._load(self._loader, sequence, spoken_for, now_s)
                if answer == "no room":
                    return
                if answer == "loading":
                    num_free_seqs -= len(sequence.indexes)
                    arriving.update(sequence.chain.keys[sequence.num_committed :])
                if answer != "compute":
                    continue
            if not can_compute:
                spoken_for += self._num_blocks(sequence)
                if spoken_for > self._num_available([]):
                    return
                continue
            if not self._start(sequence, now_s):
                return
            count = self._chunk_size(sequence, budget)
            plan.work.append(Work(sequence, count))
            budget -= count
            num_free_seqs -= len(sequence.indexes)
            arriving.update(sequence.chain.keys[sequence.num_committed :])

    def _arriving_keys(self) -> set[KvKey]:
        """Return the keys of the prompt blocks that are being computed or loaded."""
        arriving = {
            key
            for sequence in self.running
            if not sequence.is_decoding
            for key in sequence.chain.keys[sequence.num_committed :]
        }
        for sequence in self.loading:
            arriving.update(sequence.chain.keys[sequence.num_committed :])
        return arriving

    def _load(
        self, loader: Loader, sequence: Sequence, spoken_for: int, now_s: float
    ) -> Literal["compute", "wait", "loading", "no room"]:
        """Ask the tiers, once per admission, and begin a load that is worth it."""
        if sequence.load_state is LoadState.SETTLED:
            return "compute"
        pool, cap = self._pool, sequence.request.max_load_tokens
        most = self._max_hit_blocks(sequence)
        hits = pool.find(sequence.chain, most)
        max_blocks = most if cap is None else min(most, cap // pool.block_size)
        if len(hits) >= max_blocks:
            return "compute"
        num_missing = self._num_blocks(sequence) - len(hits)
        if num_missing > self._num_available(hits) - spoken_for:
            return "no room"
        answer = loader.ask(sequence, len(hits), max_blocks, self._waiting_tokens(sequence), now_s)
        if answer is None:
            return "compute"
        if answer == "pending":
            return "wait"
        if not loader.begin(sequence, answer, hits, num_missing - answer.num_blocks):
            return "no room"
        self.waiting.remove(sequence)
        loader.note_admission(sequence, now_s)
        return "loading"

    def _num_blocks(self, sequence: Sequence) -> int:
        return -(-len(sequence.tokens) // self._pool.block_size)

    def _num_available(self, hits: list[int]) -> int:
        """Return how many blocks a request with these hits could get besides them."""
        pool = self._pool
        num_idle_hits = sum(pool.state(block) is BlockState.CACHED for block in hits)
        # One block per running sample stays available, or the next step would preempt again.
        num_growing = len(self.running) + len(self.loading)
        return pool.num_free + pool.num_cached - num_idle_hits - num_growing

    def _waiting_tokens(self, besides: Sequence) -> int:
        """Return the prefill tokens of the others that run or are near the head of the queue."""
        prefills = (at.num_pending for at in self.running if not at.is_decoding)
        queue = self.waiting[: self._limits.max_seqs]
        queued = sum(len(sequence.tokens) for sequence in queue if sequence is not besides)
        return sum(prefills) + queued

    def _max_hit_blocks(self, sequence: Sequence) -> int:
        # The last token is always computed: its logits are wanted.
        return (len(sequence.tokens) - 1) // self._pool.block_size

    def _next_key(self, sequence: Sequence) -> KvKey | None:
        """Return the key of the first block that is no hit; None if all that can be are hits."""
        most = self._max_hit_blocks(sequence)
        num_hits = len(self._pool.find(sequence.chain, most))
        return sequence.chain.keys[num_hits] if num_hits < most else None

    def _start(self, sequence: Sequence, now_s: float) -> bool:
        """Give a waiting sequence its hits and blocks for the rest; False if there is no room."""
        pool = self._pool
        hits = pool.find(sequence.chain, self._max_hit_blocks(sequence))
        needed = self._num_blocks(sequence) - len(hits)
        available = self._num_available(hits)
        pool.take(hits)
        allocated = pool.allocate(needed) if needed <= available else None
        if allocated is None:
            pool.release(hits, sequence.chain)
            return False
        sequence.blocks = hits + allocated
        sequence.num_committed = len(hits)
        sequence.num_computed = len(hits) * pool.block_size
        if self._loader is not None:
            self._loader.settle(sequence)
            self._loader.note_admission(sequence, now_s)
        self.reuse.admit(sequence, {"gpu": len(hits)})
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_BY_ORDER)
        return True

    def end_load(self, done: LoadDone) -> None:
        """Let a sequence run whose load has ended: what is missing will be computed."""
        load = self._loader.end(done) if self._loader is not None else None
        if load is None or load.sequence is None:
            return
        below = cast("Mapping[HitSource, int]", done.blocks_by_tier)
        hits: dict[HitSource, int] = {"gpu": load.plan.query.first_block, **below}
        self.reuse.admit(load.sequence, hits, num_failed=load.plan.num_blocks - done.num_blocks)
        insort(self.running, load.sequence, key=_BY_ORDER)

    def flush_offers(self, now_s: float) -> None:
        """Offer the tiers what has become findable; before any of it may be evicted."""
        if self._loader is not None:
            self._loader.flush_offers(now_s)

    def retire(self, plan: Plan) -> None:
        """Take note that a plan's step has run: its full blocks become findable."""
        for work in plan.work:
            sequence = work.sequence
            sequence.num_computed += work.num_tokens
            full = sequence.num_computed // self._pool.block_size
            if full > sequence.num_committed:
                sequence.chain.extend(sequence.tokens)
                start, sequence.num_committed = sequence.num_committed, full
                given = self._pool.commit(sequence.blocks, sequence.chain, start, full)
                if self._loader is not None:
                    self._loader.offer(sequence, given)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """Split a prefilled sequence into its samples, sharing all blocks; itself comes first."""
        first, *others = sequence.indexes
        sequence.indexes = [first]
        twins = []
        for index in others:
            self._pool.take(sequence.blocks)
            twin = Sequence(
                sequence.request,
                arrival=sequence.arrival,
                indexes=[index],
                tokens=sequence.tokens.copy(),
                max_tokens=sequence.max_tokens,
                chain=sequence.chain.copy(),
                blocks=sequence.blocks.copy(),
                num_computed=sequence.num_computed,
                num_committed=sequence.num_committed,
                cached_tokens=sequence.cached_tokens,
                hit_source=sequence.hit_source,
            )
            insort(self.running, twin, key=_BY_ORDER)
            twins.append(twin)
        return [sequence, *twins]

    def find(self, request_id: str) -> list[Sequence]:
        """Return the live sequences of a request."""
        return [sequence for sequence in self.live() if sequence.request.id == request_id]

    def forget_all(self) -> list[Sequence]:
        """Empty all queues without touching the pool; returns what was in them."""
        sequences = self.live()
        if self._loader is not None:
            self._loader.forget_all(sequences)
        self.running.clear()
        self.waiting.clear()
        return sequences

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not; its blocks are released, full ones stay cached."""
        is_loading = sequence.load_state is LoadState.LOADING
        if self._loader is not None:
            self._loader.drop(sequence)
        if not sequence.blocks:
            self.waiting.remove(sequence)
            return
        self._drop_blocks(sequence)
        if not is_loading:
            self.running.remove(sequence)
