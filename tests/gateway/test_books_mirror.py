"""The mirror of a worker's LRU order knows the age of what would be evicted next."""

from __future__ import annotations

from gateway.routing.mirror import CHECK_S, GRAIN_TOKENS, MAX_ENTRIES, LruMirror
from prefix_index.blocks import BlockHash, hash_blocks, root_hash

BLOCK = 16
ROOT = root_hash("m")


def chain(first_token: int, num_tokens: int) -> list[BlockHash]:
    return hash_blocks(range(first_token, first_token + num_tokens), BLOCK, ROOT)


def everything(_: BlockHash) -> bool:
    return True


def test_the_oldest_prompt_gives_the_age_until_it_is_used_again() -> None:
    mirror = LruMirror(BLOCK)
    old, new = chain(0, 600), chain(5000, 600)
    mirror.touch(old, 10.0)
    mirror.touch(new, 20.0)
    assert mirror.oldest_age_s(30.0, everything) == 20.0

    mirror.touch(old, 25.0)
    assert mirror.oldest_age_s(30.0, everything) == 10.0


def test_what_the_index_no_longer_holds_is_forgotten() -> None:
    mirror = LruMirror(BLOCK)
    old, new = chain(0, 600), chain(5000, 600)
    mirror.touch(old, 10.0)
    mirror.touch(new, 20.0)
    held = set(new)

    assert mirror.oldest_age_s(30.0, held.__contains__) == 10.0
    # For a moment the answer is believed, then looked up again.
    assert mirror.oldest_age_s(30.0, lambda _: False) == 10.0
    assert mirror.oldest_age_s(30.0 + CHECK_S, lambda _: False) == 0.0
    assert len(mirror) == 0


def test_the_deepest_block_of_a_prompt_leaves_first() -> None:
    mirror = LruMirror(BLOCK)
    hashes = chain(0, 4 * GRAIN_TOKENS)
    mirror.touch(hashes, 10.0)
    asked: list[BlockHash] = []

    def is_held(block: BlockHash) -> bool:
        asked.append(block)
        return False

    mirror.oldest_age_s(11.0, is_held)
    assert asked == hashes[GRAIN_TOKENS // BLOCK - 1 :: GRAIN_TOKENS // BLOCK][::-1]


def test_short_prompts_count_and_shorter_than_a_block_do_not() -> None:
    mirror = LruMirror(BLOCK)
    mirror.touch(chain(0, 32), 1.0)
    assert len(mirror) == 1
    mirror.touch([], 2.0)
    assert mirror.oldest_age_s(3.0, everything) == 2.0
    mirror.clear()
    assert mirror.oldest_age_s(3.0, everything) == 0.0


def test_it_stays_bounded_when_nobody_asks() -> None:
    mirror = LruMirror(BLOCK)
    for prompt in range(MAX_ENTRIES + 100):
        mirror.touch([prompt.to_bytes(16, "big")], float(prompt))

    assert len(mirror) == MAX_ENTRIES
