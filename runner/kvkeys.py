"""Identity of a block's KV: a chained cryptographic hash over tokens, model and salt.

A collision here would hand out another user's KV, so the chain is BLAKE2b-256 and the pool also
compares token ids. These keys never leave the runner; events carry ``event_hash`` of them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KvKey: TypeAlias = bytes
"""32 bytes."""

_KEY_BYTES = 32

# BLAKE2b's personalisation keeps the three uses apart: no namespace is ever also a block's key.
_NAMESPACE, _ROOT, _BLOCK = b"wl-namespace", b"wl-root", b"wl-block"


def namespace_key(facts: Mapping[str, object]) -> KvKey:
    """Return the identity of everything that makes KV bytes usable: model, dtype, layout."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES, person=_NAMESPACE).digest()


def root_key(namespace: KvKey, *, salt: str = "", adapter: str = "") -> KvKey:
    """Return the parent of every first block; other salts and adapters have other roots.

    Args:
        namespace: Of the base model.
        salt: A client's isolation key.
        adapter: Name and generation of the LoRA adapter (``adapter_identity``), empty for none.
    """
    parts = b"".join(
        len(part).to_bytes(8, "little") + part
        # A client's salt may hold lone surrogates, which JSON allows and UTF-8 does not.
        for part in (salt.encode(errors="surrogatepass"), adapter.encode())
    )
    return hashlib.blake2b(namespace + parts, digest_size=_KEY_BYTES, person=_ROOT).digest()


def adapter_identity(name: str, digest: str) -> str:
    """Return what tells the KV of one adapter from that of all others, and of other weights.

    Args:
        name: What requests call it.
        digest: Over its weights: a name whose weights change begins a new generation.
    """
    return f"{digest} {name}"


def block_key(parent: KvKey, token_bytes: bytes) -> KvKey:
    """Return the key of a full block after ``parent``; see ``pack_tokens``."""
    return hashlib.blake2b(parent + token_bytes, digest_size=_KEY_BYTES, person=_BLOCK).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as unsigned 32-bit little-endian, the form they are hashed in."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(token_bytes: bytes) -> list[int]:
    """Undo ``pack_tokens``."""
    packed = array("I", token_bytes)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def event_hash(key: KvKey) -> int:
    """Return the unsigned 64-bit hash that KV events carry.

    Source: vLLM 0.32 with integer block hashes: the low 64 bits of the digest, big-endian.
    """
    return int.from_bytes(key[-8:], "big")


class AdapterTag(NamedTuple):
    """What KV events say of a LoRA adapter: vLLM's number and name; numbers begin at 1."""

    number: int
    name: str


class BlockChain:
    """Keys and packed tokens of the full blocks of one growing sequence.

    Attributes:
        root: Parent of the first block.
        salt: What the root was salted with; announced with the first block.
        adapter: The LoRA adapter the root is of; announced with every block.
        keys: One per full block seen so far.
        tokens: Their packed token ids.
    """

    __slots__ = ("_block_size", "adapter", "keys", "root", "salt", "tokens")

    def __init__(
        self, root: KvKey, block_size: int, salt: str = "", adapter: AdapterTag | None = None
    ) -> None:
        self.root = root
        self.salt = salt
        self.adapter = adapter
        self.keys: list[KvKey] = []
        self.tokens: list[bytes] = []
        self._block_size = block_size

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add every full block of ``token_ids``, the whole sequence, that is not in yet."""
        size = self._block_size
        for end in range((len(self.keys) + 1) * size, len(token_ids) + 1, size):
            packed = pack_tokens(token_ids[end - size : end])
            self.keys.append(block_key(self.parent(len(self.keys)), packed))
            self.tokens.append(packed)

    def parent(self, index: int) -> KvKey:
        """Return the key before block ``index``."""
        return self.keys[index - 1] if index else self.root

    def copy(self) -> BlockChain:
        """Return a chain that grows on its own."""
        twin = BlockChain(self.root, self._block_size, self.salt, self.adapter)
        twin.keys, twin.tokens = self.keys.copy(), self.tokens.copy()
        return twin
