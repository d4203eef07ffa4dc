"""Commands, keys, metrics and paths that the pages name are those of the code.

The generated references (`docs/reference/`) are compared with the code elsewhere; here every other
page is compared with them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from gateway.__main__ import all_commands
from gateway.config import Settings
from gateway.doctor.checklist.run import LINES
from gateway.replay.registry import NAMES
from runner.config import make_parser
from warmup.__main__ import app as warmup_app

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted(
    page.relative_to(ROOT)
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "helm/warmlane/README.md")
    if REFERENCE not in page.parents
)
SPAN = re.compile(r"`([^`\n]+)`")
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
METRIC = re.compile(r"(warmlane_[a-z0-9_]*[a-z0-9])(?:\{.*\})?")
ADMIN = re.compile(r"/admin/v1/[a-z]+(?:/(?:\{id\}|ID|NAME)/[a-z]+)?")
# What a page writes behind a command: a comment, or its result two spaces further on.
TALK = re.compile(r"\s+#.*|\s{2,}[a-z].*|\s+>.*|\s+\|.*|;.*")


def text_of(page: Path) -> str:
    return (ROOT / page).read_text("utf-8")


def spans(text: str) -> list[str]:
    return SPAN.findall(BLOCK.sub("", text))


def commands(text: str) -> Iterator[list[str]]:
    """Every `warmlane ...` of a page, as words without the first."""
    lines = [line for _, block in BLOCK.findall(text) for line in block.splitlines()]
    for line in (*lines, *spans(text)):
        if found := re.match(r"(?:\$ )?(?:[\w/.]*/)?warmlane ([a-z].*)", line):
            words = re.sub(r"(?<=[a-z]) +(?=[A-Z])", " ", found[1])
            # What the reader puts in.
            words = re.sub(r"(?<=--gateway )(\$GATEWAY|URL)", "http://127.0.0.1:8080", words)
            yield shlex.split(TALK.sub("", words))


def parse(words: list[str]) -> None:
    """Read a command as the program does; a mention without its arguments will do.

    Raises:
        Exception: The parser's own, if it refuses.
    """
    if words[0] == "runner":
        make_parser().parse_args(words[1:])
        return
    rest = words[1:] if words[0] == "warmup" else words
    command: Any = typer.main.get_command(warmup_app if words[0] == "warmup" else all_commands())
    while rest and hasattr(command, "commands"):
        assert rest[0] in command.commands, f"no such command: {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    try:
        if not hasattr(command, "commands"):
            command.make_context(command.name, list(rest))
    except Exception as error:
        if type(error).__name__ != "MissingParameter":
            raise


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_of_a_page_can_be_given(page: Path) -> None:
    refused = {}
    for words in commands(text_of(page)):
        try:
            parse(words)
        except (Exception, SystemExit) as error:
            refused[" ".join(words)] = str(error)
    assert refused == {}


def test_policies_of_replay_exist() -> None:
    named = {
        policy.split(":")[0]
        for page in PAGES
        for words in commands(text_of(page))
        if "--policy" in words
        for policy in words[words.index("--policy") + 1].split(",")
    }
    assert named
    assert named <= set(NAMES)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_metrics_of_a_page_are_exported(page: Path) -> None:
    known = set(re.findall(r"^\| `(\w+)`", (REFERENCE / "metrics.md").read_text(), re.MULTILINE))
    named = {found[1] for span in spans(text_of(page)) if (found := METRIC.fullmatch(span))}

    assert {name for name in named if not {name, _family(name)} & known} == set()


def _family(series: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", series)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_admin_paths_of_a_page_exist(page: Path) -> None:
    source = (ROOT / "gateway" / "admin" / "endpoints.py").read_text()
    known = set(re.findall(r'"(/admin/v1/[^"]+)"', source))
    named = {re.sub(r"/(ID|NAME)/", "/{id}/", path) for path in ADMIN.findall(text_of(page))}

    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_configurations_of_a_page_are_valid(page: Path) -> None:
    blocks = [block for kind, block in BLOCK.findall(text_of(page)) if kind == "yaml"]
    written = [*map(yaml.safe_load, blocks), *map(_mapping, spans(text_of(page)))]
    pool = {"name": "chat", "models": ["m"], "workers": [{"id": "w0", "url": "http://h:1"}]}

    for found in written:
        if isinstance(found, dict) and set(found) <= set(Settings.model_fields):
            Settings.model_validate({"pools": [pool], **found})


def _mapping(span: str) -> Any:
    """Read `section: {key: value}`; None if the span is something else."""
    if not re.fullmatch(r"\w+: \{.*\}", span):
        return None
    return yaml.safe_load(span)


# Decisions name functions, and attributes of spans are called as keys are.
WITH_KEYS = [page for page in PAGES if "adr" not in page.parts and page.name != "traces.md"]


@pytest.mark.parametrize("page", WITH_KEYS, ids=str)
def test_keys_of_a_page_are_those_of_the_configuration(page: Path) -> None:
    schema = Settings.model_json_schema()
    sections = "|".join(schema["properties"])
    key = re.compile(rf"((?:{sections})(?:\[\])?(?:\.\w+(?:\[\])?)+)(?:: .*)?")
    named = {found[1] for span in spans(text_of(page)) if (found := key.fullmatch(span))}

    assert {name for name in named if not _is_key(schema, name)} == set()


def _is_key(schema: dict[str, Any], name: str) -> bool:
    at = [schema]
    for part in name.replace("[]", "").split("."):
        at = [
            found["properties"][part]
            for one in at
            for found in _sections(schema, one)
            if part in found.get("properties", {})
        ]
    return bool(at)


def _sections(schema: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every section that a value may be."""
    if "$ref" in node:
        yield from _sections(schema, schema["$defs"][node["$ref"].rsplit("/", 1)[1]])
    yield node
    for one in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _sections(schema, one)
    if isinstance(node.get("items"), dict):
        yield from _sections(schema, node["items"])


def test_the_checklist_in_operations_is_that_of_the_command() -> None:
    text = text_of(Path("docs/operations.md"))
    table = text.split("## The checklist")[1].split("\n## ")[0]

    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)[1:]
    assert rows == [title for _, title, _ in LINES]
