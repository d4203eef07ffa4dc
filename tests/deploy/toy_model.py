"""A small Llama with random weights: quick to load, yet slower to compute than to restore."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 256, 8, 4, 1, 64, 2560
# 8 layers of one key and one value head of 64 numbers of two bytes.
KV_BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2


def write_toy_model(folder: Path, tokenizer: Path) -> Path:
    """Write the model with the tokenizer of another one."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    random = np.random.default_rng(1)
    tensors = {
        "model.embed_tokens.weight": random.normal(0, 0.02, (len(vocabulary), HIDDEN)),
        "model.norm.weight": np.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, shape in shapes.items():
            tensors[f"{at}.{name}.weight"] = random.normal(0, 0.02, shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = np.ones(HIDDEN)
    save_file(
        {name: tensor.astype(np.float32) for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
