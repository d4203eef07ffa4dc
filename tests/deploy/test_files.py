"""YAML and shell scripts of the repository pass their linters."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.deploy.images import REPOSITORY
from tests.tools import tool


def tracked(*patterns: str) -> list[str]:
    command = ["git", "ls-files", "--", *patterns]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file()]


def scripts() -> list[str]:
    """Every file that begins with a shell's name."""
    starts = (b"#!/bin/sh", b"#!/bin/bash", b"#!/usr/bin/env bash", b"#!/usr/bin/env sh")
    names = tracked(":!*.py", ":!*.md", ":!tests/data")
    return [name for name in names if (REPOSITORY / name).read_bytes()[:32].startswith(starts)]


def test_yaml_is_clean() -> None:
    # Templates of the chart are YAML only once they are rendered.
    files = tracked("*.yaml", "*.yml", ":!helm/warmlane/templates", ":!tests/data")
    assert "docker-compose.yml" in files
    command = [str(tool("yamllint")), "--strict", "--config-file", ".yamllint.yaml", *files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", scripts())
def test_scripts_are_clean(name: str) -> None:
    command = [str(tool("shellcheck")), str(Path(name))]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")
