from __future__ import annotations

from pathlib import Path

import pytest

from tests.warmup.conftest import FRAME
from warmup.manifest import Manifest, ManifestError, read_manifest

DOCUMENT = "documents:\n  - {text: hello, id: x}\n"


def read(tmp_path: Path, text: str | bytes) -> Manifest:
    path = tmp_path / "warm.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_manifest(path)


def error_of(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(ManifestError) as caught:
        read(tmp_path, text)
    return str(caught.value).replace(str(tmp_path) + "/", "")


def test_a_whole_manifest_is_read(tmp_path: Path) -> None:
    manifest = read(
        tmp_path,
        "gateway: http://gw:8080/\nmodel: m\nbudget_tokens: 1000\n"
        "defaults: {copies: 2, pin: true, priority: 3, tenant: acme, version: 4}\n"
        "documents:\n  - {file: a.md, id: a, copies: 1}\n  - {glob: 'b/*.md'}\n"
        "captured:\n  - {file: c.jsonl, whole: true}\n" + FRAME,
    )

    assert manifest.gateway == "http://gw:8080"
    assert (manifest.defaults.copies, manifest.defaults.version) == (2, "4")
    assert [entry.file for entry in manifest.documents] == ["a.md", None]
    assert manifest.captured[0].whole


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (DOCUMENT + FRAME, "warm.yaml:1: model: is required"),
        ("model: m\nmodell: m\n" + DOCUMENT + FRAME, "warm.yaml:2: modell: unknown key 'modell'"),
        ("model: m\n", "warm.yaml:1: manifest: expected documents or captured requests"),
        ("model: m\n" + DOCUMENT, "frame: is required for documents"),
        (
            "model: m\ndocuments:\n  - {id: x}\n" + FRAME,
            "yaml:3: documents.0: expected one of",
        ),
        (
            "model: m\ndocuments:\n  - {file: a}\n  - {file: a, glob: b}\n" + FRAME,
            "warm.yaml:4: documents.1: expected one of file, glob, text, got file and glob",
        ),
        ("model: m\ndocuments: [{glob: a, id: x}]\n" + FRAME, "a glob names several documents"),
        ("model: m\ndocuments: [{text: a}]\n" + FRAME, "id: is required for a text"),
        ("model: m\ndocuments: [{file: a, copies: 0}]\n" + FRAME, "documents.0.copies:"),
        ("model: m\ndocuments: [{file: a, version: 1.10}]\n" + FRAME, "documents.0.version:"),
        ("model: m\ndocuments: [{file: a, priority: high}]\n" + FRAME, "documents.0.priority:"),
        ("model: m\nmodel: n\n" + DOCUMENT + FRAME, "warm.yaml:2: model: stands twice"),
        ("model: [m\n", "not valid YAML"),
        ("- model\n", "warm.yaml:1: expected a mapping, got list"),
        (
            "model: m\nframe:\n\t- x\n",
            "warm.yaml:3: not valid YAML: found character '\\t' that cannot start any "
            "token; YAML is indented by spaces",
        ),
        ("", "warm.yaml:1: expected a mapping, got nothing: the file is empty"),
        ("model: m\n? [a]\n: 1\n", "warm.yaml:2: expected a text as key"),
        ("model: !!python/object:os.system x\n", "not valid YAML"),
        ("model: &a [*a]\n", "not valid YAML"),
        ('model: "\\ud800"\n', "warm.yaml:1: expected whole characters"),
        ("model: m\ngateway: gw:8080\n" + DOCUMENT + FRAME, "warm.yaml:2: gateway: expected http"),
        ("model: m\nbudget_tokens: 0\n" + DOCUMENT + FRAME, "warm.yaml:2: budget_tokens:"),
        (b"model: \xff\n", "cannot read the manifest"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, error: str) -> None:
    assert error in error_of(tmp_path, text)


def test_a_password_in_a_url_is_not_repeated(tmp_path: Path) -> None:
    text = "model: m\ngateway: http://ann:hunter2@gw\n" + DOCUMENT + FRAME

    assert "hunter2" not in error_of(tmp_path, text)


def test_a_nest_of_aliases_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 10))

    assert "aliases counted in full" in error_of(tmp_path, "l0: &l0 [x]\n" + levels)


def test_a_manifest_that_is_missing_or_a_folder_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ManifestError, match="cannot read the manifest"):
            read_manifest(path)


def test_scalars_are_what_json_makes_of_them(tmp_path: Path) -> None:
    body = (
        "    body: {a: yes, b: 2024-01-01, c: 010, d: 1:30, e: 1.0, f: true, g: null, h: 1e3,\n"
        "      i: 18446744073709551616, j: 0x1f, k: .inf, l: on}\n"
    )
    manifest = read(tmp_path, "model: m\n" + DOCUMENT + FRAME.rstrip() + "\n" + body[2:].rstrip())

    assert manifest.frame is not None
    assert manifest.frame.body == {
        "a": "yes", "b": "2024-01-01", "c": "010", "d": "1:30", "e": 1.0, "f": True, "g": None,
        "h": 1000.0, "i": 2**64, "j": "0x1f", "k": ".inf", "l": "on",
    }  # fmt: skip


def test_merged_mappings_are_merged(tmp_path: Path) -> None:
    manifest = read(
        tmp_path,
        "model: m\ndefaults: &d {copies: 2}\ndocuments:\n  - {<<: *d, file: a}\n" + FRAME,
    )

    assert manifest.documents[0].copies == 2
