"""The form in which each tenant's tool sets were first seen.

``FirstSeen`` is all that the rules know of it, so that a store shared between replicas can stand in
for the memory of this process.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

# Agents cycle through a handful of sets per tenant; 4,096 serve a thousand tenants.
_MAX_SETS = 4096
# A set of 50 tools takes 10 to 50 KB.
_MAX_BYTES = 64 << 20
# Engines have hardly kept a prefix that nobody sent for an hour, so a new order costs nothing.
_TTL_S = 3600.0


class FirstSeen(Protocol):
    """Remembers one form per tenant and set. Called once per request that has tools."""

    def get(self, tenant: str, set_id: bytes) -> bytes | None:
        """Return the kept form, None if there is none; changes nothing."""

    def keep(self, tenant: str, set_id: bytes, form: bytes) -> bytes:
        """Return the kept form; where there is none, keep and return ``form``."""


class _Entry(NamedTuple):
    form: bytes
    used_s: float


class FirstSeenMemory:
    """First-seen forms of one process: bounded in number and bytes, forgotten when unused.

    Args:
        clock: Monotonic seconds.
        ttl_s: A form that nobody asked for this long is forgotten.
        max_sets: Most forms kept; the least recently used goes first.
        max_bytes: Most bytes of forms kept.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        ttl_s: float = _TTL_S,
        max_sets: int = _MAX_SETS,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_sets = max_sets
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, bytes], _Entry] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tenant: str, set_id: bytes) -> bytes | None:
        """Return the kept form, None if there is none or it was not used for too long."""
        entry = self._entries.get((tenant, set_id))
        if entry is None or self._clock() - entry.used_s > self._ttl_s:
            return None
        return entry.form

    def keep(self, tenant: str, set_id: bytes, form: bytes) -> bytes:
        """Return the kept form, or keep ``form`` as the first seen; either counts as a use."""
        kept = self.get(tenant, set_id)
        now_s = self._clock()
        self._forget((tenant, set_id))
        if kept is None:
            kept = form
        self._entries[tenant, set_id] = _Entry(kept, now_s)
        self.num_bytes += len(kept)
        self._evict(now_s)
        return kept

    def _evict(self, now_s: float) -> None:
        """Forget from the least recently used end: what is too old, and what is too much."""
        while self._entries:
            key, oldest = next(iter(self._entries.items()))
            is_too_much = len(self._entries) > self._max_sets or self.num_bytes > self._max_bytes
            if not is_too_much and now_s - oldest.used_s <= self._ttl_s:
                return
            self._forget(key)

    def _forget(self, key: tuple[str, bytes]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= len(entry.form)


class Peek:
    """Reads a memory without keeping anything in it: for explaining requests never sent."""

    def __init__(self, memory: FirstSeen) -> None:
        self._memory = memory

    def get(self, tenant: str, set_id: bytes) -> bytes | None:
        """Return the kept form, None if there is none."""
        return self._memory.get(tenant, set_id)

    def keep(self, tenant: str, set_id: bytes, form: bytes) -> bytes:
        """Return the kept form, else ``form``; keeps nothing."""
        kept = self._memory.get(tenant, set_id)
        return form if kept is None else kept
