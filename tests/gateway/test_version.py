"""What ``warmlane --version`` says; ``make check-compiled`` runs this on the compiled build too."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

from gateway.routing import choose


def test_the_version_is_that_of_the_distribution_and_says_what_is_compiled() -> None:
    command = [sys.executable, "-m", "warmlane", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    build = "" if choose.__file__.endswith(".py") else " (compiled)"
    assert (done.returncode, done.stdout) == (0, f"warmlane {version('warmlane')}{build}\n")
