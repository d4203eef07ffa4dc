"""What the project's images hold, made without a container engine: the wheel in an environment.

The wheel is built from the very files a builder would get, and each environment holds only what the
product declares, as links to this environment's packages: what is not declared cannot be imported.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distribution
from pathlib import Path

import orjson
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
# Where the Dockerfiles put the environment.
PREFIX = "/opt/warmlane"
# Where containers find the packages: this environment's own place may be one that they mount over.
PACKAGES = "/opt/packages"


@dataclass(frozen=True)
class Image:
    """What a container starts from.

    Attributes:
        entrypoint: Comes before a container's own arguments.
        command: Those arguments if a container has none.
        env: Variables it sets.
        user: Numeric ``uid:gid``.
        binds: Path inside -> what is there, besides this machine's own files.
    """

    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    binds: dict[str, Path] = field(default_factory=dict)


def build_context(into: Path) -> None:
    """Copy what ``.dockerignore`` lets through: the files a builder gets."""
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    for kept in (line[1:] for line in lines if line.startswith("!")):
        source, target = REPOSITORY / kept, into / kept
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)


def build_wheel(folder: Path) -> Path:
    """Build the wheel as the Dockerfiles do and return its path."""
    context = folder / "context"
    build_context(context)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(context)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def product_image(dockerfile: str, wheel: Path, folder: Path, *, extra: str | None) -> Image:
    """Make the environment of one Dockerfile in ``folder`` and read the rest from it."""
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    # It is moved to PREFIX afterwards.
    script = folder / "bin" / "warmlane"
    script.write_text(script.read_text().replace(str(python), f"{PREFIX}/bin/python"))
    (site_packages,) = folder.glob("lib/python*/site-packages")
    wanted = [*PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] if extra else ())]
    _link_distributions(wanted, site_packages)
    entry = read_dockerfile(REPOSITORY / "deploy" / dockerfile)
    binds = {PREFIX: folder, PACKAGES: Path(sysconfig.get_path("purelib"))}
    return Image(entry.entrypoint, entry.command, entry.env, entry.user, binds)


def read_dockerfile(path: Path) -> Image:
    """Read what the last stage says of how a container starts."""
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE))
    last = text[text.rindex("\nFROM ") :]
    said = {
        key: [line.split(None, 1)[1] for line in last.splitlines() if line.startswith(f"{key} ")]
        for key in ("ENV", "ENTRYPOINT", "CMD", "USER")
    }
    env = dict(pair.split("=", 1) for line in said["ENV"] for pair in shlex.split(line))
    env["PATH"] = env["PATH"].replace("$PATH", "/usr/local/bin:/usr/bin:/bin")
    return Image(
        orjson.loads(said["ENTRYPOINT"][0]), orjson.loads(said["CMD"][0]), env, said["USER"][0]
    )


def _link_distributions(wanted: list[str], site_packages: Path) -> None:
    """Link every package of these requirements and of theirs."""
    seen: set[tuple[str, str]] = set()
    queue = [(Requirement(text), "") for text in wanted]
    while queue:
        requirement, extra = queue.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        found = distribution(requirement.name)
        for asked in ("", *requirement.extras):
            if (requirement.name, asked) in seen:
                continue
            seen.add((requirement.name, asked))
            queue += [(Requirement(text), asked) for text in found.requires or ()]
        _link(found, site_packages)


def _link(found: Distribution, site_packages: Path) -> None:
    assert Path(str(found.locate_file(""))) == Path(sysconfig.get_path("purelib")), found.name
    for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        if not os.path.lexists(site_packages / name):
            (site_packages / name).symlink_to(f"{PACKAGES}/{name}")
