"""GGUF's tensor types and the exact float32 values their bytes stand for, in numpy.

A quantised type stores blocks of 32 values with a scale each, or, the K-types, superblocks of 256
values whose groups of 16 or 32 have small scales of their own. Every product is rounded in the
order in which ggml rounds it, so the values are equal bit for bit.

Source: ggml, block layouts of ggml-common.h and the dequantize functions of ggml-quants.c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Floats: TypeAlias = "npt.NDArray[np.float32]"

# Values per block of the plain quantised types, and per superblock of the K-types.
QUANT_BLOCK, SUPER_BLOCK = 32, 256

# Values dequantised at once: their temporaries stay in the processor's cache and small beside the
# result, which for a large embedding is gigabytes.
_SLICE_VALUES = 2**18


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor type's name and its storage: ``block_bytes`` for every ``block_values`` values."""

    name: str
    block_values: int
    block_bytes: int


SUPPORTED_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", QUANT_BLOCK, 18),
    3: TensorType("Q4_1", QUANT_BLOCK, 20),
    6: TensorType("Q5_0", QUANT_BLOCK, 22),
    7: TensorType("Q5_1", QUANT_BLOCK, 24),
    8: TensorType("Q8_0", QUANT_BLOCK, 34),
    10: TensorType("Q2_K", SUPER_BLOCK, 84),
    11: TensorType("Q3_K", SUPER_BLOCK, 110),
    12: TensorType("Q4_K", SUPER_BLOCK, 144),
    13: TensorType("Q5_K", SUPER_BLOCK, 176),
    14: TensorType("Q6_K", SUPER_BLOCK, 210),
    30: TensorType("BF16", 1, 2),
}

# Numbers ggml gives to types that are not read here, so that a refusal can name them.
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def dequantize(raw: Bytes, kind: TensorType) -> Floats:
    """Turn stored bytes into float32 values.

    Args:
        raw: The bytes of whole blocks. Shape: [num_blocks * kind.block_bytes].
        kind: One of ``SUPPORTED_TYPES``.

    Returns:
        A fresh array. Shape: [num_blocks * kind.block_values].
    """
    read = _READERS[kind.name]
    blocks = raw.reshape(-1, kind.block_bytes)
    values = np.empty((len(blocks), kind.block_values), np.float32)
    step = max(1, _SLICE_VALUES // kind.block_values)
    for start in range(0, len(blocks), step):
        values[start : start + step] = read(blocks[start : start + step])
    return values.reshape(-1)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.copy().view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Bytes) -> Floats:
    return _f16(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _f16(blocks[:, :2]) * (_halves(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    return _halves(blocks[:, 4:]) * _f16(blocks[:, :2]) + _f16(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Floats:
    values = _halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _f16(blocks[:, :2]) * (values.astype(np.float32) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    values = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return values * _f16(blocks[:, :2]) + _f16(blocks[:, 2:4])


def _q2_k(blocks: Bytes) -> Floats:
    scales, values = blocks[:, :16], _fields(blocks[:, 16:80], 2, 32)
    scale, minimum = _f16(blocks[:, 80:82]), _f16(blocks[:, 82:84])
    return _grouped(values, scale * (scales & 15), minimum * (scales >> 4))


def _q3_k(blocks: Bytes) -> Floats:
    # A cleared bit of the mask, the first 32 bytes, means 4 less.
    missing = _fields(blocks[:, :32], 1, 32) ^ 1
    values = _fields(blocks[:, 32:96], 2, 32).astype(np.int8) - (missing << 2).astype(np.int8)
    packed = blocks[:, 96:108]
    scales = _fields(packed[:, :8], 4, 8) | (_fields(packed[:, 8:], 2, 4) << 4)
    return _grouped(values, _f16(blocks[:, 108:]) * (scales.astype(np.int8) - np.int8(32)))


def _q4_k(blocks: Bytes) -> Floats:
    return _grouped(_fields(blocks[:, 16:], 4, 32), *_scales_and_minima(blocks))


def _q5_k(blocks: Bytes) -> Floats:
    values = _fields(blocks[:, 48:], 4, 32) | (_fields(blocks[:, 16:48], 1, 32) << 4)
    return _grouped(values, *_scales_and_minima(blocks))


def _q6_k(blocks: Bytes) -> Floats:
    values = _fields(blocks[:, :128], 4, 64) | (_fields(blocks[:, 128:192], 2, 32) << 4)
    scales = blocks[:, 192:208].view(np.int8)
    return _grouped(values.astype(np.int8) - np.int8(32), _f16(blocks[:, 208:]) * scales)


_READERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0,
    "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip


def _fields(packed: Bytes, bits: int, run: int) -> Bytes:
    """Unpack ``bits``-wide fields: of each run of bytes first all lowest fields, then the next.

    Shapes: [blocks, bytes] -> [blocks, bytes * 8 / bits].
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, run)
    return ((runs >> shifts) & np.uint8(2**bits - 1)).reshape(len(packed), -1)


def _halves(packed: Bytes) -> Bytes:
    """Unpack 16 bytes into 32 values: the low nibbles come first, then the high ones."""
    return _fields(packed, 4, 16)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Unpack 32 bits, the lowest bit of the first byte first, to where a fifth bit stands."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _scales_and_minima(blocks: Bytes) -> Sequence[Floats]:
    """Return the eight scales and minima of Q4_K and Q5_K blocks; they have 6 bits each.

    Twelve bytes: four scales, four minima, and four bytes that hold the low nibbles of the other
    four of both, whose two high bits stand above the first ones.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 2) & 48)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 2) & 48)), axis=1)
    return _f16(blocks[:, :2]) * scales, _f16(blocks[:, 2:4]) * minima


def _grouped(
    values: npt.NDArray[np.integer], scales: Floats, minima: Floats | None = None
) -> Floats:
    """Return values * scales - minima, each scale for its group of neighbouring values."""
    grouped = values.reshape(*scales.shape, -1).astype(np.float32)
    scaled = grouped * scales[:, :, None]
    if minima is not None:
        scaled -= minima[:, :, None]
    return scaled.reshape(len(values), -1)
