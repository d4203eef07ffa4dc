"""Bodies become the prompts that a real vLLM made of them; recorded, so that none is needed."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from prefix_index import ChatTemplate, PromptReader, PromptTokenizer, TemplateRefusedError
from prefix_index.engines import EngineKind
from tests import zoo

FILES = sorted((Path(__file__).parent.parent / "data" / "vllm-rendering").glob("*.jsonl"))


def recorded(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def reader(name: str, tokenizer: PromptTokenizer, engine: EngineKind) -> PromptReader:
    source = tokenizer.template_source if name == "smollm2" else zoo.templates()[name]
    assert source is not None
    template = ChatTemplate(source, special_tokens=tokenizer.special_tokens)
    return PromptReader(tokenizer, template, model="m", block_size=32, engine=engine)


def num_equal(file: Path, tokenizer: PromptTokenizer, engine: EngineKind) -> int:
    source = reader(file.stem, tokenizer, engine)
    equal = 0
    for record in recorded(file):
        try:
            ids = source.chat(record["body"]).complete().token_ids
        except TemplateRefusedError:
            continue
        digest = sha256(",".join(map(str, ids)).encode()).hexdigest()
        equal += (len(ids), digest) == (record["num_tokens"], record["ids_sha256"])
    return equal


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_recorded_body_has_the_token_ids_that_vllm_computed(
    file: Path, tokenizer: PromptTokenizer
) -> None:
    assert num_equal(file, tokenizer, "vllm") == len(recorded(file)) > 50


def test_other_kinds_of_engine_do_not_print_tools_as_vllm_does(tokenizer: PromptTokenizer) -> None:
    (file,) = (file for file in FILES if file.stem == "qwen3")
    for kind in ("sglang", "openai"):
        assert num_equal(file, tokenizer, kind) < len(recorded(file))
