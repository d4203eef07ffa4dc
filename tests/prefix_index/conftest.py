"""The SmolLM2 tokenizer and template, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefix_index import ChatTemplate, PromptTokenizer


@pytest.fixture(scope="session")
def tokenizer(smollm2_dir: Path) -> PromptTokenizer:
    return PromptTokenizer.from_dir(smollm2_dir)


@pytest.fixture(scope="session")
def template(tokenizer: PromptTokenizer) -> ChatTemplate:
    assert tokenizer.template_source is not None
    return ChatTemplate(tokenizer.template_source, special_tokens=tokenizer.special_tokens)
