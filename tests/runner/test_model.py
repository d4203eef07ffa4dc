"""The forward pass against transformers, for every supported architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from runner.batch import Chunk
from runner.model import Model
from runner.weights import load_model

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama untied": ("Llama", {"tie_word_embeddings": False}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    ),
    "dynamic rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}},
    ),
    "yarn rope": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN_ROPE}),
    "yarn rope with all its settings": (
        "Llama",
        {
            "rope_parameters": YARN_ROPE
            | {"beta_fast": 8, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.5}
            | {"truncate": False}
        },
    ),
    "yarn rope with its own amplitude": (
        "Llama",
        {"rope_parameters": YARN_ROPE | {"attention_factor": 1.3}},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "mistral with a window": ("Mistral", {"sliding_window": 21, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied, with a window in its last layer": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 10,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 tied, with biases": (
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
    ),
}

# A table that is neither sorted nor adjacent: positions must follow it, not the block ids.
TABLE = [5, 2, 9, 0, 7, 3]


@pytest.fixture(scope="module", params=KINDS, ids=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Model, Any]:
    """A random model of each kind: ours and the reference."""
    name, changes = KINDS[request.param]
    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(11)
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    reference = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            # Norm scales and biases must matter too.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    reference.save_pretrained(folder)
    return load_model(folder, "float32", 1), reference


@torch.no_grad()
def expected_logits(reference: Any, prompt: list[int]) -> torch.Tensor:
    logits: torch.Tensor = reference(torch.tensor([prompt])).logits[0, -1]
    return logits


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 97, (length,), generator=generator).tolist()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 90])
def test_one_chunk_gives_the_reference_logits(pair: tuple[Model, Any], length: int) -> None:
    model, reference = pair
    prompt = prompt_of(length)

    logits, order = model.forward([Chunk(prompt, 0, TABLE, True)], model.new_pool(10, 16))

    assert order == [0]
    torch.testing.assert_close(logits[0], expected_logits(reference, prompt), atol=2e-4, rtol=1e-4)


def test_a_mixed_step_gives_every_sequence_its_reference_logits(pair: tuple[Model, Any]) -> None:
    """Decodes of very different lengths, a later chunk and a first chunk in one call."""
    model, reference = pair
    pool = model.new_pool(32, 16)
    lengths = [70, 3, 65, 40, 22]
    tables = [list(range(at, 30, 5)) for at in range(5)]
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    starts = [69, 2, 64, 16, 0]
    before = [
        Chunk(prompt[:start], 0, table, False)
        for prompt, start, table in zip(prompts, starts, tables, strict=True)
        if start
    ]
    none, _ = model.forward(before, pool)
    assert none.shape == (0, 97)

    chunks = [
        Chunk(prompt[start:], start, table, True)
        for prompt, start, table in zip(prompts, starts, tables, strict=True)
    ]
    logits, order = model.forward(chunks, pool)

    assert sorted(order) == [0, 1, 2, 3, 4]
    for row, at in zip(logits, order, strict=True):
        expected = expected_logits(reference, prompts[at])
        torch.testing.assert_close(row, expected, atol=2e-4, rtol=1e-4)


def test_only_chunks_that_sample_get_logits(pair: tuple[Model, Any]) -> None:
    model, reference = pair
    first, second = prompt_of(20, 1), prompt_of(30, 2)
    chunks = [Chunk(first, 0, [0, 1], False), Chunk(second, 0, [2, 3], True)]

    logits, order = model.forward(chunks, model.new_pool(4, 16))

    assert order == [1]
    torch.testing.assert_close(logits[0], expected_logits(reference, second), atol=2e-4, rtol=1e-4)


def test_a_copied_block_reads_like_its_source(tiny: Model) -> None:
    pool = tiny.new_pool(4, 16)
    prompt = prompt_of(17)
    tiny.forward([Chunk(prompt[:16], 0, [0, 1], False)], pool)
    pool.copy_block(0, 3)

    original, _ = tiny.forward([Chunk(prompt[16:], 16, [0, 1], True)], pool)
    copied, _ = tiny.forward([Chunk(prompt[16:], 16, [3, 2], True)], pool)

    assert torch.equal(original, copied)


@pytest.mark.parametrize("max_bytes", [0, 10**9], ids=["never kept", "kept"])
def test_contexts_kept_between_steps_read_like_gathered_ones(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    """Samples of other lengths, growing past the spare room, leaving and joining."""
    monkeypatch.setattr("runner.contexts._MAX_BYTES", max_bytes)
    kept, gathered = tiny.new_pool(40, 16), tiny.new_pool(40, 16)
    kept.data.copy_(torch.randn(kept.data.shape, generator=torch.Generator().manual_seed(4)))
    gathered.data.copy_(kept.data)
    tables = [list(range(at, 40, 4)) for at in range(4)]
    ends = [70, 50, 20, 61]
    for step in range(85):
        together = [0, 1, 2, 3] if 30 <= step < 60 else [0, 1, 3]
        token = step % 97
        chunks = [Chunk([token], ends[at], tables[at], True, f"sample {at}") for at in together]
        plain = [Chunk([token], ends[at], tables[at], True) for at in together]
        actual, order = tiny.forward(chunks, kept)
        expected, same_order = tiny.forward(plain, gathered)

        assert order == same_order
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        for at in together:
            # Once, positions are filled from elsewhere, as a restore would.
            ends[at] += 3 if step == 65 else 1


def test_equal_bytes_and_boundaries_give_equal_bits(tiny: Model) -> None:
    """What a restored prefix relies on: the rest of a prompt computes bit for bit the same."""
    prompt = prompt_of(60)
    source, target = tiny.new_pool(4, 16), tiny.new_pool(8, 16)
    tiny.forward([Chunk(prompt[:32], 0, [0, 1, 2, 3], False)], source)
    target.data[[6, 1]] = source.data[[0, 1]]

    computed, _ = tiny.forward([Chunk(prompt[32:], 32, [0, 1, 2, 3], True)], source)
    restored, _ = tiny.forward([Chunk(prompt[32:], 32, [6, 1, 4, 0], True)], target)

    assert torch.equal(computed, restored)


def test_bfloat16_stays_near_float32(smollm2_dir: Path, smollm2: Model) -> None:
    model = load_model(smollm2_dir, "bfloat16", 1)
    prompt = [504, 2260, 314, 253, 1838, 282, 1070, 28, 284, 260, 6330, 314]
    exact, _ = smollm2.forward([Chunk(prompt, 0, [0], True)], smollm2.new_pool(1, 16))
    pool = model.new_pool(1, 16)
    whole, _ = model.forward([Chunk(prompt, 0, [0], True)], pool)
    decoded, _ = model.forward([Chunk(prompt[-1:], 11, [0], True)], pool)

    # Logits reach 25; bfloat16 has 8 bits.
    assert (whole.float() - exact).abs().max() < 0.8
    assert (decoded.float() - exact).abs().max() < 0.8
