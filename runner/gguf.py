"""Read GGUF files (version 3) through a memory map: metadata and exactly dequantised tensors.

Only what the runner needs: little-endian files and the tensor types of ``SUPPORTED_TYPES``.
Nothing here knows about models; names and shapes come out as the file has them, shapes in numpy
order (the file stores dimensions reversed).

Source: ggml, docs/gguf.md (version 3) and the block layouts of ggml-common.h.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32

# Quantised types hold blocks of this many values, each block with its own scale.
QUANT_BLOCK = 32

# struct codes of the fixed-size metadata types, by type number; 8 is a string, 9 an array.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


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
    8: TensorType("Q8_0", QUANT_BLOCK, 34),
    30: TensorType("BF16", 1, 2),
}


class GgufError(ValueError):
    """The file is not a GGUF file this reader understands; the message says where and why."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        shape: In numpy order, rows first.
        type_id: The file's number of the tensor type.
        offset: Bytes from the start of the file.
    """

    shape: tuple[int, ...]
    type_id: int
    offset: int


class _Cursor:
    """Walks over the header; every read checks the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, length: int) -> bytes:
        end = self.at + length
        if end > len(self.data):
            raise GgufError(f"file ends at byte {len(self.data)}, {end} needed")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value

    def string(self) -> str:
        # Token strings may hold bytes that are no UTF-8 on their own.
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            if code := _SCALARS.get(element):
                size = struct.calcsize("<" + code)
                return list(struct.unpack(f"<{count}{code}", self.take(size * count)))
            return [self.value(element) for _ in range(count)]
        if code := _SCALARS.get(kind):
            return self.scalar(code)
        raise GgufError(f"unknown metadata type {kind} at byte {self.at}")


class GgufFile:
    """An open GGUF file.

    Attributes:
        metadata: Key -> value (numbers, strings, booleans, lists of them).
        tensors: Name -> where it lies.

    The map is dropped with the object; ``tensor`` copies, so its results outlive it.
    """

    def __init__(self, path: Path) -> None:
        """Map the file and read its header.

        Raises:
            FileNotFoundError: If there is no such file.
            GgufError: If it is no GGUF version 3 file or ends too early.
        """
        with path.open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise GgufError(f"{path}: empty file") from error
        try:
            self._read_header()
        except GgufError as error:
            raise GgufError(f"{path}: {error}") from error

    def _read_header(self) -> None:
        cursor = _Cursor(self._data)
        if (magic := cursor.take(4)) != MAGIC:
            raise GgufError(f"starts with {magic!r}, expected {MAGIC!r}")
        if (version := cursor.scalar("I")) != VERSION:
            raise GgufError(f"GGUF version {version}, expected {VERSION}")
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        headers = [self._tensor_header(cursor) for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        start = math.ceil(cursor.at / alignment) * alignment
        self.tensors = {
            name: TensorInfo(shape, type_id, start + offset)
            for name, shape, type_id, offset in headers
        }

    @staticmethod
    def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        return name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Return one tensor as float32, exactly the values the file stands for.

        Raises:
            KeyError: If the file has no such tensor.
            GgufError: If its type is not one of ``SUPPORTED_TYPES`` or the file ends too early.
        """
        info = self.tensors[name]
        kind = SUPPORTED_TYPES.get(info.type_id)
        if kind is None:
            names = ", ".join(sorted(known.name for known in SUPPORTED_TYPES.values()))
            raise GgufError(
                f"tensor {name} has type number {info.type_id}; this runner reads {names}"
            )
        length = math.prod(info.shape) // kind.block_values * kind.block_bytes
        if info.offset + length > len(self._data):
            raise GgufError(f"tensor {name} goes beyond the end of the file")
        raw = np.frombuffer(self._data, np.uint8, length, info.offset)
        return dequantize(raw, kind).reshape(info.shape)


def dequantize(raw: npt.NDArray[np.uint8], kind: TensorType) -> npt.NDArray[np.float32]:
    """Turn stored bytes into float32 values.

    Args:
        raw: The bytes of whole blocks. Shape: [num_blocks * kind.block_bytes].
        kind: One of ``SUPPORTED_TYPES``.

    Returns:
        A fresh array. Shape: [num_blocks * kind.block_values].
    """
    if kind.name == "F32":
        return raw.view("<f4").astype(np.float32)
    if kind.name == "F16":
        return raw.view("<f2").astype(np.float32)
    if kind.name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    blocks = raw.reshape(-1, kind.block_bytes)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if kind.name == "Q8_0":
        return (blocks[:, 2:].view(np.int8).astype(np.float32) * scale).reshape(-1)
    if kind.name == "Q4_0":
        return ((_nibbles(blocks[:, 2:]) - np.float32(8)) * scale).reshape(-1)
    minimum = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    return (_nibbles(blocks[:, 4:]) * scale + minimum).reshape(-1)


def _nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Unpack 16 bytes into 32 values: the low nibbles come first, then the high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)
