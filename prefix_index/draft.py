"""A prompt on its way to tokens: what is known of it at once, and the rest when it is asked for."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from prefix_index.anchors import TEXT_BLOCK_BYTES, text_chain
from prefix_index.blocks import BlockHash, hash_blocks, usable_blocks
from prefix_index.view_hits import Match

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.anchors import Anchors
    from prefix_index.memo import Segment


@dataclass(slots=True)
class Prompt:
    """What an engine computes for a request, in tokens and in blocks.

    Attributes:
        num_tokens: Prompt tokens.
        block_hashes: One per full block, in order.
        block_size: Tokens per block.
        root: Parent of the first block.
        pieces: Tokens of each rendered segment.
        last_match: What the last look-up in an index found; for the next one.
    """

    num_tokens: int
    block_hashes: list[BlockHash]
    block_size: int
    root: BlockHash
    pieces: list[array[int]]
    last_match: Match | None = field(default=None, repr=False, compare=False)
    _chains: dict[int, list[BlockHash]] = field(default_factory=dict, repr=False, compare=False)
    _usable_hashes: list[BlockHash] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_ids(cls, token_ids: Sequence[int], block_size: int, root: BlockHash) -> Prompt:
        """Return the prompt that has these tokens."""
        ids = array("I", token_ids)
        return cls(len(ids), hash_blocks(ids, block_size, root), block_size, root, [ids])

    @property
    def usable_hashes(self) -> list[BlockHash]:
        """Those of the blocks that can be a hit; the caller does not change them."""
        if self._usable_hashes is None:
            usable = usable_blocks(self.num_tokens, self.block_size)
            hashes = self.block_hashes
            self._usable_hashes = hashes if len(hashes) <= usable else hashes[:usable]
        return self._usable_hashes

    @property
    def token_ids(self) -> array[int]:
        """All tokens, put together anew on each call: O(num_tokens)."""
        ids: array[int] = array("I")
        for piece in self.pieces:
            ids += piece
        return ids

    def hashes_at(self, block_size: int) -> list[BlockHash]:
        """Return the chain of this prompt in blocks of another size, for workers that have it.

        O(num_tokens) at first, remembered per size; the caller does not change it.

        Raises:
            ValueError: If ``block_size`` is not positive.
        """
        if block_size == self.block_size:
            return self.block_hashes
        chain = self._chains.get(block_size)
        if chain is None:
            chain = self._chains[block_size] = hash_blocks(self.token_ids, block_size, self.root)
        return chain

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
    anchors: Anchors

    def learn(
        self,
        before: Segment,
        texts: Sequence[str],
        chain_keys: Sequence[bytes],
        text_keys: Sequence[bytes],
    ) -> list[Segment]:
        """Tokenize and remember the segments that follow ``before``."""


@dataclass(slots=True)
class Beginning:
    """As much of a prompt as is known before its text is tokenized.

    Attributes:
        hashes: Full blocks; the last ones may belong to another prompt with the same beginning.
        num_tokens: Tokens up to the text that is not covered.
        rest_chars: Text that is not covered, about.
        chain: Chain of the whole text.
    """

    hashes: list[BlockHash]
    num_tokens: int
    rest_chars: int
    chain: list[bytes]


class Draft:
    """A prompt of which the known beginning is at hand and the rest is still text.

    Used by one thread after the other: ``beginning`` before ``complete`` is started.
    """

    __slots__ = (
        *("_chain", "_chain_keys", "_data", "_known", "_reader", "_root", "_suffix"),
        *("_text_keys", "_texts"),
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
        self._chain: list[bytes] | None = None

    @property
    def known_tokens(self) -> int:
        """Tokens of the known segments."""
        return self._known[-1].num_tokens

    @property
    def key(self) -> bytes:
        """Identity of the whole prompt while some of it is unknown; drafts with it are equal."""
        return self._chain_keys[-1]

    @property
    def unknown_chars(self) -> int:
        """Characters that ``complete`` has to tokenize."""
        return sum(map(len, self._texts))

    def beginning(self, *, by_text: bool = True) -> Beginning:
        """Find what is known without tokenizing.

        Args:
            by_text: Look by blocks of text too, and have ``complete`` anchor the rest; for prompts
                with much unknown text, since it costs 1 us per KB.
        """
        hashes = _all_hashes(self._known)
        if not by_text:
            return Beginning(hashes, self.known_tokens, self.unknown_chars, [])
        self._chain = chain = text_chain(self._data, self._root)
        anchored, num_links = self._reader.anchors.find(chain)
        if len(anchored) <= len(hashes):
            return Beginning(hashes, self.known_tokens, self.unknown_chars, chain)
        rest_chars = len(self._data) - num_links * TEXT_BLOCK_BYTES
        num_tokens = len(anchored) * self._reader.block_size
        return Beginning(hashes + anchored[len(hashes) :], num_tokens, rest_chars, chain)

    def complete(self) -> Prompt:
        """Tokenize and hash what is unknown. May run in any thread; releases the GIL meanwhile."""
        segments = self._known
        if self._texts:
            segments = segments + self._reader.learn(
                segments[-1], self._texts, self._chain_keys, self._text_keys
            )
        if self._suffix:
            segments = [*segments, segments[-1].extended(self._suffix, self._reader.block_size)]
        hashes = _all_hashes(segments)
        if self._chain:
            self._anchor(self._chain, segments, hashes)
        return Prompt(
            segments[-1].num_tokens,
            hashes,
            self._reader.block_size,
            self._root,
            [segment.ids for segment in segments if segment.ids],
        )

    def _anchor(self, chain: list[bytes], segments: list[Segment], hashes: list[BlockHash]) -> None:
        at = len(self._data) - sum(len(text.encode()) for text in self._texts)
        # Up to the end of what was known, then segment by segment.
        ends = [(at, self._known[-1].num_tokens)]
        for text, segment in zip(self._texts, segments[len(self._known) :], strict=False):
            at += len(text.encode())
            ends.append((at, segment.num_tokens))
        self._reader.anchors.add(chain, hashes, ends, self._reader.block_size)


def _all_hashes(segments: Sequence[Segment]) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    for segment in segments:
        hashes += segment.block_hashes
    return hashes
