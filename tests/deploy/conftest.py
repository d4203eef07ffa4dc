"""The images of the project, made once: pods and compose services start from them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from runner.ops.native.build import cache_folder
from tests.deploy.images import Image, build_wheel, product_image

# The user of both images.
USER = 10001


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Image]:
    """Repository of an image -> what it holds: the gateway's and the CPU runner's."""
    folder = tmp_path_factory.mktemp("images")
    # Containers have users of their own, and pytest keeps its folders to itself.
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    wheel = build_wheel(folder)
    return {
        "warmlane": product_image("gateway.Dockerfile", wheel, folder / "gateway", extra=None),
        "warmlane-runner": product_image(
            "runner.Dockerfile", wheel, folder / "runner", extra="runner"
        ),
    }


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for the images' user with the kernels that this machine has compiled before.

    Compiling them takes a processor for half a minute and has tests of its own.
    """
    folder = tmp_path_factory.mktemp("kernels")
    cache = cache_folder({"XDG_CACHE_HOME": str(folder)})
    cache.mkdir(parents=True)
    for compiled in cache_folder(os.environ).glob("*.so"):
        shutil.copy2(compiled, cache)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)
        path.chmod(0o755)
    return folder
