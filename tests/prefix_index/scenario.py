"""Engines that store, evict, reset and crash, whose frames get lost on the way; and their truth.

The engines speak real frames: maps or arrays, unsigned, signed or byte hashes, salts, placeholders
of lower tiers. What becomes of the frames is up to whoever drives them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec

from prefix_index.blocks import BlockHash, hash_blocks, root_hash
from prefix_index.index import TIERS, Index, Tier

BLOCK = 4
MODEL = "m"
Name = int | bytes
MEDIA: dict[Tier, dict[str, str]] = {
    "gpu": {"vllm": "GPU", "sglang": "GPU"},
    "cpu": {"vllm": "CPU", "sglang": "CPU_PINNED"},
    "disk": {"vllm": "STORAGE", "sglang": "DISK"},
}


@dataclass(frozen=True)
class Block:
    """One block as an engine knows it: its place in a chain, and whose chain it is."""

    name: Name
    parent: Name | None
    tokens: tuple[int, ...]
    chain: tuple[int, ...]
    salt: str

    @property
    def ours(self) -> BlockHash:
        """Our hash of it."""
        return hash_blocks(self.chain, BLOCK, root_hash(MODEL, salt=self.salt))[-1]


@dataclass
class Engine:
    """One engine: what it holds, what it has said, and what of that is still on its way.

    Attributes:
        dialect: ``vllm`` (maps, unsigned hashes), ``vllm-bytes`` (maps, digests), ``vllm-old``
            (arrays) or ``sglang`` (maps, signed hashes, says that it is empty when it starts).
        buffer_batches: Batches that a replay may still have.
        copies: (block, tier) -> copies it holds.
        live: Frames sent and not taken yet.
        is_deaf: Replays find nobody.
    """

    dialect: str
    buffer_batches: int = 8
    copies: Counter[tuple[Block, Tier]] = field(default_factory=Counter)
    live: list[tuple[int, bytes]] = field(default_factory=list)
    is_deaf: bool = False
    _life: int = 0
    _sequence: int = 0
    _pending: list[Any] = field(default_factory=list)
    _buffer: list[tuple[int, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begin()

    @property
    def is_sglang(self) -> bool:
        return self.dialect == "sglang"

    def blocks(self, tokens: list[int], salt: str = "") -> list[Block]:
        """Return the full blocks of a prompt."""
        found: list[Block] = []
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            chain = tuple(tokens[:end])
            parent = found[-1].name if found else None
            found.append(Block(self._name(chain, salt), parent, chain[-BLOCK:], chain, salt))
        return found

    def store(self, tokens: list[int], salt: str = "") -> None:
        """Compute a prompt: what is not there is stored, and one more copy of its last block."""
        chain = self.blocks(tokens, salt)
        missing = [b for b in chain if not self.copies[b, "gpu"]]
        new = missing or chain[-1:]
        if not new:
            return
        # Blocks from the first missing one on are computed again.
        new = chain[chain.index(new[0]) :]
        self._say(self._stored(new, "gpu", salt))
        for block in new:
            self.copies[block, "gpu"] += 1

    def offload(self, number: int) -> None:
        """Copy one block to a lower tier; vLLM announces that without tokens."""
        held = [block for (block, tier), n in self.copies.items() if n and tier == "gpu"]
        if not held:
            return
        block = held[number % len(held)]
        tier: Tier = "cpu" if number % 2 else "disk"
        event = self._stored([block], tier, block.salt)
        if not self.is_sglang and isinstance(event, dict):
            event |= {"token_ids": [], "block_size": 0}
        self._say(event)
        self.copies[block, tier] += 1

    def evict(self, number: int) -> None:
        """Drop one copy of some block, leaf or not."""
        held = [key for key, copies in self.copies.items() if copies]
        if not held:
            return
        block, tier = held[number % len(held)]
        self.copies[block, tier] -= 1
        medium = self._medium(tier)
        if self.dialect == "vllm-old":
            self._say(["BlockRemoved", [block.name], medium])
        else:
            self._say({"type": "BlockRemoved", "block_hashes": [block.name], "medium": medium})

    def reset(self) -> None:
        """Drop the whole cache."""
        self.copies.clear()
        old = self.dialect == "vllm-old"
        self._say(["AllBlocksCleared"] if old else {"type": "AllBlocksCleared"})

    def crash(self) -> None:
        """Lose everything and start again: other names, and sequences from 0."""
        self._life += 1
        self._pending.clear()
        self._begin()

    def step(self) -> None:
        """End an engine step: what happened leaves as one batch."""
        if self._pending:
            payload = msgspec.msgpack.encode([float(self._sequence), self._pending, 0])
            self._buffer.append((self._sequence, payload))
            del self._buffer[: -self.buffer_batches]
            self.live.append(self._buffer[-1])
            self._sequence += 1
            self._pending = []

    def replay(self, first: int) -> list[tuple[int, bytes]] | None:
        """Return what the buffer has from a sequence on; None if nobody answers."""
        return None if self.is_deaf else [batch for batch in self._buffer if batch[0] >= first]

    def truth(self) -> dict[BlockHash, dict[Tier, int]]:
        """Return what it holds, in our hashes."""
        held: dict[BlockHash, dict[Tier, int]] = {}
        for (block, tier), number in self.copies.items():
            if number:
                held.setdefault(block.ours, {})[tier] = number
        return held

    def _begin(self) -> None:
        self.copies.clear()
        self._buffer.clear()
        self._sequence = 0
        if self.is_sglang:
            self.reset()
            self.step()

    def _say(self, event: Any) -> None:
        self._pending.append(event)

    def _name(self, chain: tuple[int, ...], salt: str) -> Name:
        digest = sha256(repr((self._life, self.dialect, salt, chain)).encode()).digest()
        if self.dialect == "vllm-bytes":
            return digest
        return int.from_bytes(digest[:8], "big", signed=self.is_sglang)

    def _medium(self, tier: Tier) -> str:
        return MEDIA[tier]["sglang" if self.is_sglang else "vllm"]

    def _stored(self, blocks: list[Block], tier: Tier, salt: str) -> Any:
        names = [block.name for block in blocks]
        tokens: list[Any] = [token for block in blocks for token in block.tokens]
        medium = self._medium(tier)
        extras = [[salt] if salt and block.parent is None else None for block in blocks]
        if self.dialect == "vllm-old":
            parent = blocks[0].parent
            return ["BlockStored", names, parent, tokens, BLOCK, None, medium, None, extras]
        event = {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": blocks[0].parent,
            "token_ids": tokens,
            "block_size": BLOCK,
            "lora_id": None,
            "medium": medium,
        }
        if self.is_sglang:
            # A speculative head: each token with the one after it.
            event["token_ids"] = [[token, token + 1] for token in tokens]
            return event | ({"cache_salt": salt} if salt else {})
        return event | {"lora_name": None, "extra_keys": extras}


class EngineReplay:
    """Stands for ``prefix_index.replay.Replay``: asks an engine without a socket."""

    def __init__(self, engines: dict[str, Engine], endpoint: str, first: int) -> None:
        self.is_complete = False
        self._answer = engines[endpoint].replay(first)

    async def batches(self) -> AsyncGenerator[tuple[int, bytes], None]:
        for batch in self._answer or ():
            yield batch
        self.is_complete = self._answer is not None


def held_by(index: Index, worker: str, blocks: Iterator[BlockHash]) -> dict[BlockHash, set[Tier]]:
    """Return which of these blocks an index credits to a worker, by tier."""
    found: dict[BlockHash, set[Tier]] = {}
    for block in blocks:
        tiers: set[Tier] = {tier for tier in TIERS if index.holds(worker, block, tier)}
        if tiers:
            found[block] = tiers
    return found
