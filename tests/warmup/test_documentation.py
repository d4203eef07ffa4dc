"""What the page and the example say is what the command does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.warmup.fake_gateway import FakeGateway
from warmup.__main__ import main
from warmup.manifest import DocumentEntry, Frame, Manifest, Placing

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "warmup.md").read_text()
EXAMPLE = ROOT / "deploy" / "warmup.example.yaml"
KUBERNETES = [
    yaml.safe_load(block)
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    if "apiVersion" in block
]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The example with the documents it names."""
    (tmp_path / "policies" / "travel").mkdir(parents=True)
    (tmp_path / "handbook.md").write_text("# Handbook\n")
    (tmp_path / "policies" / "travel" / "trains.md").write_text("Take trains.\n")
    return Path(shutil.copy(EXAMPLE, tmp_path / "warmup.yaml"))


def test_the_example_is_warmed_as_it_stands(example: Path, gateway: FakeGateway) -> None:
    assert main(["run", str(example), "--gateway", gateway.url]) == 0

    (request,) = gateway.requests
    items = {item["id"]: item for item in request["items"]}
    assert list(items) == ["handbook", "policies/travel/trains.md", "house-rules"]
    assert items["handbook"]["copies"] == 2
    assert {item["version"] for item in items.values()} == {"2026-11"}
    assert request["budget_tokens"] == 2_000_000


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["spec"]
    job = spec["jobTemplate"]["spec"] if manifest["kind"] == "CronJob" else spec
    pod: dict[str, Any] = job["template"]["spec"]
    return pod


@pytest.mark.parametrize("manifest", KUBERNETES, ids=lambda manifest: manifest["kind"])
def test_the_pods_of_the_page_run(
    manifest: dict[str, Any],
    example: Path,
    gateway: FakeGateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pod = pod_of(manifest)
    (container,) = pod["containers"]
    command, *args = container["args"]
    assert command == "warmup"
    assert args[1] == container["volumeMounts"][0]["mountPath"] + "/warmup.yaml"
    args[1] = str(example)
    args[args.index("--gateway") + 1] = gateway.url
    gateway.token = "token-of-the-test"  # noqa: S105  # a test's own
    monkeypatch.setenv(container["env"][0]["name"], gateway.token)

    assert main(args) == 0


def test_the_page_shows_both_kinds_of_jobs() -> None:
    assert [manifest["kind"] for manifest in KUBERNETES] == ["Job", "CronJob"]


def test_every_flag_of_the_page_exists_and_the_other_way_round() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "warmup", "run", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    flags = set(re.findall(r"--[a-z-]+", shown)) - {"--help"}
    page = set(re.findall(r"(?<![-\w])--[a-z][a-z-]*", PAGE))

    assert page == flags


def test_every_key_of_the_manifest_is_on_the_page() -> None:
    keys = {
        name
        for section in (Manifest, Frame, Placing, DocumentEntry)
        for name in section.model_fields
    }

    assert [key for key in sorted(keys) if f"`{key}" not in PAGE and f"{key}:" not in PAGE] == []
