"""One prompt in the blocks of workers of several block sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_index import ChatTemplate, Prompt, PromptReader, PromptTokenizer, hash_blocks, root_hash

ROOT = root_hash("m", salt="tenant")
BODY = {
    "messages": [
        {"role": "system", "content": "You answer briefly. " * 20},
        {"role": "user", "content": "What holds a prefix?"},
    ]
}


@pytest.mark.parametrize("block_size", [1, 16, 32, 64, 1056])
@pytest.mark.parametrize("read_in", [16, 32])
def test_a_prompt_has_the_blocks_that_a_reader_of_that_size_finds(
    tokenizer: PromptTokenizer, template: ChatTemplate, read_in: int, block_size: int
) -> None:
    def read(size: int) -> Prompt:
        return PromptReader(tokenizer, template, model="m", block_size=size).chat(BODY).complete()

    assert read(read_in).hashes_at(block_size) == read(block_size).block_hashes


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 20), st.integers(1, 20))
def test_blocks_of_any_size_are_those_of_the_tokens_from_the_same_root(
    ids: list[int], read_in: int, block_size: int
) -> None:
    prompt = Prompt.from_ids(ids, read_in, ROOT)

    assert prompt.hashes_at(block_size) == hash_blocks(ids, block_size, ROOT)


def test_each_size_is_hashed_once() -> None:
    prompt = Prompt.from_ids(range(100), 16, ROOT)

    assert prompt.hashes_at(16) is prompt.block_hashes
    assert prompt.hashes_at(32) is prompt.hashes_at(32)
    assert len(prompt.hashes_at(8)) == 12
    assert prompt == Prompt.from_ids(range(100), 16, ROOT)


def test_a_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        Prompt.from_ids(range(10), 16, ROOT).hashes_at(0)
