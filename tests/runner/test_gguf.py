"""The GGUF reader: exact values, metadata, and honest errors for damaged or foreign files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from runner.gguf import SUPPORTED_TYPES, GgufError, GgufFile, dequantize

QUANTIZED = {
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
    "Q4_1": gguf.GGMLQuantizationType.Q4_1,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "F32": gguf.GGMLQuantizationType.F32,
}


def write_file(path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write a file with one random tensor of 6 x 64 values and metadata of every kind."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "späße")
    writer.add_array("a.list", ["x", "", "zz"])
    writer.add_array("a.numbers", [1, -2, 3])
    values = np.random.default_rng(3).normal(size=(6, 64)).astype(np.float32)
    writer.add_tensor("w", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_supported_type_is_dequantized_exactly(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_file(path, QUANTIZED[name])
    stored = gguf.GGUFReader(path).tensors[0]
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type)

    actual = GgufFile(path).tensor("w")

    assert actual.shape == (6, 64)
    np.testing.assert_array_equal(actual, expected)


def test_random_bytes_dequantize_like_the_reference_package() -> None:
    """Covers scales, minima and nibbles that quantizing normal numbers never makes."""
    rng = np.random.default_rng(5)
    for kind in SUPPORTED_TYPES.values():
        raw = rng.integers(0, 256, 200 * kind.block_bytes, dtype=np.uint8)
        with np.errstate(invalid="ignore", over="ignore"):
            expected = gguf.quants.dequantize(raw, QUANTIZED[kind.name]).reshape(-1)
            actual = dequantize(raw, kind)

        np.testing.assert_array_equal(actual, expected, err_msg=kind.name)


def test_metadata_of_every_kind_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_file(path, QUANTIZED["F32"])

    metadata = GgufFile(path).metadata

    assert metadata["a.number"] == 7
    assert metadata["a.float"] == 0.5
    assert metadata["a.bool"] is True
    assert metadata["a.string"] == "späße"
    assert metadata["a.list"] == ["x", "", "zz"]
    assert metadata["a.numbers"] == [1, -2, 3]


@pytest.mark.parametrize("length", [0, 3, 20, 150, 250])
def test_a_file_cut_anywhere_in_its_header_is_refused_by_name(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.gguf"
    write_file(path, QUANTIZED["F32"])
    path.write_bytes(path.read_bytes()[:length])

    with pytest.raises(GgufError, match=r"model\.gguf"):
        GgufFile(path)


def test_a_file_cut_in_its_data_is_refused_when_the_tensor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_file(path, QUANTIZED["F32"])
    path.write_bytes(path.read_bytes()[:-1000])

    with pytest.raises(GgufError, match="tensor w goes beyond the end"):
        GgufFile(path).tensor("w")


@pytest.mark.parametrize(
    ("start", "message"),
    [(b"PK\x03\x04", "expected b'GGUF'"), (b"GGUF" + struct.pack("<I", 2), "version 2")],
    ids=["another format", "an old version"],
)
def test_another_format_is_refused_with_what_was_found(
    tmp_path: Path, start: bytes, message: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(start + bytes(64))

    with pytest.raises(GgufError, match=message):
        GgufFile(path)


def test_an_unsupported_tensor_type_names_the_supported_ones(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.Q6_K
    writer.add_tensor("w", np.zeros((1, 210), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(GgufError, match="BF16, F16, F32, Q4_0, Q4_1, Q8_0"):
        GgufFile(path).tensor("w")
