"""Read GGUF files (version 3) through a memory map: metadata and exactly dequantised tensors.

Only what the runner needs: little-endian files and the tensor types of ``dequant.py``. Nothing
here knows about models; names and shapes come out as the file has them, shapes in numpy order (the
file stores dimensions reversed).

Source: ggml, docs/gguf.md (version 3).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.dequant import OTHER_TYPES, SUPPORTED_TYPES, dequantize

if TYPE_CHECKING:
    from pathlib import Path

    from runner.dequant import Floats, TensorType

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32

# ggml's own limit; more in a header means that it is damaged.
MAX_DIMENSIONS = 4

# struct codes of the fixed-size metadata types, by type number; 8 is a string, 9 an array.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


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
            if element == _STRING:
                return [self.string() for _ in range(count)]
            # Arrays of arrays exist on paper only; a damaged file could nest them without end.
            raise GgufError(f"unknown array element type {element} at byte {self.at}")
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
        self._path = path
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
        if self.metadata.get("split.count", 0) not in (0, 1):
            raise GgufError(
                f"one of {self.metadata['split.count']} parts of a split model; join them with "
                "`llama-gguf-split --merge`"
            )
        headers = [self._tensor_header(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"general.alignment is {alignment!r}, expected a positive integer")
        start = math.ceil(cursor.at / alignment) * alignment
        self.tensors = {
            name: TensorInfo(shape, type_id, start + offset)
            for name, shape, type_id, offset in headers
        }

    @staticmethod
    def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        if (num_dimensions := cursor.scalar("I")) > MAX_DIMENSIONS:
            raise GgufError(
                f"tensor {name} has {num_dimensions} dimensions, expected at most {MAX_DIMENSIONS}"
            )
        dims = [cursor.scalar("Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")

    def check(self, name: str) -> TensorType:
        """Return a tensor's type, once it is sure that ``tensor`` can read it.

        Raises:
            KeyError: If the file has no such tensor.
            GgufError: If its type is not supported or its bytes are not all there.
        """
        info = self.tensors[name]
        kind = SUPPORTED_TYPES.get(info.type_id)
        if kind is None:
            names = ", ".join(sorted(known.name for known in SUPPORTED_TYPES.values()))
            known = OTHER_TYPES.get(info.type_id, "unknown")
            raise GgufError(
                f"{self._path}: tensor {name} has type {known} (number {info.type_id}); this "
                f"runner reads {names}"
            )
        if not info.shape or info.shape[-1] % kind.block_values:
            raise GgufError(
                f"{self._path}: tensor {name} has shape {info.shape}, expected rows of whole "
                f"{kind.name} blocks ({kind.block_values} values)"
            )
        end = info.offset + math.prod(info.shape) // kind.block_values * kind.block_bytes
        if end > len(self._data):
            raise GgufError(
                f"{self._path}: tensor {name} goes beyond the end of the file: it ends at byte "
                f"{len(self._data)}, {end} expected"
            )
        return kind

    def tensor(self, name: str) -> Floats:
        """Return one tensor as float32, exactly the values the file stands for.

        Raises:
            KeyError, GgufError: As ``check``.
        """
        kind, info = self.check(name), self.tensors[name]
        length = math.prod(info.shape) // kind.block_values * kind.block_bytes
        raw = np.frombuffer(self._data, np.uint8, length, info.offset)
        return dequantize(raw, kind).reshape(info.shape)
