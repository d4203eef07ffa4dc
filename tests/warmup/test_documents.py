from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from warmup.captured import read_captured
from warmup.documents import MAX_DOCUMENT_BYTES, Document, Ids, Problem, read_documents
from warmup.manifest import CapturedEntry, DocumentEntry
from warmup.walk import LookError, matches


def read(folder: Path, *entries: dict[str, Any]) -> dict[str, str]:
    """Return text or reason by id, reasons in brackets."""
    ids = Ids()
    found = [
        one
        for entry in entries
        for one in read_documents(folder, DocumentEntry.model_validate(entry), ids)
    ]
    texts = [one.text if isinstance(one, Document) else f"[{one.reason}]" for one in found]
    assert len({one.id for one in found}) == len(found), found
    return dict(zip([one.id for one in found], texts, strict=True))


def test_texts_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("\ufeffA\r\nß\n".encode())

    found = read(tmp_path, {"file": "a"}, {"text": " x\r\n", "id": "t"}, {"file": "a", "id": "b"})

    assert found == {"a": "\ufeffA\r\nß\n", "t": " x\r\n", "b": "\ufeffA\r\nß\n"}


def make_faults(folder: Path) -> dict[str, str]:
    """Make one of each unusable file; return what is said of it."""
    (folder / "empty").write_bytes(b"")
    (folder / "blank").write_bytes(b" \n\t\n")
    (folder / "binary").write_bytes(b"PDF\x00\x01")
    (folder / "latin1").write_bytes(b"caf\xe9 au lait")
    (folder / "cut").write_bytes("ä".encode()[:1])
    with (folder / "large").open("wb") as file:
        file.truncate(MAX_DOCUMENT_BYTES + 1)
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "broken").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    return {
        "missing": "No such file",
        "empty": "empty",
        "blank": "empty",
        "binary": "binary",
        "latin1": "not UTF-8: byte 0xe9 at offset 3",
        "cut": "not UTF-8",
        "large": "too large: expected at most 16 MiB",
        "folder": "cannot be read: Is a directory",
        "loop": "symbolic links",
        "broken": "No such file",
        "pipe": "no regular file",
        "a\x00b": "cannot be read",
        "empty/below": "cannot be read",
    }


def test_every_file_that_cannot_be_used_is_named_with_the_reason_and_the_rest_is_read(
    tmp_path: Path,
) -> None:
    faults = make_faults(tmp_path)
    (tmp_path / "good").write_text("good")

    found = read(tmp_path, *({"file": name} for name in faults), {"file": "good"})

    assert found.pop("good") == "good"
    for name, reason in faults.items():
        assert found[name].startswith("["), name
        assert reason in found[name]


def test_a_glob_names_what_it_cannot_use_too(tmp_path: Path) -> None:
    faults = make_faults(tmp_path)
    (tmp_path / "good").write_text("good")

    found = read(tmp_path, {"glob": "*"})

    assert found.pop("good") == "good"
    assert set(found) == set(faults) - {"missing", "folder", "a\x00b", "empty/below"}
    assert all(text.startswith("[") for text in found.values())


def test_a_file_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("a")
    real = os.open

    def refuse(path: Any, *rest: Any) -> int:  # root may read everything
        if str(path).endswith("a"):
            raise PermissionError(13, "Permission denied")
        return real(path, *rest)

    monkeypatch.setattr(os, "open", refuse)

    assert read(tmp_path, {"file": "a"}) == {"a": "[cannot be read: Permission denied]"}


def test_a_glob_without_a_match_is_named(tmp_path: Path) -> None:
    found = read(tmp_path, {"glob": "no/*.md"}, {"glob": "*.md"}, {"text": "x", "id": "x"})

    assert found == {
        "no/*.md": "[no file matches this pattern]",
        "*.md": "[no file matches this pattern]",
        "x": "x",
    }


def test_the_second_of_two_equal_ids_is_named_and_the_first_counts(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("first")
    ids = Ids()
    entries = [{"file": "a"}, {"text": "second", "id": "a"}, {"glob": "*"}]
    found = [
        one
        for entry in entries
        for one in read_documents(tmp_path, DocumentEntry.model_validate(entry), ids)
    ]

    assert [type(one) for one in found] == [Document, Problem, Problem]
    assert all("stands twice" in one.reason for one in found if isinstance(one, Problem))


def test_one_file_named_twice_is_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("a")
    monkeypatch.chdir(tmp_path)
    ids, entry = Ids(), DocumentEntry(file="a")

    found = [one for _ in range(2) for one in read_documents(Path(), entry, ids)]

    assert [type(one) for one in found] == [Document, Problem]


def test_a_name_that_is_no_text_gets_one(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).write_text("x")

    assert read(tmp_path, {"glob": "*"}) == {"caf\\xe9": "x"}


def walk(folder: Path, pattern: str) -> list[str]:
    found = matches(folder, pattern)
    return [
        f"[{one}]" if isinstance(one, LookError) else str(one.relative_to(folder)) for one in found
    ]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "a.md",
        "b.txt",
        "d/a.md",
        "d/d/a.md",
        "d/e/b.md",
        ".git/a.md",
        "d/.x.md",
        "[1].md",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.md", ["[1].md", "a.md"]),
        ("**/*.md", ["[1].md", "a.md", "d/a.md", "d/d/a.md", "d/e/b.md"]),
        ("**/d/**/a.md", ["d/a.md", "d/d/a.md"]),
        ("**/**/a.md", ["a.md", "d/a.md", "d/d/a.md"]),
        ("d/**", ["d/a.md", "d/d/a.md", "d/e/b.md"]),
        ("d/*/?.md", ["d/d/a.md", "d/e/b.md"]),
        ("./d/*.md", ["d/a.md"]),
        ("[ab].*", ["a.md", "b.txt"]),
        ("[[]1].md", ["[1].md"]),
        (".git/*", [".git/a.md"]),
        ("d/.*.md", ["d/.x.md"]),
        ("a.md", ["a.md"]),
        ("a.md/*", []),
        ("none/**", []),
    ],
)
def test_patterns_find_each_file_once_in_order(tree: Path, pattern: str, found: list[str]) -> None:
    assert walk(tree, pattern) == found
    assert walk(tree, str(tree / pattern)) == found


def test_folders_behind_links_are_looked_into_and_loops_are_named(tree: Path) -> None:
    (tree / "d" / "up").symlink_to(tree)
    (tree / "link").symlink_to(tree / "d" / "e")

    found = walk(tree, "**/b.md")

    assert "link/b.md" in found
    assert "d/e/b.md" in found
    loops = [one for one in found if "a link back" in one]
    assert len(loops) == 1
    assert "d/up" in loops[0]


def test_a_mounted_config_map_shows_every_file_once(tmp_path: Path) -> None:
    (tmp_path / "..2026_11_30").mkdir()
    (tmp_path / "..2026_11_30" / "a.md").write_text("a")
    (tmp_path / "..data").symlink_to("..2026_11_30")
    (tmp_path / "a.md").symlink_to("..data/a.md")

    assert walk(tmp_path, "**/*.md") == ["a.md"]


def test_a_folder_that_cannot_be_looked_into_is_named(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.listdir

    def refuse(path: Any) -> list[str]:
        if Path(path).name == "e":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)

    assert f"[{tree}/d/e: cannot be looked into: Permission denied]" in walk(tree, "**/*.md")


LINES = [
    b'{"model": "m", "messages": [{"role": "user"}], "seed": 18446744073709551617}',
    b"",
    b'{"model": "m",   "prompt": "p", "t": 1.0}  ',
    b"not json",
    b"[1]",
    b'{"model": "other", "prompt": "p"}',
    b'{"model": "m"}',
    b'{"model": "m", "prompt": "\xff"}',
]


def test_captured_requests_keep_their_bytes_and_bad_lines_are_named(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes(b"\n".join(LINES))

    found = list(read_captured(tmp_path, CapturedEntry(file="c.jsonl"), "m", Ids()))

    good = dict(one for one in found if not isinstance(one, Problem))
    assert good == {"c.jsonl:1": LINES[0], "c.jsonl:3": LINES[2].strip()}
    bad = {one.id: one.reason for one in found if isinstance(one, Problem)}
    assert list(bad) == [f"c.jsonl:{number}" for number in (4, 5, 6, 7, 8)]
    assert re.search("model 'm', got 'other'", bad["c.jsonl:6"])


def test_a_captured_line_without_end_is_named_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmup.captured.MAX_LINE_BYTES", 100)
    long = b'{"model": "m", "prompt": "' + b"x" * 1000 + b'"}'
    (tmp_path / "c").write_bytes(long + b"\n" + b'{"model": "m", "prompt": "p"}\n' + long)

    found = list(read_captured(tmp_path, CapturedEntry(file="c"), "m", Ids()))

    assert [one.id if isinstance(one, Problem) else one[0] for one in found] == [
        "c:1",
        "c:2",
        "c:3",
    ]
    assert [isinstance(one, Problem) for one in found] == [True, False, True]


@pytest.mark.parametrize("name", ["missing", "empty", "folder", "pipe"])
def test_a_captured_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    make_faults(tmp_path)

    (problem,) = read_captured(tmp_path, CapturedEntry(file=name), "m", Ids())

    assert isinstance(problem, Problem)
    assert problem.id == name


def test_a_path_too_long_for_an_id_is_named(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 200) / ("e" * 200)
    folder.mkdir(parents=True)
    (folder / "a").write_text("a")

    ((name, text),) = read(tmp_path, {"glob": "**/a"}).items()

    assert len(name) == 403
    assert text == "[403 characters are no id, expected at most 256: give it one]"
