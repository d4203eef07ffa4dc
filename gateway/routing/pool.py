"""Workers, and the pool of those that serve one set of model names.

A pool holds what routing shares between its workers: how prompts are read, who holds which prefix,
the ring, and the cold prompts being computed. Everything here runs on one event loop, no locks.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gateway.routing.books import Books
from gateway.routing.cost import MAX_BATCHED_TOKENS
from gateway.routing.health import Health
from gateway.routing.learner import Learner, OutputLength
from gateway.routing.mirror import LruMirror
from gateway.routing.pending import Pending
from gateway.routing.prior import Lender
from gateway.routing.ring import Ring
from gateway.routing.slow_start import SlowStart
from gateway.upstream.client import Upstream
from prefix_index.recurrence import Recurrence
from prefix_index.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gateway.routing.others import OthersLoad
    from prefix_index.index import Index
    from prefix_index.prompts import PromptReader

Mode = Literal["exact", "approximate", "text"]
PullStyle = Literal["", "runner", "llm-d"]
PeerPull = Literal["auto", "off", "llm-d"]

# vLLM's and the bundled runner's block size; used until the pool's own is known.
DEFAULT_BLOCK_SIZE = 16
# What a worker of unknown capacity is believed to keep: a small GPU's cache. The reported cached
# tokens correct it.
DEFAULT_CAPACITY_TOKENS = 131_072
# Consecutive prompts whose token count differs from the worker's until its hits are not believed.
MAX_DIVERGED = 3
# How long one prompt that was held though never read here speaks for others: a session's length.
UNREAD_TEXT_S = 300.0


@dataclass(slots=True, eq=False)
class Worker:
    """One engine endpoint.

    Attributes:
        id: Name in metrics, logs and the ring.
        url: Base URL, without a trailing slash.
        mode: How its residency is known: exact (its events), approximate (our own routings), text
            (not at all: routed by hashing). Set it through ``Pool.set_mode``.
        upstream: Connections to it; None only in tests that send nothing.
        capacity_tokens: KV tokens on its device; 0 = unknown.
        cpu_capacity_tokens: KV tokens of its CPU tier; 0 = none or unknown.
        block_size: Its block size as reported; None = as the pool's. Of a whole multiple of the
            pool's only whole blocks of its own count as hits.
        max_batched_tokens: Token budget of one of its steps.
        epoch: Start time of its process as reported; a new one means an empty cache.
        draining: No new requests.
        last_event_s: When its last KV event came (monotonic).
        reports_cached: Whether it ever reported more than 0 cached tokens.
        parity: 1 = its token count equals ours, 0 = it differed last time, -1 = unknown.
        can_pull: Whether it can fetch KV from another worker, as it says itself.
        pull_style: How it is told where from: ``runner`` (``kv_transfer_params.source``),
            ``llm-d`` (a header); empty = not at all.
        pull_peers: URLs of the workers that a ``runner`` may be sent to; it refuses all others.
        serves_peers: Whether it hands its blocks to other workers.
        rank: Its data-parallel rank, where one URL stands for several; None = there are none.
        adapters: LoRA adapters it serves as models.
        fingerprint: What it says about its weights, tokenizer and KV format; empty = nothing.
        is_apart: Whether it differs in that from most of its pool, so that it serves only if nobody
            else can. Written by ``gateway/fleet/fingerprints.py``.
        slow_start: Its growing share of the requests while its cache is being filled; None = it has
            its full share. Written by ``gateway/warm/keep.py``.
    """

    id: str
    url: str
    mode: Mode = "approximate"
    upstream: Upstream | None = None
    capacity_tokens: int = 0
    cpu_capacity_tokens: int = 0
    block_size: int | None = None
    max_batched_tokens: int = MAX_BATCHED_TOKENS
    epoch: float | None = None
    draining: bool = False
    last_event_s: float | None = None
    reports_cached: bool = False
    parity: int = -1
    can_pull: bool = False
    pull_style: PullStyle = ""
    pull_peers: frozenset[str] = frozenset()
    serves_peers: bool = False
    rank: int | None = None
    adapters: frozenset[str] = frozenset()
    fingerprint: str = ""
    is_apart: bool = False
    slow_start: SlowStart | None = None
    num_diverged: int = 0
    books: Books = field(default_factory=Books)
    health: Health = field(default_factory=Health)
    learner: Learner = field(default_factory=Learner)
    mirror: LruMirror = field(default_factory=lambda: LruMirror(DEFAULT_BLOCK_SIZE))

    def saw_prompt_tokens(self, *, ours: int, theirs: int) -> None:
        """Compare our token count of a prompt with the worker's."""
        self.parity = int(ours == theirs)
        self.num_diverged = 0 if ours == theirs else self.num_diverged + 1

    @property
    def is_diverged(self) -> bool:
        """Whether our tokens are not this worker's, so that our hits mean nothing to it."""
        return self.num_diverged >= MAX_DIVERGED


@dataclass(frozen=True, slots=True)
class Retry:
    """Retries before the first byte: share of recent requests, and tries per request."""

    budget: float
    attempts: int


class Pool:
    """The workers of one set of models.

    Args:
        name: Name in the configuration.
        models: Names clients may ask for.
        aliases: Other names -> one of ``models``.
        engine: Kind of engine (``runner``, ``vllm``, ``sglang``, ``openai``).
        affinity_keys: Order in which kinds of identity decide.
        set_size: Workers in a key's home.
        is_strict: Route by the ring only, for engines whose cache cannot be seen.
        reader: Prompt reader; None = no tokenizer, the pool routes by text.
        index: Who holds which prefix; None as long as there is no reader.
        workers: Its first workers.
        peer_pull: Whether workers may fetch KV from each other: those that say they can, none,
            or all by llm-d's header.
        clock_unix: Seconds since 1970, the clock of the workers' epochs.

    Attributes:
        others: What other gateways have in flight on its workers; None = there are none.
        adapters: LoRA adapters that a worker of it serves, or once did.
        weight: Share of its models' traffic among the pools with a weight; None = it takes all that
            nobody else is named for.
        fallback: Pool that takes its requests while it has no worker for them.
        max_queue: Requests that may wait for a worker in the gateway.
        deadline_s: How long one may wait.
        retry: Its own retries; None = the process's.
        num_retries_refused: Failed attempts that were not tried again since too many were before.
    """

    def __init__(
        self,
        name: str,
        *,
        models: Sequence[str],
        aliases: Mapping[str, str] | None = None,
        engine: str = "openai",
        affinity_keys: Sequence[str] = ("document", "knowledge_base", "session", "tenant"),
        set_size: int = 2,
        is_strict: bool = False,
        reader: PromptReader | None = None,
        index: Index | None = None,
        workers: Iterable[Worker] = (),
        peer_pull: PeerPull = "auto",
        clock_unix: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self.models = tuple(models)
        self.aliases = dict(aliases or {})
        self.engine = engine
        self.affinity_keys = tuple(affinity_keys)
        self.set_size = set_size
        self.is_strict = is_strict
        self.peer_pull = peer_pull
        self.others: OthersLoad | None = None
        self.adapters: set[str] = set()
        self.weight: int | None = None
        self.fallback: Pool | None = None
        self.max_queue = 1000
        self.deadline_s = 30.0
        self.retry: Retry | None = None
        self.num_retries_refused = 0
        self.workers: dict[str, Worker] = {}
        self.ring = Ring()
        self.pending = Pending()
        # Likewise for prompts whose tokens are still on their way, by their text.
        self.pending_texts = Pending()
        # Running mean over prompts; English text and code in common vocabularies.
        self.chars_per_token = 4.0
        self.output_length = OutputLength()
        # Constants of workers of whom little was seen.
        self.lender = Lender()
        # Prompts that could not be read, by exception name: each was routed by text.
        self.unread_prompts: Counter[str] = Counter()
        self.reader: PromptReader | None = None
        self.index: Index | None = None
        # What recurs in its prompts and changes (gateway/routing/segments.py).
        self.recurrence = Recurrence()
        self._residencies: dict[str, Residency] = {}
        self._clock_unix = clock_unix
        self._reading_since_s = clock_unix()
        self._unread_text_seen_s = float("-inf")
        if reader is not None and index is not None:
            self.use_prompts(reader, index)
        for worker in workers:
            self.add(worker)

    @property
    def counts_as_we_do(self) -> bool:
        """Whether its workers' prompt token counts should equal ours.

        A generic OpenAI server may count in ways that nobody tells (hidden instructions, images, a
        price list's tokens). Its hits are found by what we routed there, in our own tokens.
        """
        return self.engine != "openai"

    def serves(self, name: str) -> bool:
        """Whether clients may ask this pool for a model, alias or adapter of that name."""
        return name in self.models or name in self.aliases or name in self.adapters

    def adapter_of(self, name: str) -> str:
        """Return the adapter that a name stands for; empty for models and aliases."""
        if name not in self.adapters or name in self.models or name in self.aliases:
            return ""
        return name

    def adapters_served(self) -> set[str]:
        """Return the adapters that a worker has now."""
        return {name for worker in self.workers.values() for name in worker.adapters}

    @property
    def block_size(self) -> int:
        """Tokens per block of the pool's index."""
        return self.index.block_size if self.index else DEFAULT_BLOCK_SIZE

    def use_prompts(self, reader: PromptReader, index: Index) -> None:
        """Read prompts from here on; call it once tokenizer and block size are known."""
        self.reader = reader
        self.index = index
        self._reading_since_s = self._clock_unix()
        self._residencies.clear()
        for worker in self.workers.values():
            self._fit_block_size(worker)

    def add(self, worker: Worker) -> None:
        """Add a worker.

        Raises:
            ValueError: If the id is taken.
        """
        if worker.id in self.workers:
            raise ValueError(f"worker id {worker.id!r} is taken in pool {self.name!r}")
        self.workers[worker.id] = worker
        load = worker.books.load
        load.worker, load.max_batched_tokens = worker.id, worker.max_batched_tokens
        self.ring.add(worker.id)
        self._fit_block_size(worker)

    def remove(self, worker_id: str) -> Worker | None:
        """Remove a worker and what it held; requests in flight there keep their books."""
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            self.ring.remove(worker_id)
            self.forget(worker)
            self._residencies.pop(worker_id, None)
        return worker

    def drain(self, worker_id: str, *, draining: bool = True) -> None:
        """Stop (or resume) sending new requests to a worker.

        Raises:
            KeyError: If the pool has no such worker.
        """
        self.workers[worker_id].draining = draining

    def set_mode(self, worker: Worker, mode: Mode) -> None:
        """Change how a worker's residency is known; what was believed before is dropped."""
        if mode != worker.mode:
            worker.mode = mode
            self.forget(worker)

    def forget(self, worker: Worker) -> None:
        """Drop what is believed about a worker's cache: new epoch, reset, removal."""
        residency = self._residencies.pop(worker.id, None)
        if residency is not None:
            residency.clear()
        if self.index is not None:
            self.index.clear(worker.id)
        worker.mirror.clear()

    def residency(self, worker: Worker) -> Residency | None:
        """Return the model of a worker that sends no events; None for the others."""
        if worker.mode != "approximate" or self.index is None or not self.is_readable(worker):
            return None
        residency = self._residencies.get(worker.id)
        if residency is None:
            capacity_tokens = worker.capacity_tokens or DEFAULT_CAPACITY_TOKENS
            capacity = max(1, capacity_tokens // self.block_size)
            residency = Residency(self.index, worker.id, capacity)
            self._residencies[worker.id] = residency
        return residency

    def is_readable(self, worker: Worker) -> bool:
        """Whether our block hashes mean anything for this worker."""
        if worker.mode == "text" or worker.is_diverged or worker.is_apart:
            return False
        return worker.block_size is None or worker.block_size % self.block_size == 0

    def may_hold_unread_text(self, now_s: float) -> bool:
        """Whether workers may hold text that this process never read, or has forgotten.

        So it is while workers tell of blocks from before this process began to read, after the
        memory of text overflowed, and for a while after a worker was found to hold such text.
        """
        if now_s - self._unread_text_seen_s < UNREAD_TEXT_S:
            return True
        if self.reader is None or self.index is None or not self.index.num_blocks:
            return False
        return self.reader.has_forgotten or any(
            worker.mode == "exact"
            and (worker.epoch is None or worker.epoch < self._reading_since_s)
            and any(self.index.blocks_by_tier(worker.id).values())
            for worker in self.workers.values()
        )

    def saw_unread_text(self, now_s: float) -> None:
        """Note that a worker held text which this process had not read."""
        self._unread_text_seen_s = now_s

    def _fit_block_size(self, worker: Worker) -> None:
        worker.books.block_size = self.block_size
        worker.mirror = LruMirror(self.block_size)
