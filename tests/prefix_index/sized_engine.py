"""An engine with blocks of any size: the events it sends, and what it really holds in tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count

from prefix_index import AllBlocksCleared, BlockRemoved, BlockStored, hash_blocks
from prefix_index.blocks import BlockHash
from prefix_index.index import Tier

Block = tuple[int, ...]
MEDIUM: dict[Tier, str] = {"gpu": "GPU", "cpu": "CPU"}


class SizedEngine:
    """An engine that sends its events to ``emit``.

    Attributes:
        size: Tokens per block.
        held: Tier -> the prompts up to the end of each held block, with their copies.
    """

    def __init__(self, size: int, emit: Callable[..., None]) -> None:
        self.size = size
        self.held: dict[Tier, Counter[Block]] = {"gpu": Counter(), "cpu": Counter()}
        self._emit = emit
        self._names: dict[Block, int] = {}
        self._numbers = count(1)

    def name(self, upto: Block) -> int:
        return self._names.setdefault(upto, next(self._numbers))

    def ends(self, tokens: list[int]) -> list[Block]:
        """Return the prompt up to the end of each of its full blocks."""
        whole = len(tokens) // self.size
        return [tuple(tokens[: (at + 1) * self.size]) for at in range(whole)]

    def stored(self, tokens: list[int], first: int = 0, medium: str = "GPU") -> BlockStored:
        """Return the event of a prompt's full blocks from one on."""
        ends = self.ends(tokens)
        return BlockStored(
            [self.name(end) for end in ends[first:]],
            self.name(ends[first - 1]) if first else None,
            tokens[first * self.size : len(ends) * self.size],
            self.size,
            medium=medium,
        )

    def store(self, tokens: list[int], tier: Tier = "gpu") -> None:
        ends = self.ends(tokens)
        if ends:
            self._emit(self.stored(tokens, medium=MEDIUM[tier]))
            self.held[tier].update(ends)

    def offload(self, tokens: list[int]) -> None:
        """Say, without tokens, that the CPU tier has copies of what is held."""
        ends = [end for end in self.ends(tokens) if self.held["gpu"][end]]
        if ends:
            self._emit(BlockStored([*map(self.name, ends)], None, [], 0, medium="CPU"))
            self.held["cpu"].update(ends)

    def remove(self, number: int, tier: Tier) -> None:
        held = sorted(self.held[tier].elements())
        if held:
            end = held[number % len(held)]
            self._emit(BlockRemoved([self.name(end)], MEDIUM[tier]))
            self.held[tier] -= Counter([end])

    def reset(self) -> None:
        self._emit(AllBlocksCleared())
        self.forget()

    def forget(self) -> None:
        """Hold nothing, as a new process, which also names its blocks anew."""
        self._names.clear()
        for held in self.held.values():
            held.clear()

    def hit_tokens(self, tokens: list[int]) -> int:
        """Return the leading tokens that it holds, in whole blocks of its own."""
        hit = 0
        for end in self.ends(tokens):
            if not any(held[end] for held in self.held.values()):
                break
            hit = len(end)
        return hit

    def copies(self, block_size: int, root: BlockHash) -> dict[BlockHash, Counter[Tier]]:
        """Return the copies of each block of an index of that block size."""
        found: dict[BlockHash, Counter[Tier]] = {}
        for tier, held in self.held.items():
            for end, number in held.items():
                for block in hash_blocks(end, block_size, root)[-(self.size // block_size) :]:
                    found.setdefault(block, Counter())[tier] += number
        return {block: copies for block, copies in found.items() if copies.total()}
