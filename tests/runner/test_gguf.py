"""The GGUF reader: exact values, metadata, and honest errors for damaged or foreign files."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.dequant import OTHER_TYPES, SUPPORTED_TYPES, dequantize
from runner.gguf import GgufError, GgufFile

TYPES = {kind.name: gguf.GGMLQuantizationType[kind.name] for kind in SUPPORTED_TYPES.values()}

# The reference package reads K-types but does not make them.
QUANTIZED = {name: kind for name, kind in TYPES.items() if not name.endswith("_K")}


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


@pytest.mark.parametrize("number", SUPPORTED_TYPES, ids=[*TYPES])
def test_random_bytes_dequantize_bit_for_bit_like_the_reference_package(number: int) -> None:
    """Covers scales, minima and bits that quantizing normal numbers never makes."""
    kind = SUPPORTED_TYPES[number]
    # More than one slice, the last one short.
    raw = np.random.default_rng(5).integers(0, 256, 9001 * kind.block_bytes, dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, TYPES[kind.name]).reshape(-1)
        actual = dequantize(raw, kind)

    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def test_every_type_has_the_number_and_size_that_the_reference_package_gives_it() -> None:
    for number, kind in SUPPORTED_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
        assert sizes == (kind.block_values, kind.block_bytes)
    for number, name in OTHER_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == name


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

    with pytest.raises(GgufError, match=r"model\.gguf: tensor w goes beyond the end"):
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


def write_tensor(path: Path, kind: gguf.GGMLQuantizationType, rows: np.ndarray) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_an_unsupported_tensor_type_names_file_tensor_type_and_the_supported_ones(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    write_tensor(path, gguf.GGMLQuantizationType.IQ4_NL, np.zeros((1, 18), np.uint8))

    expected = r"model\.gguf: tensor w has type IQ4_NL .*BF16, F16, F32, Q2_K, .*Q6_K, Q8_0"
    with pytest.raises(GgufError, match=expected):
        GgufFile(path).tensor("w")


def test_one_part_of_a_split_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(GgufError, match=r"one of 3 parts .*llama-gguf-split --merge"):
        GgufFile(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_file(path, QUANTIZED["Q4_0"])
    return path.read_bytes()


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_by_name_and_nothing_else(
    whole: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    """Any bytes changed, any length cut off."""
    damaged = bytearray(whole)
    places = data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=4))
    for place in places:
        damaged[place] = data.draw(st.integers(0, 255))
    length = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    path = tmp_path / "model.gguf"
    path.write_bytes(damaged[:length])

    with contextlib.suppress(GgufError), np.errstate(all="ignore"):
        file = GgufFile(path)
        for name in file.tensors:
            assert file.tensor(name).shape == file.tensors[name].shape
