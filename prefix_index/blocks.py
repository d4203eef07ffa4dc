"""Token ids -> chained block hashes, the identity of a prompt's prefix.

A block hash names a block *and everything before it*. The hashes are for routing only: a collision
costs one bad guess, never another user's text, so a fast non-cryptographic hash is enough. The
root, which carries model, adapter and tenant salt, is hashed with BLAKE2b, since tenants could aim
at a collision there.
"""

from __future__ import annotations

import sys
from array import array
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias

from xxhash import xxh3_128_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

BlockHash: TypeAlias = bytes
"""16 bytes; roots and blocks share the type and are told apart by ``is_root``."""

# Six bytes that start every root: a block hash starts with them once in 2**48, and the worst that
# follows is one block that stays visible after its parent left.
_ROOT_MARK = b"\xffroot\xff"
# The rest of the 16 bytes.
_ROOT_DIGEST_BYTES = 10
# u32 max is no token id of any vocabulary, so it can stand between ids and extras.
_EXTRAS_MARK = b"\xff\xff\xff\xff"


def root_hash(model: str, *, adapter: str = "", salt: str = "") -> BlockHash:
    """Return the parent of every first block of a prompt with this identity.

    Args:
        model: Name (and whatever else tells weights and tokenizer apart) of the model.
        adapter: LoRA adapter name, empty for the base model.
        salt: Isolation key of a tenant; distinct salts never share blocks.
    """
    return _root_hash(model, adapter, salt)


def is_root(block_hash: BlockHash) -> bool:
    """Say whether the hash is a root, that is: no block, nothing that can be evicted."""
    return block_hash.startswith(_ROOT_MARK)


def hash_blocks(
    token_ids: Sequence[int] | array[int], block_size: int, parent: BlockHash
) -> list[BlockHash]:
    """Hash every full block of ``token_ids``, each chained to its parent.

    Args:
        token_ids: Prompt tokens, each in 0..2**32-1. Shape: [num_tokens].
        block_size: Tokens per block; must equal the worker's block size.
        parent: Hash of the block before the first one, or a root.

    Returns:
        One 16-byte hash per full block. Shape: [num_tokens // block_size].

    Raises:
        ValueError: If ``block_size`` is not positive.
        OverflowError: If a token id does not fit 32 bits.

    Source: vLLM v1 automatic prefix caching, "hash of parent + block tokens + extra keys"; the
    function is ours, since engine hashes depend on engine seed and version.
    """
    if block_size <= 0:
        raise ValueError(f"block_size must be positive, not {block_size}")
    packed = pack_ids(token_ids)
    step = 4 * block_size
    hashes = []
    for start in range(0, len(packed) - step + 1, step):
        parent = xxh3_128_digest(parent + packed[start : start + step])
        hashes.append(parent)
    return hashes


def hash_block(
    token_ids: Sequence[int] | array[int], parent: BlockHash, extras: bytes = b""
) -> BlockHash:
    """Hash one full block that may carry typed extras (multimodal items, prompt embeddings).

    Without extras the result equals ``hash_blocks`` of the same block.
    """
    packed = pack_ids(token_ids)
    return xxh3_128_digest(parent + packed + (_EXTRAS_MARK + extras if extras else b""))


def usable_blocks(num_tokens: int, block_size: int) -> int:
    """Return how many leading blocks can be a hit at most.

    An engine recomputes at least the last token of a prompt to get its logits, so a prompt of
    exactly n blocks can hit n - 1. Source: vLLM 0.32, captured (``b32-duplicate``).
    """
    return max(num_tokens - 1, 0) // block_size


def pack_ids(token_ids: Sequence[int] | array[int]) -> bytes:
    """Return the ids as little-endian u32, the form that is hashed on every machine."""
    ids = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()


# One entry per (adapter, tenant) in use; beyond it the root is computed again (2 us).
@lru_cache(maxsize=4096)
def _root_hash(model: str, adapter: str, salt: str) -> BlockHash:
    digest = blake2b(digest_size=_ROOT_DIGEST_BYTES)
    for tag, value in ((b"model", model), (b"adapter", adapter), (b"salt", salt)):
        raw = value.encode("utf-8", "surrogatepass")
        # The length in front keeps ("ab", "c") and ("a", "bc") apart.
        digest.update(tag + len(raw).to_bytes(8, "little") + raw)
    return _ROOT_MARK + digest.digest()
