"""Programs that tests run and that pip cannot bring: missing ones skip here and fail in CI."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

# The Debian package that holds each program; `.ci/run` installs them.
DEBIAN_PACKAGES = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "chromium": "chromium",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}


def tool(name: str) -> Path:
    """Return the path of a program; this environment's own come before the system's.

    Skips the calling test where it is missing, and fails it where ``CI=true``.
    """
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which(name, path=folders)
    if found is not None:
        return Path(found)
    package = DEBIAN_PACKAGES.get(name)
    reason = f"{name} is missing" + (f" (Debian package {package})" if package else "")
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
