"""Engine models by name, from public figures of the hardware.

Source: the simulator behind the design's routing tables, its constants (section 10).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from gateway.replay.engine import EngineModel
from gateway.routing.cost import CostModel
from gateway.routing.learner import slowest

# One H100 SXM: dense bf16 FLOP/s, and the share of 3.35 TB/s that weights and KV are read at.
_H100_FLOPS = 989e12
_H100_BYTES_PER_S = 3.35e12 * 0.75
# FLOP/s of attention in prefill on one H100.
_H100_ATTENTION_FLOPS = 450e12
# Bytes of KV per token: 2 x layers x KV heads x head size x 2 bytes.
_KV_BYTES_8B = 131_072
_KV_BYTES_70B = 327_680
# KV tokens that fit beside the weights, in both deployments.
_GPU_TOKENS = 400_000

# Llama-3.1-8B, bf16, one H100 at half of its peak; restores over PCIe at 25 GB/s, disk 6 GB/s.
LLAMA_8B: Final = EngineModel(
    cost=CostModel(
        token_s=16.06e9 / (_H100_FLOPS * 0.5),
        attention_s=4 * 32 * 4096 / _H100_ATTENTION_FLOPS,
        step_s=0.004,
        context_s=_KV_BYTES_8B / _H100_BYTES_PER_S,
        restore_cpu_tokens_per_s=25e9 / _KV_BYTES_8B,
        restore_disk_tokens_per_s=6e9 / _KV_BYTES_8B,
    ),
    gpu_tokens=_GPU_TOKENS,
    weights_s=16.06e9 / _H100_BYTES_PER_S,
    kv_bytes_per_token=_KV_BYTES_8B,
)
# Llama-3.1-70B, bf16, tensor parallel on four H100 at 45 %; restores at 100 GB/s, disk 12 GB/s.
LLAMA_70B: Final = EngineModel(
    cost=CostModel(
        token_s=141e9 / (4 * _H100_FLOPS * 0.45),
        attention_s=4 * 80 * 8192 / (4 * _H100_ATTENTION_FLOPS),
        step_s=0.008,
        context_s=_KV_BYTES_70B / (4 * _H100_BYTES_PER_S),
        restore_cpu_tokens_per_s=100e9 / _KV_BYTES_70B,
        restore_disk_tokens_per_s=12e9 / _KV_BYTES_70B,
    ),
    gpu_tokens=_GPU_TOKENS,
    weights_s=141e9 / (4 * _H100_BYTES_PER_S),
    kv_bytes_per_token=_KV_BYTES_70B,
)
PRESETS: Final = {"8b": LLAMA_8B, "70b": LLAMA_70B}


class _Worker(msgspec.Struct):
    """What ``GET /admin/v1/workers`` says of a worker, as far as it matters here."""

    cost: CostModel | None = None
    capacity_tokens: int | None = None
    cpu_capacity_tokens: int | None = None


class _Workers(msgspec.Struct):
    workers: list[_Worker]


def load_engine_model(name: str) -> EngineModel:
    """Return a preset, or the engine model in a JSON file.

    Args:
        name: ``8b``, ``70b``, or the path of a JSON file: the fields of ``EngineModel``, or the
            answer of ``GET /admin/v1/workers``.

    Raises:
        ValueError: If the file cannot be read or a value is not possible; says which.
    """
    if name in PRESETS:
        return PRESETS[name]
    try:
        data = Path(name).read_bytes()
        is_answer = isinstance(raw := msgspec.json.decode(data), dict) and "workers" in raw
        model = _learned(data, name) if is_answer else msgspec.convert(raw, EngineModel)
    except OSError as error:
        known = ", ".join(PRESETS)
        raise ValueError(f"{name}: expected {known} or a JSON file: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ValueError(f"{name}: {error}") from error
    check_engine_model(model, name)
    return model


def _learned(data: bytes, name: str) -> EngineModel:
    """Return what a live gateway has learned: of several workers, the slowest and smallest.

    Its fixed seconds of a step hold the read of the weights, so there is no other floor.
    """
    workers = msgspec.json.decode(data, type=_Workers).workers
    known = [w for w in workers if w.cost is not None and w.capacity_tokens]
    cost = slowest([w.cost for w in known if w.cost is not None])
    if cost is None:
        raise ValueError(f"{name}: no worker has both cost constants and a capacity yet")
    return EngineModel(
        cost,
        gpu_tokens=min(w.capacity_tokens or 0 for w in known),
        cpu_tokens=min(w.cpu_capacity_tokens or 0 for w in known),
    )


def check_engine_model(model: EngineModel, name: str) -> None:
    """Refuse constants that no engine can have.

    Raises:
        ValueError: Names the field and its bound.
    """
    cost = model.cost
    positive = {
        "cost.token_s": cost.token_s,
        "cost.restore_cpu_tokens_per_s": cost.restore_cpu_tokens_per_s,
        "cost.restore_disk_tokens_per_s": cost.restore_disk_tokens_per_s,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "block_tokens": model.block_tokens,
    }
    for field, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name}: {field} must be above 0, not {value}")
    at_least = {
        "cost.attention_s": (cost.attention_s, 0),
        "cost.step_s": (cost.step_s, 0),
        "cost.context_s": (cost.context_s, 0),
        "weights_s": (model.weights_s, 0),
        "gpu_tokens": (model.gpu_tokens, model.block_tokens),
        "cpu_tokens": (model.cpu_tokens, 0),
        "disk_tokens": (model.disk_tokens, 0),
        "max_sequences": (model.max_sequences, 1),
        "max_batched_tokens": (model.max_batched_tokens, model.max_sequences + 1),
    }
    for field, (value, least) in at_least.items():
        if not value >= least:
            raise ValueError(f"{name}: {field} must be at least {least}, not {value}")
    if model.disk_tokens and not model.cpu_tokens:
        raise ValueError(f"{name}: disk_tokens needs cpu_tokens above 0: the disk is behind it")
