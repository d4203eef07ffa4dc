"""A timed model of one LLM engine: continuous batching, chunked prefill, paged cache with tiers.

It knows no event loop and no clock: ``submit`` and ``advance`` are told the time, ``next_s`` says
when something ends next. The fleet simulator and a timed mock engine share it.

Source: the simulator behind the design's routing tables, its engine model (section 10), a roofline:
step = max((prefill tokens + decoding requests) * token_s, weights_s) + attention of the chunks
+ KV read of the decodes + fixed overhead. Decodes come first in the token budget, then running
prefills, then new requests in arrival order when input + output fit. Not modelled: preemption.
"""

from __future__ import annotations

import heapq
from collections import deque
from math import inf
from typing import TYPE_CHECKING

import msgspec

from gateway.replay.kv_cache import Change, KvCache
from gateway.routing.cost import MAX_BATCHED_TOKENS, CostModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prefix_index.blocks import BlockHash

# Tokens of a prefix block: the grain of the public traces and of the decision log.
BLOCK_TOKENS = 512
# vLLM's default bound on running sequences on large GPUs.
MAX_SEQUENCES = 256


class EngineModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one engine can do.

    Attributes:
        cost: Seconds per token, per (token x context token), per step, per context token; restore
            rates of its own tiers.
        gpu_tokens: KV tokens on the device.
        weights_s: Least seconds of a step's matrix work: reading the weights once.
        cpu_tokens: KV tokens of the CPU tier.
        disk_tokens: KV tokens of the disk tier; needs a CPU tier.
        kv_bytes_per_token: Bytes of KV of one token, for transfers between workers.
        max_batched_tokens: Token budget of a step.
        max_sequences: Most requests that run at once.
        block_tokens: Tokens per block.
    """

    cost: CostModel
    gpu_tokens: int
    weights_s: float = 0.0
    cpu_tokens: int = 0
    disk_tokens: int = 0
    kv_bytes_per_token: int = 131_072
    max_batched_tokens: int = MAX_BATCHED_TOKENS
    max_sequences: int = MAX_SEQUENCES
    block_tokens: int = BLOCK_TOKENS

    @property
    def gpu_blocks(self) -> int:
        """Whole blocks on the device."""
        return self.gpu_tokens // self.block_tokens

    def blocks_needed(self, prompt_tokens: int, output_tokens: int) -> int:
        """Return the blocks that a request occupies until it ends."""
        return -(-(prompt_tokens + output_tokens) // self.block_tokens)


class Job:
    """One request in an engine: made by its sender, written by the engine.

    Attributes:
        blocks: Hashes of all full blocks of the prompt.
        prompt_tokens: Prompt length.
        output_tokens: Tokens it will produce, at least 1.
        tag: The sender's own.
        pulled_blocks: Leading blocks that arrive from outside by ``pulled_s``; 0 = none.
        pulled_s: When they are there.
        hit_tokens: Prompt tokens not computed: found in the engine's tiers, or pulled.
        restored_tokens: Those of them that came from a lower tier.
        pulled_tokens: Those of them that came from outside.
        first_token_s: When its first token was out; None before.
        finished_s: When its last token was out; None before.
    """

    __slots__ = (
        "blocks",
        "computed_tokens",
        "finish_step",
        "finished_s",
        "first_step",
        "first_token_s",
        "held",
        "hit_tokens",
        "num_private",
        "number",
        "output_tokens",
        "prompt_tokens",
        "pulled_blocks",
        "pulled_s",
        "pulled_tokens",
        "restored_tokens",
        "tag",
    )

    def __init__(
        self, blocks: Sequence[BlockHash], prompt_tokens: int, output_tokens: int, tag: object
    ) -> None:
        self.blocks = blocks
        self.prompt_tokens = prompt_tokens
        self.output_tokens = max(1, output_tokens)
        self.tag = tag
        self.pulled_blocks = 0
        self.pulled_s = 0.0
        self.hit_tokens = 0
        self.restored_tokens = 0
        self.pulled_tokens = 0
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        # The engine's own: order of admission, blocks pinned, private ones, prompt tokens in the
        # cache, decode steps.
        self.number = 0
        self.held: list[BlockHash] = []
        self.num_private = 0
        self.computed_tokens = 0
        self.first_step = 0
        self.finish_step = 0


class Engine:
    """One engine. Steps are not walked one by one: decodes without arrivals are one stretch.

    Args:
        model: What it can do.
        announce: Told of every change of its cache, in order, when it happens (during
            ``submit`` and ``advance``).

    Attributes:
        model: As given.
        cache: Its blocks.
        next_s: When the current step or stretch ends; infinite when idle. ``advance`` to it.
        waiting: Requests not admitted yet, in arrival order.
    """

    def __init__(self, model: EngineModel, announce: Callable[[Change], None]) -> None:
        self.model = model
        self.cache = KvCache(
            model.gpu_blocks,
            model.cpu_tokens // model.block_tokens,
            model.disk_tokens // model.block_tokens,
            announce,
        )
        self.next_s = inf
        self.waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        # (when they join the batch, tie breaker, request)
        self._arriving: list[tuple[float, int, Job]] = []
        self._decoding: list[tuple[int, int, Job]] = []
        self._num_started = 0
        self._context_tokens = 0
        self._steps = 0
        self._link_free_s = 0.0
        # The stretch in progress: its start, number of steps, and chunks of prompts in it.
        self._start_s = 0.0
        self._num_steps = 0
        self._chunks: list[tuple[Job, int]] = []

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return len(self._prefilling) + len(self._decoding) + len(self._arriving)

    def submit(self, job: Job, now_s: float) -> None:
        """Take a request; ``advance`` to ``now_s`` first.

        Raises:
            ValueError: If it can never fit.
        """
        needed = self.model.blocks_needed(job.prompt_tokens, job.output_tokens)
        if needed > self.model.gpu_blocks:
            raise ValueError(
                f"a request of {job.prompt_tokens} + {job.output_tokens} tokens needs {needed} "
                f"blocks of KV memory; the engine has {self.model.gpu_blocks}"
            )
        self.waiting.append(job)
        if not self._num_steps:
            self._plan(now_s)
        elif len(self.waiting) == 1 and not self._chunks:
            self._cut(now_s)

    def advance(self, now_s: float) -> list[Job]:
        """End every step due by ``now_s``; returns the requests that got their first or last token.

        In order of time; a request whose both were due is there twice, unless they are the same.
        """
        touched: list[Job] = []
        while self.next_s <= now_s:
            self._end_stretch(touched)
        return touched

    def generated_tokens(self, job: Job, now_s: float) -> int:
        """Return how many tokens a request has produced by ``now_s``, at most ``next_s``."""
        if job.first_token_s is None:
            return 0
        if job.finished_s is not None:
            return job.output_tokens
        done = self._steps + self._whole_steps(now_s - self._start_s)
        return min(job.output_tokens, done - job.first_step + 1)

    # -- one stretch of steps

    def _plan(self, now_s: float) -> None:
        """Decide at a step boundary what runs next."""
        self._start_s = now_s
        while self._arriving and self._arriving[0][0] <= now_s:
            self._join(heapq.heappop(self._arriving)[2])
        num_decoding = len(self._decoding)
        budget = self.model.max_batched_tokens - num_decoding
        chunks = self._chunks = self._take_chunks(budget, now_s)
        if chunks:
            self._num_steps = 1
            self.next_s = now_s + self._prefill_step_s(chunks, num_decoding)
        elif num_decoding:
            self._num_steps = self._decoding[0][0] - self._steps
            if self._arriving:
                self._limit_steps(self._arriving[0][0] - now_s)
            self.next_s = now_s + self._decode_s(self._num_steps)
        else:
            self._num_steps = 0
            self.next_s = self._arriving[0][0] if self._arriving else inf

    def _take_chunks(self, budget: int, now_s: float) -> list[tuple[Job, int]]:
        chunks: list[tuple[Job, int]] = []
        for job in self._prefilling:
            if budget <= 0:
                return chunks
            tokens = min(budget, job.prompt_tokens - job.computed_tokens)
            chunks.append((job, tokens))
            budget -= tokens
        while budget > 0 and self.waiting and self._admit(self.waiting[0], now_s):
            job = self.waiting.popleft()
            if self._prefilling and self._prefilling[-1] is job:
                tokens = min(budget, job.prompt_tokens - job.computed_tokens)
                chunks.append((job, tokens))
                budget -= tokens
        return chunks

    def _end_stretch(self, touched: list[Job]) -> None:
        now_s = self.next_s
        num_decoding = len(self._decoding)
        self._steps += self._num_steps
        self._context_tokens += num_decoding * self._num_steps
        # Those that decode end before new ones start: a first token counts from the next step on.
        while self._decoding and self._decoding[0][0] <= self._steps:
            job = heapq.heappop(self._decoding)[2]
            self._context_tokens -= job.prompt_tokens + job.output_tokens
            self._finish(job, now_s)
            touched.append(job)
        for job, tokens in self._chunks:
            self._computed(job, tokens)
            if job.computed_tokens == job.prompt_tokens:
                self._prefilling.popleft()
                self._first_token(job, now_s)
                touched.append(job)
        self._plan(now_s)

    def _prefill_step_s(self, chunks: list[tuple[Job, int]], num_decoding: int) -> float:
        cost, num_tokens, attention = self.model.cost, num_decoding, 0.0
        for job, tokens in chunks:
            num_tokens += tokens
            attention += tokens * (job.computed_tokens + tokens / 2)
        return (
            max(num_tokens * cost.token_s, self.model.weights_s)
            + cost.attention_s * attention
            + cost.context_s * self._context_tokens
            + cost.step_s
        )

    def _decode_s(self, num_steps: int) -> float:
        """Return the seconds of decode steps from here on: each request grows a token a step."""
        cost, num_decoding = self.model.cost, len(self._decoding)
        fixed = max(num_decoding * cost.token_s, self.model.weights_s) + cost.step_s
        context = num_steps * self._context_tokens + num_decoding * num_steps * (num_steps - 1) / 2
        return num_steps * fixed + cost.context_s * context

    def _whole_steps(self, elapsed_s: float) -> int:
        """Return how many steps of the current stretch end within ``elapsed_s``."""
        if self._chunks or not self._decoding:
            return 0
        low, high = 0, self._num_steps
        while low < high:
            middle = (low + high + 1) // 2
            if self._decode_s(middle) <= elapsed_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _limit_steps(self, elapsed_s: float) -> None:
        """End the stretch of decodes with the step that runs at ``elapsed_s``."""
        done = self._whole_steps(elapsed_s)
        if done < self._num_steps:
            self._num_steps = done + (self._decode_s(done) < elapsed_s or not done)

    def _cut(self, now_s: float) -> None:
        self._limit_steps(now_s - self._start_s)
        self.next_s = self._start_s + self._decode_s(self._num_steps)

    # -- one request

    def _admit(self, job: Job, now_s: float) -> bool:
        """Give a request its memory, if it fits; it prefills at once or after its restore."""
        if self.num_running >= self.model.max_sequences:
            return False
        model, cache = self.model, self.cache
        size = model.block_tokens
        usable = (job.prompt_tokens - 1) // size
        found = cache.match(job.blocks if len(job.blocks) <= usable else job.blocks[:usable])
        needed = model.blocks_needed(job.prompt_tokens, job.output_tokens)
        num_new = needed - len(found.gpu)
        if not cache.fits(found.gpu, num_new):
            return False
        cache.pin(found.gpu, num_new)
        self._num_started += 1
        job.number = self._num_started
        num_hits = found.num_blocks
        job.held = list(found.gpu)
        job.num_private = num_new
        job.restored_tokens = (len(found.cpu) + len(found.disk)) * size
        join_s = now_s
        if job.restored_tokens:
            restore_s = (
                len(found.cpu) * size / model.cost.restore_cpu_tokens_per_s
                + len(found.disk) * size / model.cost.restore_disk_tokens_per_s
            )
            self._link_free_s = join_s = max(self._link_free_s, now_s) + restore_s
        num_pulled = min(job.pulled_blocks, usable)
        if num_pulled > num_hits:
            job.pulled_tokens = (num_pulled - num_hits) * size
            num_hits = num_pulled
            join_s = max(join_s, job.pulled_s)
        job.hit_tokens = job.computed_tokens = num_hits * size
        if join_s > now_s:
            heapq.heappush(self._arriving, (join_s, job.number, job))
        else:
            self._join(job)
        return True

    def _join(self, job: Job) -> None:
        """Let a request prefill whose cached blocks are all on the device, in order of admission.

        Else a long prompt that came during its restore would be computed first.
        """
        num_hits = job.hit_tokens // self.model.block_tokens
        if num_hits > len(job.held):
            self._publish(job, 0, num_hits)
        at = len(self._prefilling)
        while at and self._prefilling[at - 1].number > job.number:
            at -= 1
        self._prefilling.insert(at, job)

    def _computed(self, job: Job, tokens: int) -> None:
        size = self.model.block_tokens
        before = job.computed_tokens // size
        job.computed_tokens += tokens
        after = min(job.computed_tokens // size, len(job.blocks))
        if after > before:
            self._publish(job, before, after)

    def _publish(self, job: Job, start: int, end: int) -> None:
        parent = job.blocks[start - 1] if start else b""
        fresh = self.cache.publish(job.blocks[start:end], parent)
        job.held += fresh
        job.num_private -= len(fresh)

    def _first_token(self, job: Job, now_s: float) -> None:
        job.first_token_s = now_s
        job.first_step = self._steps
        if job.output_tokens == 1:
            self._finish(job, now_s)
            return
        job.finish_step = self._steps + job.output_tokens - 1
        self._context_tokens += job.prompt_tokens + 1
        heapq.heappush(self._decoding, (job.finish_step, job.number, job))

    def _finish(self, job: Job, now_s: float) -> None:
        job.finished_s = now_s
        self.cache.release(job.held, job.num_private, now_s)
        job.held = []
        job.num_private = 0
