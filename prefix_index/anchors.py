"""Known text without known segments: which blocks a text's beginning came to in an earlier prompt.

Two prompts that share a document but not a whole message share no segment. Their texts agree all
the same, block of text by block of text, and an *anchor* says which block hashes belong to each of
them. Where a text block ends in tokens is interpolated within its segment, so the last of the
hashes found may belong to what follows: good enough to route by while the tokens are on their way.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from xxhash import xxh3_128_digest

from prefix_index.memo import HASH_BYTES, TEXT_ENTRY_BYTES, Lru

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.blocks import BlockHash

# 512 links of 0.2 us for a prompt of 128 KB, and prompts that share a document agree to within a
# sentence or two.
TEXT_BLOCK_BYTES = 256


def text_chain(data: bytes, root: BlockHash) -> list[bytes]:
    """Return chained hashes of a text, one per full ``TEXT_BLOCK_BYTES``.

    Texts with this root agree in as many links as they share leading blocks of text.
    """
    link = root
    chain = []
    for start in range(0, len(data) - TEXT_BLOCK_BYTES + 1, TEXT_BLOCK_BYTES):
        link = xxh3_128_digest(link + data[start : start + TEXT_BLOCK_BYTES])
        chain.append(link)
    return chain


class Anchors:
    """Link of a text chain -> hashes of the token blocks that end in its text. Any thread.

    Least recently used links leave when ``max_bytes`` are used up.
    """

    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._links: Lru[Sequence[BlockHash]] = Lru(max_bytes, _link_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._links.num_bytes

    def find(self, chain: Sequence[bytes]) -> tuple[list[BlockHash], int]:
        """Return the block hashes of the known beginning of a text, and how many links it has."""
        hashes: list[BlockHash] = []
        num_links = 0
        with self._lock:
            for link in chain:
                blocks = self._links.entries.get(link)
                if blocks is None:
                    break
                hashes += blocks
                num_links += 1
            self._refresh(chain[:num_links])
        return hashes, num_links

    def add(
        self,
        chain: Sequence[bytes],
        hashes: Sequence[BlockHash],
        ends: Sequence[tuple[int, int]],
        block_size: int,
    ) -> None:
        """Remember a prompt.

        Args:
            chain: Its text's chain.
            hashes: Its full blocks.
            ends: Bytes of text and tokens up to the end of each segment.
            block_size: Tokens per block.
        """
        cuts = [0, *(tokens // block_size for tokens in _tokens_at_links(len(chain), ends))]
        with self._lock:
            # Last first, so that a text's beginning outlives its end.
            for at in range(len(chain) - 1, -1, -1):
                self._links.put(chain[at], hashes[cuts[at] : cuts[at + 1]])

    def _refresh(self, chain: Sequence[bytes]) -> None:
        for link in reversed(chain):
            self._links.entries.move_to_end(link)


def _tokens_at_links(num_links: int, ends: Sequence[tuple[int, int]]) -> list[int]:
    """Interpolate how many tokens the text has up to the end of each link."""
    tokens = []
    at, (begin_bytes, begin_tokens), (end_bytes, end_tokens) = 0, (0, 0), ends[0]
    for link in range(1, num_links + 1):
        offset = link * TEXT_BLOCK_BYTES
        while offset > end_bytes and at + 1 < len(ends):
            at += 1
            begin_bytes, begin_tokens = end_bytes, end_tokens
            end_bytes, end_tokens = ends[at]
        share = (offset - begin_bytes) / max(1, end_bytes - begin_bytes)
        tokens.append(begin_tokens + int(share * (end_tokens - begin_tokens)))
    return tokens


def _link_bytes(hashes: Sequence[BlockHash]) -> int:
    return TEXT_ENTRY_BYTES + len(hashes) * HASH_BYTES
