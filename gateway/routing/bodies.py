"""Requests that came before, byte for byte: what was read of their bodies is not read again.

Clients repeat themselves: retries, polling agents, evaluations, one question asked by many. A body
whose every byte equals that of an earlier one of the same tenant parses to the same document, and
in the same pool it has the same tokens. The bytes are compared, not their hash alone: what is
checked here must be what is forwarded.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from prefix_index.draft import Prompt
    from prefix_index.prompts import PromptReader

# Bodies that are kept: their bytes, and about as much again for the document.
MAX_BYTES = 64 << 20
# Small bodies are mostly objects, which the garbage collector looks at.
MAX_BODIES = 8192

_Key = tuple[str, str, int]
_Identity = tuple["PromptReader", str, str]


class KnownBody:
    """A body and what was read of it.

    Attributes:
        raw: Its bytes.
        document: As parsed and checked; shared by all requests with these bytes, never changed.
    """

    __slots__ = ("_prompts", "document", "raw")

    def __init__(self, raw: bytes, document: dict[str, Any]) -> None:
        self.raw = raw
        self.document = document
        self._prompts: dict[_Identity, Prompt] = {}

    def prompt(self, reader: PromptReader, adapter: str, salt: str) -> Prompt | None:
        """Return the prompt that a reader made of it, if it has."""
        return self._prompts.get((reader, adapter, salt))

    def remember(self, reader: PromptReader, adapter: str, salt: str, prompt: Prompt) -> None:
        """Keep a prompt, unless another day may make another one of the same body."""
        if reader.is_timeless:
            self._prompts[reader, adapter, salt] = prompt


class KnownBodies:
    """The bodies of recent requests, least recently used first; one event loop only.

    Args:
        max_bytes: Bound on the bytes of all bodies.
        max_bodies: Bound on their number.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, max_bodies: int = MAX_BODIES) -> None:
        self._max_bytes = max_bytes
        self._max_bodies = max_bodies
        self._bodies: OrderedDict[_Key, KnownBody] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._bodies)

    def find(self, tenant: str, surface: str, raw: bytes) -> KnownBody | None:
        """Return an earlier body of a tenant with the same bytes. About 0.1 us per KB.

        Tenants never find each other's: how long an answer took would tell what another one sent.
        """
        key = (tenant, surface, xxh3_64_intdigest(raw))
        known = self._bodies.get(key)
        if known is None or known.raw != raw:
            return None
        self._bodies.move_to_end(key)
        return known

    def add(self, tenant: str, surface: str, raw: bytes, document: dict[str, Any]) -> KnownBody:
        """Keep a body, and return it."""
        known = KnownBody(raw, document)
        key = (tenant, surface, xxh3_64_intdigest(raw))
        before = self._bodies.pop(key, None)
        if before is not None:
            self.num_bytes -= len(before.raw)
        self._bodies[key] = known
        self.num_bytes += len(raw)
        while self.num_bytes > self._max_bytes or len(self._bodies) > self._max_bodies:
            _, oldest = self._bodies.popitem(last=False)
            self.num_bytes -= len(oldest.raw)
        return known
