"""Who computes what in the next step: continuous batching over one KV pool.

Called from the engine thread alone. Order of a step: every running sample that decodes gets its
token, then running prefills get the rest of the token budget, then waiting requests are admitted
while blocks last. The oldest running sample always advances and anything admitted fits the pool
alone, so there is no deadlock.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from runner.batch import Chunk
from runner.kvkeys import AdapterTag, BlockChain, adapter_identity, root_key
from runner.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.kvkeys import KvKey
    from runner.pool.blocks import BlockPool
    from runner.types import EngineRequest

_BY_ORDER = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds the scheduler keeps; see ``EngineConfig``.

    Attributes:
        max_batched_tokens: Most tokens per step.
        max_seqs: Most samples running.
        max_model_len: Most tokens of prompt and completion.
        vocab_size: Token ids are below.
    """

    max_batched_tokens: int
    max_seqs: int
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one sequence to compute in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def chunk(self) -> Chunk:
        """The same for the model; logits are wanted if no token is left after it."""
        sequence = self.sequence
        start, end = sequence.num_computed, sequence.num_computed + self.num_tokens
        samples = end == len(sequence.tokens)
        return Chunk(
            sequence.tokens[start:end],
            start,
            sequence.blocks,
            samples,
            sequence,
            sequence.request.adapter,
        )


@dataclass(slots=True)
class Plan:
    """One step.

    Attributes:
        work: In any order, one entry per sequence.
        copies: (source, target) blocks to copy, in this order, before anything is computed.
    """

    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Queues of one engine.

    Args:
        pool: Holds the KV.
        namespace: Of the base model.
        limits: See there.
        adapters: Generation of each LoRA adapter by name (``Adapter.digest``).

    Attributes:
        running: Sequences holding blocks, oldest first.
        waiting: Sequences holding none, oldest first.
        hit_tokens_total: See ``EngineStats``, as the others.
    """

    def __init__(
        self,
        pool: BlockPool,
        namespace: KvKey,
        limits: Limits,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self._pool = pool
        self._namespace = namespace
        # Identity and tag of each name that a request may give.
        self._adapters: dict[str, tuple[str, AdapterTag | None]] = {"": ("", None)}
        for number, (name, digest) in enumerate((adapters or {}).items(), start=1):
            self._adapters[name] = adapter_identity(name, digest), AdapterTag(number, name)
        self._limits = limits
        self._num_arrivals = 0
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.hit_tokens_total = 0
        self.query_tokens_total = 0
        self.prompt_tokens_total = 0
        self.preemptions_total = 0

    @property
    def num_running(self) -> int:
        """Samples holding blocks, counting all samples of a prompt still prefilling."""
        return sum(len(sequence.indexes) for sequence in self.running)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.running or self.waiting)

    def refusal(self, request: EngineRequest) -> str | None:
        """Return why a request can never run, naming the limit; None if it can."""
        limits, prompt = self._limits, request.prompt_ids
        pool_tokens = self._pool.num_blocks * self._pool.block_size
        if not prompt:
            return "the prompt has no tokens"
        if request.adapter not in self._adapters:
            return f"there is no adapter {request.adapter}"
        if len(prompt) >= limits.max_model_len:
            return (
                f"the prompt has {len(prompt)} tokens; prompt and completion together may have "
                f"{limits.max_model_len} (maximum context length)"
            )
        if len(prompt) >= pool_tokens:
            return f"the prompt has {len(prompt)} tokens; the KV pool holds {pool_tokens}"
        if request.params.n > limits.max_seqs:
            return f"n is {request.params.n}; at most {limits.max_seqs} samples run at once"
        if not 0 <= min(prompt) <= max(prompt) < limits.vocab_size:
            return f"prompt token ids must be between 0 and {limits.vocab_size - 1}"
        return None

    def add(self, request: EngineRequest) -> None:
        """Queue a request that ``refusal`` has nothing against."""
        pool, prompt = self._pool, request.prompt_ids
        identity, tag = self._adapters[request.adapter]
        root = root_key(self._namespace, salt=request.salt, adapter=identity)
        chain = BlockChain(root, pool.block_size, request.salt, tag)
        chain.extend(prompt)
        max_tokens = min(
            len(prompt) + request.params.max_tokens,
            self._limits.max_model_len,
            pool.num_blocks * pool.block_size,
        )
        self.waiting.append(
            Sequence(
                request,
                arrival=self._num_arrivals,
                indexes=list(range(request.params.n)),
                tokens=list(prompt),
                max_tokens=max_tokens,
                chain=chain,
            )
        )
        self._num_arrivals += 1

    def schedule(self) -> Plan:
        """Plan one step; reserves its blocks, preempting the youngest where they run out."""
        plan = Plan()
        for sequence in self.running.copy():
            # Preempting for an older one may have removed it meanwhile.
            if sequence.is_decoding and self._reserve_next(sequence, plan):
                plan.work.append(Work(sequence, 1))
        budget = self._limits.max_batched_tokens - len(plan.work)
        # Decode rows may use up the budget; the oldest prefill advances all the same.
        budget = self._plan_prefills(plan, max(budget, self._pool.block_size))
        self._admit(plan, budget)
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

    def _admit(self, plan: Plan, budget: int) -> None:
        if not self.waiting:
            return
        num_free_seqs = self._limits.max_seqs - self.num_running
        arriving = self._arriving_keys()
        # No further than could run: a long queue must not cost a look-up per request and step.
        for sequence in self.waiting[: self._limits.max_seqs]:
            if budget < self._pool.block_size or len(sequence.indexes) > num_free_seqs:
                return
            if self._next_key(sequence) in arriving:
                # A running prefill is computing this very block: a step later it is a hit.
                continue
            if not self._start(sequence):
                return
            count = self._chunk_size(sequence, budget)
            plan.work.append(Work(sequence, count))
            budget -= count
            num_free_seqs -= len(sequence.indexes)
            arriving.update(sequence.chain.keys[sequence.num_committed :])

    def _arriving_keys(self) -> set[KvKey]:
        """Return the keys of the prompt blocks that running prefills have still to commit."""
        return {
            key
            for sequence in self.running
            if not sequence.is_decoding
            for key in sequence.chain.keys[sequence.num_committed :]
        }

    def _max_hit_blocks(self, sequence: Sequence) -> int:
        # The last token is always computed: its logits are wanted.
        return (len(sequence.tokens) - 1) // self._pool.block_size

    def _next_key(self, sequence: Sequence) -> KvKey | None:
        """Return the key of the first block that is no hit; None if all that can be are hits."""
        most = self._max_hit_blocks(sequence)
        num_hits = len(self._pool.find(sequence.chain, most))
        return sequence.chain.keys[num_hits] if num_hits < most else None

    def _start(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its hits and blocks for the rest; False if there is no room."""
        pool = self._pool
        hits = pool.find(sequence.chain, self._max_hit_blocks(sequence))
        needed = -(-len(sequence.tokens) // pool.block_size) - len(hits)
        pool.take(hits)
        # One block per running sample stays available, or the next step would preempt again.
        available = pool.num_free + pool.num_cached - len(self.running)
        allocated = pool.allocate(needed) if needed <= available else None
        if allocated is None:
            pool.release(hits, sequence.chain)
            return False
        sequence.blocks = hits + allocated
        sequence.num_committed = len(hits)
        sequence.num_computed = len(hits) * pool.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
            self.hit_tokens_total += sequence.num_computed
            self.query_tokens_total += len(sequence.request.prompt_ids)
            self.prompt_tokens_total += len(sequence.request.prompt_ids)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_BY_ORDER)
        return True

    def retire(self, plan: Plan) -> None:
        """Take note that a plan's step has run: its full blocks become findable."""
        for work in plan.work:
            sequence = work.sequence
            sequence.num_computed += work.num_tokens
            full = sequence.num_computed // self._pool.block_size
            if full > sequence.num_committed:
                sequence.chain.extend(sequence.tokens)
                self._pool.commit(sequence.blocks, sequence.chain, sequence.num_committed, full)
                sequence.num_committed = full

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
            )
            insort(self.running, twin, key=_BY_ORDER)
            twins.append(twin)
        return [sequence, *twins]

    def find(self, request_id: str) -> list[Sequence]:
        """Return the live sequences of a request."""
        return [
            sequence
            for sequence in (*self.running, *self.waiting)
            if sequence.request.id == request_id
        ]

    def forget_all(self) -> list[Sequence]:
        """Empty both queues without touching the pool; returns what was in them."""
        sequences = [*self.running, *self.waiting]
        self.running.clear()
        self.waiting.clear()
        return sequences

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not; its blocks are released, full ones stay cached."""
        if sequence.blocks:
            self._drop_blocks(sequence)
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
