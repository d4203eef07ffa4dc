"""Weights in few bits: int8 with a scale per output, int4 in groups of 32 inputs.

GGUF's Q4_0 and Q4_1 already are such int4 weights and are taken as they are, every integer, scale
and minimum exactly as stored. Other weights are rounded to the nearest values here.

The head stays in int8 in the int4 mode unless the file itself has it in 4 bits: it turns rounding
errors straight into wrong tokens, and files keep it in more bits for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch

from runner.arch import EMBEDDING, HEAD
from runner.configs import GGUF_LINEARS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from runner.arch import ModelConfig
    from runner.gguf import GgufFile

WeightMode: TypeAlias = Literal["float32", "bfloat16", "int8", "int4"]
"""What the weights are computed with; activations and KV are bfloat16 but for float32."""

# GGUF's, and the depth of a tile.
GROUP = 32

# Outputs of an int4 linear must be whole blocks of this many, on every path.
_INT4_OUTPUTS = 32

_LARGEST_INT8, _LARGEST_INT4 = 127, 15

# A scale of zero (a group of equal values) would divide by zero; the integers are 0 then.
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """value * scale of its output.

    Attributes:
        values: int8. Shape: [out, in].
        scales: float32. Shape: [out].
    """

    values: torch.Tensor
    scales: torch.Tensor

    def dense(self) -> torch.Tensor:
        """Return what it stands for, float32. Shape: [out, in]."""
        return self.values * self.scales[:, None]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """value * scale + minimum of its output and group of neighbouring inputs.

    Attributes:
        values: uint8, 0 to 15. Shape: [out, in].
        scales: float16. Shape: [out, in / group].
        minima: float16. Shape: [out, in / group].
    """

    values: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor

    @property
    def group(self) -> int:
        """Neighbouring inputs that share a scale and a minimum."""
        return self.values.shape[1] // self.scales.shape[1]

    def dense(self) -> torch.Tensor:
        """Return what it stands for, float32. Shape: [out, in]."""
        groups = self.values.view(*self.scales.shape, -1)
        dense = groups * self.scales.float()[..., None] + self.minima.float()[..., None]
        return dense.view(self.values.shape)


Weight: TypeAlias = "torch.Tensor | Int8Weight | Int4Weight"
"""A weight in the form its mode computes with; a plain one is float32. Shape: [out, in]."""


def to_int8(weight: torch.Tensor) -> Int8Weight:
    """Round to the nearest values with one scale per output. Shape: [out, in], float32."""
    scales = weight.abs().amax(1).clamp_min_(_TINY) / _LARGEST_INT8
    return Int8Weight((weight / scales[:, None]).round_().to(torch.int8), scales)


def to_int4(weight: torch.Tensor) -> Int4Weight:
    """Round to the nearest values between each group's least and largest. Shape: [out, in]."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    least, largest = groups.aminmax(dim=2)
    # What is stored is rounded: values are chosen for what will be computed.
    scales = ((largest - least) / _LARGEST_INT4).half()
    minima = least.half()
    steps = (groups - minima.float()[..., None]) / scales.float().clamp_min_(_TINY)[..., None]
    values = steps.round_().clamp_(0, _LARGEST_INT4).to(torch.uint8)
    return Int4Weight(values.view(weight.shape), scales, minima)


class Int4File:
    """Reads the linears of a GGUF file that are stored in 4 bits, without changing them."""

    def __init__(self, path: Path, file: GgufFile, config: ModelConfig) -> None:
        """Take an open file whose tensors have been checked, and the path it was opened from."""
        self._bytes = np.memmap(path, np.uint8, "r")
        self._file = file
        self._config = config

    def linear(self, name: str) -> Int4Weight | None:
        """Return a weight by its safetensors name, or None if it is stored otherwise."""
        own_name = _gguf_name(name)
        kind, info = self._file.check(own_name), self._file.tensors[own_name]
        if kind.name not in ("Q4_0", "Q4_1"):
            return None
        outputs, inputs = info.shape
        num_bytes = outputs * inputs // GROUP * kind.block_bytes
        raw = self._bytes[info.offset : info.offset + num_bytes]
        blocks = torch.from_numpy(raw.reshape(outputs, -1, kind.block_bytes).copy())
        facts, nibbles = blocks[..., :-16].contiguous().view(torch.float16), blocks[..., -16:]
        values = torch.cat((nibbles & 15, nibbles >> 4), -1).view(outputs, inputs)
        scales = facts[..., 0].contiguous()
        # Q4_0 counts from the middle; a scale times -8 is exact.
        minima = facts[..., 1] if kind.name == "Q4_1" else scales * -8
        order = self._row_order(name, outputs)
        return Int4Weight(values[order], scales[order], minima[order].contiguous())

    def _row_order(self, name: str, outputs: int) -> torch.Tensor:
        """Return where each row of half-split rope order lies (see ``sources.py``)."""
        order = torch.arange(outputs)
        num_heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}
        heads = num_heads.get(name.split(".")[-2])
        if self._config.architecture != "llama" or heads is None:
            return order
        return order.view(heads, outputs // heads // 2, 2).transpose(1, 2).reshape(-1)


def _gguf_name(name: str) -> str:
    match name.split("."):
        case ["model", "layers", layer, _, linear, "weight"]:
            own_names = {hf: gguf for gguf, hf in GGUF_LINEARS.items()}
            return f"blk.{layer}.{own_names[linear]}.weight"
    return {EMBEDDING: "token_embd.weight", HEAD: "output.weight"}[name]


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads linears in the form a mode computes with.

    Attributes:
        mode: Which form.
        read: Gives a tensor as float32.
        stored: Gives a linear that the file has in 4 bits; None if it has not.
    """

    mode: WeightMode
    read: Callable[[str], torch.Tensor]
    stored: Callable[[str], Int4Weight | None]

    def linear(self, names: Sequence[str]) -> Weight:
        """Read linears of the same input and join their outputs."""
        dense = [self.read(name) for name in names]
        if self.mode == "int8":
            return to_int8(torch.cat(dense))
        if self.mode != "int4":
            return torch.cat(dense)
        outputs = sum(weight.shape[0] for weight in dense)
        if dense[0].shape[1] % GROUP or outputs % _INT4_OUTPUTS:
            return to_int8(torch.cat(dense))
        parts = [
            self.stored(name) or to_int4(weight) for name, weight in zip(names, dense, strict=True)
        ]
        return Int4Weight(
            torch.cat([part.values for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat([part.minima for part in parts]),
        )

    def head(self, name: str, dense: torch.Tensor) -> Weight:
        """Return the head's form; ``dense`` is tensor ``name`` as ``read`` gave it."""
        if self.mode in ("float32", "bfloat16"):
            return dense
        if self.mode == "int4" and dense.shape[0] % _INT4_OUTPUTS == 0:
            return self.stored(name) or to_int8(dense)
        return to_int8(dense)
