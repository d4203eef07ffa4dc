"""Prompts kept so that they can be warmed again: token ids of what is reused, and nothing else.

Only pools with ``keep_warm.store: true`` have any. Kept per tenant, never logged, bounded in bytes;
what nobody asks for expires, another version takes the place of the one before, and ``purge``
forgets at once.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.telemetry.decision_log import hashed_key
from gateway.warm.items import Item
from prefix_index.blocks import BlockHash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gateway.routing.dispatch import Plan, Ticket
    from gateway.warm.shareable import Shareable
    from prefix_index.draft import Prompt

# 16 million tokens in one process: thousands of documents.
MAX_BYTES = 64 << 20
# What nobody asked for since then is not hot: a working day's half.
EXPIRES_S = 4 * 3600.0
# Of one entry beside its ids.
ENTRY_BYTES = 600
# Workers remembered per entry: those that served it last.
MAX_WORKERS = 8
# Shorter prefixes are computed sooner than they are looked after; the grain of what is known to be
# shared.
MIN_TOKENS = 512
# Kinds of identity that an application chose to name a document; others may name a person, and are
# shown as their hash.
NAMED = frozenset({"document", "knowledge_base"})


@dataclass(slots=True)
class Stored:
    """One prefix.

    Attributes:
        pool: Name of its pool.
        ring_key: Key of its requests.
        kind: Kind of that key.
        value: Value of that key: a document's id, a session's, a hash.
        tenant: Whose it is.
        version: Of the document; empty = none was told.
        model: Model or adapter that its requests name.
        salt: Isolation key of its requests.
        ids: Its tokens.
        end: Its last block.
        used_s: Last request (monotonic).
        is_pinned: Whether it stays until it is purged or has another version.
        workers: Worker id -> when it served it last; the oldest first.
    """

    pool: str
    ring_key: str
    kind: str
    value: str
    tenant: str
    version: str
    model: str
    salt: str
    ids: array[int]
    end: BlockHash
    used_s: float
    is_pinned: bool = False
    workers: dict[str, float] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Memory it takes, about."""
        return len(self.ids) * self.ids.itemsize + ENTRY_BYTES

    def item(self, copies: int = 1) -> Item:
        """Return it as an item to be warmed."""
        shown = self.value if self.kind in NAMED else hashed_key(self.ring_key)
        names = (self.pool, self.tenant, f"{self.kind}:{shown}")
        return Item(
            id="/".join(name for name in names if name),
            version=self.version,
            kind="prefix",
            model=self.model,
            token_ids=tuple(self.ids),
            copies=copies,
            tenant=self.tenant,
            salt=self.salt,
        )


class PromptStore:
    """The stored prefixes of one process; event loop only.

    Args:
        clock: Monotonic seconds.
        max_bytes: Bound of all of them.
        expires_s: How long one is kept that nobody asks for.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_bytes: int = MAX_BYTES,
        expires_s: float = EXPIRES_S,
    ) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._expires_s = expires_s
        # Least recently used first.
        self._entries: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self._tenant_bytes: Counter[str] = Counter()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Stored]:
        return iter(list(self._entries.values()))

    def get(self, pool: str, ring_key: str) -> Stored | None:
        """Return what is stored under a key."""
        return self._entries.get((pool, ring_key))

    def observe(self, plan: Plan, ticket: Ticket, shared_tokens: int) -> None:
        """Take note of a finished request; a look-up where nothing is new.

        Args:
            plan: With its prompt.
            ticket: Of the attempt.
            shared_tokens: Leading tokens that had been computed before.
        """
        prompt = plan.prompt
        if prompt is None or shared_tokens < MIN_TOKENS:
            return
        key = plan.pool.name, plan.key.ring_key
        num_blocks = shared_tokens // prompt.block_size
        entry = self._entries.get(key)
        if entry is not None and not self._is_new(entry, prompt, num_blocks):
            self._touch(key, entry, ticket.worker.id)
            return
        stored = Stored(
            plan.pool.name,
            plan.key.ring_key,
            plan.key.kind,
            plan.key.value,
            plan.inbound.tenant,
            version_of(plan.key.value),
            plan.inbound.model,
            plan.inbound.cache_salt,
            prompt.token_ids[: num_blocks * prompt.block_size],
            prompt.block_hashes[num_blocks - 1],
            self._clock(),
        )
        self._put(stored, ticket.worker.id)

    def add(self, found: Shareable) -> None:
        """Keep an item that an operator had warmed."""
        item = found.item
        before = self._entries.get((found.pool.name, found.ring_key))
        kind, value = key_parts(found.ring_key, item.tenant)
        stored = Stored(
            found.pool.name,
            found.ring_key,
            kind,
            value,
            item.tenant,
            item.version or version_of(value),
            item.model,
            item.salt,
            found.token_ids[: found.num_tokens],
            found.hashes[-1],
            self._clock(),
            item.pin,
            {} if before is None else before.workers,
        )
        self._put(stored, None)

    def expire(self) -> int:
        """Drop what nobody asked for in time; return how many."""
        limit_s = self._clock() - self._expires_s
        gone = [k for k, e in self._entries.items() if e.used_s < limit_s and not e.is_pinned]
        for key in gone:
            self._drop(key)
        return len(gone)

    def forget(self, is_meant: Callable[[Stored], bool]) -> list[Stored]:
        """Forget entries for good; return them."""
        gone = [(key, entry) for key, entry in self._entries.items() if is_meant(entry)]
        for key, _ in gone:
            self._drop(key)
        return [entry for _, entry in gone]

    def _is_new(self, entry: Stored, prompt: Prompt, num_blocks: int) -> bool:
        """Whether a prompt shares more than is stored, or something else."""
        length = len(entry.ids) // prompt.block_size
        if num_blocks > length:
            return True
        hashes = prompt.block_hashes
        # A prompt that ends its own way behind what others share is no reason to keep less of it.
        return len(hashes) < length or hashes[length - 1] != entry.end

    def _touch(self, key: tuple[str, str], entry: Stored, worker_id: str | None) -> None:
        entry.used_s = self._clock()
        self._entries.move_to_end(key)
        if worker_id is not None:
            entry.workers.pop(worker_id, None)
            entry.workers[worker_id] = entry.used_s
            while len(entry.workers) > MAX_WORKERS:
                del entry.workers[next(iter(entry.workers))]

    def _put(self, stored: Stored, worker_id: str | None) -> None:
        key = stored.pool, stored.ring_key
        before = self._entries.get(key)
        if before is not None:
            stored.workers = before.workers
            stored.is_pinned = stored.is_pinned or before.is_pinned
            self._drop(key)
        self._drop_older_versions(stored)
        self._entries[key] = stored
        self.num_bytes += stored.num_bytes
        self._tenant_bytes[stored.tenant] += stored.num_bytes
        self._touch(key, stored, worker_id)
        while self.num_bytes > self._max_bytes and len(self._entries) > 1:
            self._evict()

    def _drop_older_versions(self, stored: Stored) -> None:
        """Another version of a document is in use: the one before is not kept warm any more."""
        if not stored.version:
            return
        name = name_of(stored.value)
        older = [
            key
            for key, entry in self._entries.items()
            if entry.tenant == stored.tenant
            and entry.pool == stored.pool
            and entry.kind == stored.kind
            and entry.version != stored.version
            and name_of(entry.value) == name
        ]
        for key in older:
            self._drop(key)

    def _evict(self) -> None:
        """Drop the least recently used entry of who has most, so that nobody displaces others."""
        largest = max(self._tenant_bytes, key=self._tenant_bytes.__getitem__)
        entries = self._entries.items()
        oldest = next((k for k, e in entries if e.tenant == largest and not e.is_pinned), None)
        self._drop(next(iter(self._entries)) if oldest is None else oldest)

    def _drop(self, key: tuple[str, str]) -> None:
        gone = self._entries.pop(key)
        self.num_bytes -= gone.num_bytes
        self._tenant_bytes[gone.tenant] -= gone.num_bytes
        if not self._tenant_bytes[gone.tenant]:
            del self._tenant_bytes[gone.tenant]


def key_parts(ring_key: str, tenant: str) -> tuple[str, str]:
    """Return kind and value of a key on the ring, as ``affinity_key`` puts it together."""
    rest = ring_key[len(f"{len(tenant)}:{tenant}|") :]
    kind, _, value = rest.partition("|")
    return kind, value


def version_of(value: str) -> str:
    """Return the version in a document's identity (``id@version``); empty if it has none."""
    name, at, version = value.rpartition("@")
    return version if name and at else ""


def name_of(value: str) -> str:
    """Return a document's identity without its version."""
    name, at, _ = value.rpartition("@")
    return name if name and at else value
