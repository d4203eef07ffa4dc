"""A prompt on its way to tokens: what is known of it at once, and the rest when it is asked for."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from xxhash import xxh3_128_digest

from prefix_index.blocks import BlockHash, hash_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.memo import Segment

# Bytes of text per link of a text chain: 128 links of 0.2 us for a prompt of 128 KB, and two
# prompts that share a document agree to within a paragraph.
TEXT_BLOCK_BYTES = 1024


@dataclass(slots=True)
class Prompt:
    """What an engine computes for a request, in tokens and in blocks.

    Attributes:
        num_tokens: Prompt tokens.
        block_hashes: One per full block, in order.
        block_size: Tokens per block.
        root: Parent of the first block.
        pieces: Tokens of each rendered segment.
    """

    num_tokens: int
    block_hashes: list[BlockHash]
    block_size: int
    root: BlockHash
    pieces: list[array[int]]

    @classmethod
    def from_ids(cls, token_ids: Sequence[int], block_size: int, root: BlockHash) -> Prompt:
        """Return the prompt that has these tokens."""
        ids = array("I", token_ids)
        return cls(len(ids), hash_blocks(ids, block_size, root), block_size, root, [ids])

    @property
    def token_ids(self) -> array[int]:
        """All tokens, put together anew on each call: O(num_tokens)."""
        ids: array[int] = array("I")
        for piece in self.pieces:
            ids += piece
        return ids

    @property
    def segment_ends(self) -> list[int]:
        """Token offset after each rendered segment (usually one per message)."""
        ends = []
        end = 0
        for piece in self.pieces:
            end += len(piece)
            ends.append(end)
        return ends


class Learner(Protocol):
    """Who tokenizes a draft's unknown segments: the reader that made it."""

    block_size: int

    def learn(
        self,
        before: Segment,
        texts: Sequence[str],
        chain_keys: Sequence[bytes],
        text_keys: Sequence[bytes],
    ) -> list[Segment]:
        """Tokenize and remember the segments that follow ``before``."""


class Draft:
    """A prompt of which the known beginning is at hand and the rest is still text."""

    __slots__ = (
        *("_chain_keys", "_data", "_known", "_reader", "_root", "_suffix", "_text_keys", "_texts"),
    )

    def __init__(
        self,
        reader: Learner,
        root: BlockHash,
        known: list[Segment],
        texts: Sequence[str] = (),
        chain_keys: Sequence[bytes] = (),
        text_keys: Sequence[bytes] = (),
        suffix: array[int] | None = None,
        data: bytes = b"",
    ) -> None:
        self._reader = reader
        self._root = root
        self._known = known
        # Of the segments behind the known ones.
        self._texts = texts
        self._chain_keys = chain_keys
        self._text_keys = text_keys
        self._suffix = suffix
        self._data = data

    @property
    def known_tokens(self) -> int:
        """Tokens of the known beginning."""
        return self._known[-1].num_tokens

    @property
    def known_hashes(self) -> list[BlockHash]:
        """Hashes of the full blocks of the known beginning."""
        hashes: list[BlockHash] = []
        for segment in self._known:
            hashes += segment.block_hashes
        return hashes

    @property
    def unknown_chars(self) -> int:
        """Characters that ``complete`` has to tokenize."""
        return sum(map(len, self._texts))

    def text_chain(self) -> list[bytes]:
        """Return chained hashes of the text, one per ``TEXT_BLOCK_BYTES``; no tokens needed.

        Prompts with this root agree in as many links as they share leading text.
        """
        link = self._root
        chain = []
        for start in range(0, len(self._data) - TEXT_BLOCK_BYTES + 1, TEXT_BLOCK_BYTES):
            link = xxh3_128_digest(link + self._data[start : start + TEXT_BLOCK_BYTES])
            chain.append(link)
        return chain

    def complete(self) -> Prompt:
        """Tokenize and hash what is unknown. May run in any thread; releases the GIL meanwhile."""
        segments = self._known
        if self._texts:
            segments = segments + self._reader.learn(
                segments[-1], self._texts, self._chain_keys, self._text_keys
            )
        if self._suffix:
            segments = [*segments, segments[-1].extended(self._suffix, self._reader.block_size)]
        hashes: list[BlockHash] = []
        for segment in segments:
            hashes += segment.block_hashes
        return Prompt(
            segments[-1].num_tokens,
            hashes,
            self._reader.block_size,
            self._root,
            [segment.ids for segment in segments if segment.ids],
        )
