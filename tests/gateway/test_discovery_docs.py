"""What the pages on discovery and reload show can be used as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gateway.config import Settings
from gateway.discovery.from_file import read_workers
from gateway.reload.changes import FIXED_ACCESS, FIXED_POOL, FIXED_ROUTING, FIXED_SERVER

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
BLOCKS = re.findall(r"```yaml\n(.*?)```", (DOCS / "discovery.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("text", [block for block in BLOCKS if block.startswith("pools:")])
def test_each_example_is_a_configuration(text: str) -> None:
    pool = Settings.model_validate(yaml.safe_load(text)).pools[0]
    assert f"type: {pool.discovery.type}" in text


def test_the_file_of_workers_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(next(block for block in BLOCKS if block.startswith("- {id: w0")))
    assert [found.worker.id for found in read_workers(str(path))] == ["w0", "w1"]


def test_the_role_may_list_and_watch_and_nothing_else() -> None:
    role = yaml.safe_load(next(block for block in BLOCKS if "kind: Role" in block))
    assert role["kind"] == "Role"
    assert {tuple(rule["verbs"]) for rule in role["rules"]} == {("list", "watch")}
    assert [rule["resources"] for rule in role["rules"]] == [["pods"], ["endpointslices"]]


def test_all_that_needs_a_restart_is_named() -> None:
    text = (DOCS / "reload.md").read_text()
    table = "".join(line.split("|")[2] for line in text.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`([a-z_.]+)`", table))
    names = {*FIXED_SERVER, *FIXED_POOL, "index", "telemetry"}
    names |= {f"access.{name}" for name in FIXED_ACCESS}
    names |= {f"routing.{name}" for name in FIXED_ROUTING}
    assert names <= named
