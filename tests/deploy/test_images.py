"""The Dockerfiles: clean, pinned, and what they copy, install and start is there."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.deploy.images import (
    PROJECT,
    REPOSITORY,
    Image,
    build_context,
    build_wheel,
    read_dockerfile,
)
from tests.deploy.site import Site, Spec
from tests.tools import tool

DOCKERFILES = sorted((REPOSITORY / "deploy").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    command = [str(tool("hadolint")), "--failure-threshold", "style", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_bases_are_pinned_and_nobody_is_root(path: Path) -> None:
    text = path.read_text()
    stages = set(re.findall(r" AS ([\w-]+)", text))
    bases = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) - stages

    assert {base for base in bases if "$" not in base} == {"python:3.11.14-slim-bookworm"}
    assert read_dockerfile(path).user == "10001:10001"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_gets_past_the_ignore_file(path: Path, tmp_path: Path) -> None:
    build_context(tmp_path)
    sources = [
        name
        for line in re.findall(r"^COPY (?!--from)(.+)$", path.read_text(), re.MULTILINE)
        for name in line.split()[:-1]
    ]

    assert sources
    assert [name for name in sources if not (tmp_path / name).exists()] == []


def test_the_wheel_of_the_build_context_is_whole(tmp_path: Path) -> None:
    """What is not in it would be missing in every image: pages, kernels' sources, markers."""
    names = set(zipfile.ZipFile(build_wheel(tmp_path)).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "gateway", "prefix_index", "runner", "warmup", "warmlane.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    here = {name for name in tracked if (REPOSITORY / name).exists()}
    assert sorted(here - names) == []
    assert not [name for name in names if name.startswith(("tests/", "bench/", "deploy/"))]


def test_dependencies_are_those_of_the_project() -> None:
    def printed(*extras: str) -> list[str]:
        script = [sys.executable, "deploy/requirements.py", *extras]
        done = subprocess.run(script, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert printed() == PROJECT["dependencies"]
    assert printed("runner") == [
        *PROJECT["dependencies"],
        *PROJECT["optional-dependencies"]["runner"],
    ]
    # deploy/runner.Dockerfile takes this line out to choose the build of torch.
    assert [line for line in printed("runner") if re.match("torch==", line)]


def test_each_image_says_what_its_default_command_can_do(
    images: dict[str, Image], tmp_path: Path
) -> None:
    with Site(tmp_path) as site:
        for image in images.values():
            command, *_ = image.command
            done = site.start(Spec(("help",), image, args=[command, "--help"]))
            assert done.wait() == 0, done.output
            assert f"warmlane {command}" in done.output


def test_the_gateway_image_runs_without_torch(images: dict[str, Image], tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        done = site.start(Spec(("torch",), images["warmlane"], args=["runner"]))

        assert done.wait() == 1
        assert "the extra `runner`" in done.output
