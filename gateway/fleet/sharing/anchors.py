"""Anchors of known text, shared: a gateway recognises a document that only another one has read.

Hashes only; no text leaves the process. See ``prefix_index/anchors.py``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from prefix_index.anchors import Anchors
from prefix_index.replica.shared_map import MAX_VALUE_BYTES, SharedMap
from prefix_index.replica.tasks import run_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.blocks import BlockHash
    from prefix_index.replica.link import Link

# Prompts' worth of new links in Redis: a few KB each, 40 KB for 128 KB of text nobody had read.
_MAX_PROMPTS: Final = 2048
_HAND_OVER_EVERY_S: Final = 0.05
# Prompts that wait to be handed over, and links of one entry: within the map's bound.
_MAX_NEW: Final = 256
_MAX_LINKS: Final = 1024
_HASH_BYTES: Final = 16

_Links = list[tuple[bytes, bytes]]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Links).decode


class SharedAnchors(Anchors):
    """Anchors that others hear of, and that hear of others'. ``add`` from any thread.

    Args:
        link: Connection.
        pool: Name of the pool; links and hashes mean the same to all its gateways.
        max_bytes: Bound of the anchors in this process.

    Attributes:
        map: What carries them.
        decode_errors: Shared entries that are none.
    """

    def __init__(self, link: Link, pool: str, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.decode_errors = 0
        self.map = SharedMap(
            link,
            f"{pool}/anchors",
            max_entries=_MAX_PROMPTS,
            first_wins=False,
            on_entry=self._heard,
        )
        self._new: deque[_Links] = deque(maxlen=_MAX_NEW)

    def add(
        self,
        chain: Sequence[bytes],
        hashes: Sequence[BlockHash],
        ends: Sequence[tuple[int, int]],
        block_size: int,
    ) -> None:
        """Remember a prompt, and tell the others the part of it that was new."""
        with self._lock:
            is_known = [link in self._links.entries for link in chain]
        super().add(chain, hashes, ends, block_size)
        with self._lock:
            entries = self._links.entries
            new = [
                (link, b"".join(entries[link]))
                for link, known in zip(chain, is_known, strict=True)
                if not known and link in entries
            ]
        if new:
            self._new.append(new[:_MAX_LINKS])

    async def run(self) -> None:
        """Carry anchors until cancelled."""
        await run_together(self.map.run(), self._hand_over())

    async def _hand_over(self) -> None:
        """Give the map what threads added: it is the event loop's."""
        while True:
            while self._new:
                new = self._new.popleft()
                self.map.put(new[0][0], _encode(new))
            await asyncio.sleep(_HAND_OVER_EVERY_S)

    def _heard(self, _key: bytes, value: bytes) -> None:
        try:
            links = _decode(value[:MAX_VALUE_BYTES])
        except msgspec.MsgspecError:
            self.decode_errors += 1
            return
        if any(len(link) != _HASH_BYTES or len(data) % _HASH_BYTES for link, data in links):
            self.decode_errors += 1
            return
        with self._lock:
            for link, data in reversed(links):
                steps = range(0, len(data), _HASH_BYTES)
                self._links.put(link, [data[at : at + _HASH_BYTES] for at in steps])
