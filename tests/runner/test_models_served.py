"""Models of other families from files to answers: what a client gets is what transformers says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from runner.config import PoolSize, RunnerConfig
from runner.serve import StartError, load
from tests.live_runner import LiveRunner

SIZES: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 2,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
PROMPT = [at * 37 % 4000 + 100 for at in range(70)]
NUM_TOKENS = 20


def make_folder(folder: Path, kind: str, tokenizer_dir: Path) -> Any:
    """Write a random model with the demo model's tokenizer; returns it."""
    name, changes = KINDS[kind]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # The usual tiny initialisation makes every prompt continue alike.
            parameter.mul_(8) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_dir / file, folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_served_model_answers_cold_and_warm_as_transformers_does(
    smollm2_dir: Path, tmp_path: Path, kind: str
) -> None:
    reference = make_folder(tmp_path, kind, smollm2_dir)
    with torch.no_grad():
        output = reference.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    expected = output[0, len(PROMPT) :].tolist()
    config = RunnerConfig(
        model=str(tmp_path), served_model_name=kind, port=0, pool=PoolSize(tokens=512)
    )
    body = {
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    with LiveRunner.start(config) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        answers = [http.post("/v1/completions", json=body).json() for _ in range(2)]
        card = http.get(f"/v1/models/{kind}").json()

    assert len(set(expected)) > 5
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [expected] * 2
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, 64]
    assert (card["max_model_len"], card["parent"]) == (256, None)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", r"config\.json: expected JSON"),
        ("config.json", b"{}", r"config\.json: architecture \(none\); this runner computes"),
        ("model.safetensors", b"\x00" * 20, r"model\.safetensors: damaged or cut short"),
        ("tokenizer.json", b"{}", r"tokenizer\.json cannot be read"),
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json: expected JSON"),
    ],
)
def test_a_damaged_folder_keeps_the_runner_from_starting_with_one_sentence(
    smollm2_dir: Path, tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    make_folder(tmp_path, "qwen3", smollm2_dir)
    (tmp_path / file).write_bytes(content)

    with pytest.raises(StartError, match=message) as caught:
        load(RunnerConfig(model=str(tmp_path), port=0))

    assert "\n" not in str(caught.value)
