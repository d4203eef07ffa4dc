"""Shared by the engine tests: loaded models, a small random model, a driver for the engine."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from runner.weights import load_model, open_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from runner.arch import ModelConfig
    from runner.model import Model

torch.set_num_threads(1)

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 1,
    "bos_token_id": 0,
}


@pytest.fixture(scope="module", autouse=True)
def _returned_memory() -> Iterator[None]:
    """Give the system back what a module's models and pools took.

    The allocator keeps hundreds of MB of a model that is gone, in gaps between what is left.
    """
    yield
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> Model:
    """The demo model in float32, where greedy tokens are comparable."""
    return load_model(smollm2_dir, "float32", 1)


@pytest.fixture
def shared_weights(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runners of a test compute with the weights that other tests have read."""
    monkeypatch.setattr("runner.weights.load_model", lambda *_, **__: smollm2)


@pytest.fixture(scope="module")
def patient_lookups() -> Iterator[None]:
    """Wait for the shared store's answers as long as a machine with much else to do takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.tiers.lookups.LOOKUP_TIMEOUT_S", 30.0)
        yield


# Half a gigabyte that one file needs is not kept for all that follow.
@pytest.fixture(scope="module")
def smollm2_hf(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same weights in transformers, through a safetensors folder of our own."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("smollm2-hf")
    config, source = open_weights(smollm2_dir)
    tensors = {name: source.read(name).contiguous() for name in source.names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_hf_config(config)))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
        "eos_token_id": config.eos_token_ids[0],
        "hidden_act": "silu",
    }


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama, fast enough for hundreds of steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True))
    with torch.no_grad():
        # The usual tiny initialisation makes every prompt continue alike.
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path) -> Model:
    """The tiny model in float32."""
    return load_model(tiny_dir, "float32", 1)
