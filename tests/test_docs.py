"""The documentation speaks of files and commands that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    page.relative_to(ROOT)
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if ".venv" not in page.parts
)
# `path/file.py` or `path/`, as the pages write them.
NAMED = re.compile(r"`((?:gateway|prefix_index|runner|warmup|bench|tests|docs|deploy)/[\w./-]*)`")
LINKED = re.compile(r"\]\(([^)#:]+)\)")


# The changelog names what is gone, too.
TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", TODAY, ids=str)
def test_files_named_on_a_page_exist(page: Path) -> None:
    text = (ROOT / page).read_text()

    missing = [name for name in NAMED.findall(text) if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = (ROOT / page).read_text()

    links = [link for link in LINKED.findall(text) if not link.startswith("http")]
    assert [link for link in links if not (ROOT / page.parent / link).exists()] == []


def test_architecture_walks_the_request_in_ten_steps() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()

    assert re.findall(r"^(\d+)\. \*\*", text, re.MULTILINE) == [str(n) for n in range(1, 11)]
    assert len(NAMED.findall(text)) > 40


def test_readme_names_only_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    usage = subprocess.run(
        [sys.executable, "-m", "warmlane", "--help"], capture_output=True, text=True, check=True
    ).stdout
    known = {line.split()[0] for line in usage.splitlines() if line.startswith("  ")}

    assert set(re.findall(r"^(?:`)?warmlane (\w+)", readme, re.MULTILINE)) <= known


def test_make_help_lists_the_targets_of_the_readme() -> None:
    listed = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout

    for target in re.findall(r"(?:^|`)make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert f"make {target}" in listed
