"""int8 and int4 weights: what they stand for, where they come from, what they cost in quality."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runner.batch import Chunk
from runner.gguf import GgufFile
from runner.model import Model
from runner.quantised import GROUP, Int4File, Int4Weight, to_int4, to_int8
from runner.weights import DTYPES, load_model, open_weights
from tests.runner.ops_parts import random_of


def test_int8_is_within_half_a_step_of_each_output_s_scale() -> None:
    weight = random_of((20, 96)) * torch.linspace(0.01, 4, 20)[:, None]

    rounded = to_int8(weight)

    assert rounded.values.dtype == torch.int8
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded.dense() - weight).abs() <= step * 0.5001).all()


def test_int4_is_within_half_a_step_of_each_group() -> None:
    weight = random_of((20, 96))

    rounded = to_int4(weight)

    assert rounded.group == GROUP
    assert rounded.values.max() == 15
    groups = weight.view(20, 3, GROUP)
    step = (groups.amax(2) - groups.amin(2)) / 15
    error = (rounded.dense() - weight).abs().view(20, 3, GROUP).amax(2)
    # A scale and a minimum are rounded to 11 bits on top.
    assert (error <= step * 0.52 + 0.01).all()


@pytest.mark.parametrize("form", [to_int8, to_int4])
def test_equal_weights_round_to_themselves(form: object) -> None:
    assert callable(form)
    for value in (0.0, 0.5, -2.0):
        weight = torch.full((32, 64), value)
        assert torch.allclose(form(weight).dense(), weight, rtol=1e-3)


def test_four_bit_linears_of_a_gguf_are_taken_exactly(smollm2_dir: Path) -> None:
    """Every integer, scale and minimum; query and key rows in the decoder's order."""
    path = smollm2_dir / "model.gguf"
    config, source = open_weights(path)
    stored = Int4File(path, GgufFile(path), config)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        full = f"model.layers.3.{name}.weight"
        weight = stored.linear(full)

        assert isinstance(weight, Int4Weight)
        assert torch.equal(weight.dense(), source.read(full))
    # It is Q8_0.
    assert stored.linear("model.embed_tokens.weight") is None


# Texts that decode together, and their tokens: of each the last 40 are predicted.
TEXTS, TEXT_TOKENS, PREFILLED = 8, 52, 12


@pytest.fixture(scope="session")
def prose(smollm2_dir: Path) -> list[list[int]]:
    """Tokens of plain English: this repository's licence, cut into texts."""
    from tokenizers import Tokenizer

    from runner.tokenizer import read_tokenizer

    tokenizer = Tokenizer.from_str(read_tokenizer(smollm2_dir).tokenizer_json)
    words = (Path(__file__).parents[2] / "LICENSE").read_text().split()
    ids: list[int] = tokenizer.encode(" ".join(words)).ids
    return [ids[at * TEXT_TOKENS : (at + 1) * TEXT_TOKENS] for at in range(TEXTS)]


def nll_of(model: Model, texts: list[list[int]]) -> float:
    """Mean negative log likelihood of each token after those before it.

    A prefill first, then a decode step each, so that both ways of computing count.
    """
    pool = model.new_pool(TEXTS * 4, 16)
    tables = [list(range(at * 4, at * 4 + 4)) for at in range(TEXTS)]
    starts = [
        Chunk(text[:PREFILLED], 0, table, False) for text, table in zip(texts, tables, strict=True)
    ]
    model.forward(starts, pool)
    total = 0.0
    for at in range(PREFILLED, TEXT_TOKENS - 1):
        step = [
            Chunk([text[at]], at, table, True) for text, table in zip(texts, tables, strict=True)
        ]
        logits, order = model.forward(step, pool)
        logprobs = logits.float().log_softmax(-1)
        total -= sum(float(logprobs[row, texts[text][at + 1]]) for row, text in enumerate(order))
    return total / (TEXTS * (TEXT_TOKENS - 1 - PREFILLED))


@pytest.fixture(scope="session")
def exact_nll(smollm2: Model, prose: list[list[int]]) -> float:
    return nll_of(smollm2, prose)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_fewer_bits_predict_text_as_well_as_float32(
    dtype: str, native: bool, smollm2_dir: Path, exact_nll: float, prose: list[list[int]]
) -> None:
    model = load_model(smollm2_dir, dtype, 1, native=native)

    assert abs(nll_of(model, prose) - exact_nll) < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_the_kernel_family_tells_weights_and_kernels_apart(
    dtype: str, native: bool, tiny_dir: Path
) -> None:
    family = load_model(tiny_dir, dtype, 1, native=native).kernel_family

    assert family.startswith(f"cpu-{dtype}-")
    others = {load_model(tiny_dir, other, 1, native=native).kernel_family for other in DTYPES}
    assert len(others) == len(DTYPES)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_model_quantised_on_load_stays_near_its_float32_self(
    dtype: str, native: bool, tiny_dir: Path, tiny: Model
) -> None:
    """From safetensors; some of its linears are too narrow for int4."""
    model = load_model(tiny_dir, dtype, 1, native=native)
    prompt = [(7 * at) % 97 for at in range(40)]
    exact, _ = tiny.forward([Chunk(prompt, 0, [0, 1, 2], True)], tiny.new_pool(3, 16))
    rounded, _ = model.forward([Chunk(prompt, 0, [0, 1, 2], True)], model.new_pool(3, 16))

    spread = float(exact.std())
    limit = {"int8": 0.3, "int4": 1.5}[dtype]
    assert (rounded.float() - exact).abs().max() < limit * spread
