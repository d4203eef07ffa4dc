"""Holds the compiled wheel to the tests: ``python -m tests.check_compiled [PYTEST_ARGUMENT...]``.

Builds it, lays it out beside the tests in a temporary folder, imports every module of the product
alone in a process of its own, and runs the tests of what is compiled there, in one process per
core. Everything else about a compiled module can be seen in its source, and
``test_compiled_modules.py`` does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.compiled_parts import COMPILED, PACKAGES, REPOSITORY, module_name

# What runs on the request's path or feeds it with bytes from outside, in less time than the build
# takes; the rest of the suite holds the same sources to their meaning, uncompiled.
CHOSEN = {
    "tests/gateway": (
        "anthropic* api_openai bodies body books* cases_[!d]* cost deadline dispatch* faults "
        "fault_matrix framing front gate* health http include_usage keep_warm limits misses "
        "observing outbound parity pool prices prompt_segments proxy* resilience rewrite* ring "
        "rollout routes* routing smuggling splice sse surfaces telemetry tenancy traces upstream "
        "usage version worth*"
    ),
    "tests/prefix_index": (
        "anchors blocks index index_[!p]* ingest* memo prompts* residency segments tokens volatile"
    ),
    "tests": "compiled_modules fuzz",
}
# Two need little memory beside a build, and no machine that runs this has fewer cores.
NUM_PROCESSES = 2

# Imports what others bring once, then forks: a child has the product's modules yet to import, as a
# new process has, at a tenth of the time.
_IMPORT_ALONE = """
import contextlib, importlib, os, sys
compiled, names = set(sys.argv[1].split()), sys.argv[2].split()
def alone(name):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    module = importlib.import_module(name)
    if name in compiled and module.__file__.endswith(".py"):
        print(name, "is not compiled", file=sys.stderr)
        os._exit(1)
    os._exit(0)
for name in os.environ["OTHERS"].split():
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
faults = {name: code for name in names if (code := alone(name))}
sys.exit(f"do not import alone: {faults}" if faults else 0)
"""


def main(arguments: list[str]) -> int:
    """Run it all; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="warmlane-compiled-") as name:
        folder = Path(name)
        tree = laid_out(built(folder), folder / "tree")
        import_alone(tree)
        return run_tests(tree, arguments)


def built(folder: Path) -> Path:
    """Build the compiled wheel from the working tree, with the compiler of this environment."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    environment = os.environ | {"WARMLANE_COMPILE": "1"}
    command = [*pip, "--wheel-dir", str(folder), str(REPOSITORY)]
    subprocess.run(command, check=True, env=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def laid_out(wheel: Path, tree: Path) -> Path:
    """Lay out a checkout in which the wheel stands in the place of the product's sources."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for file in map(Path, filter(None, listed.stdout.split("\0"))):
        if file.parts[0] not in PACKAGES and (REPOSITORY / file).is_file():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / file, tree / file)
    (tree / "models").symlink_to(REPOSITORY / "models")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree)
    return tree


def import_alone(tree: Path) -> None:
    """Import every module first in a process: none may rest on another's having been imported.

    Raises:
        CalledProcessError: At least one does not import, or a compiled one came from its source.
    """
    # The runner has torch to import, and of what is compiled only what others begin with too.
    packages = [package for package in PACKAGES if package != "runner"]
    files = [file for package in packages for file in sorted((tree / package).rglob("*.py"))]
    names = [module_name(file.relative_to(tree)) for file in files]
    names = [name for name in names if not name.endswith("__main__")]
    all_of_it = "import sys\nfor name in sys.argv[1].split(): __import__(name)\nprint(*sys.modules)"
    every = _python(tree, all_of_it, " ".join(names)).split()
    others = [name for name in every if name.partition(".")[0] not in (*PACKAGES, "__main__")]
    compiled = " ".join(map(module_name, COMPILED))
    _python(tree, _IMPORT_ALONE, compiled, " ".join(names), OTHERS=" ".join(others))
    print(f"{len(names)} modules import alone, {len(COMPILED)} of them compiled", flush=True)


def run_tests(tree: Path, arguments: list[str]) -> int:
    """Run the chosen tests in a few processes; return 0 if all passed."""
    files = sorted(
        file
        for folder, names in CHOSEN.items()
        for name in names.split()
        for file in (tree / folder).glob(f"test_{name}.py")
    )
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    shares = [files[part::NUM_PROCESSES] for part in range(NUM_PROCESSES)]
    commands = [[*pytest, *(str(file.relative_to(tree)) for file in share)] for share in shares]
    runs = [subprocess.Popen(each, cwd=tree, env=_environment(tree)) for each in commands]
    return max(run.wait() for run in runs)


def _environment(tree: Path) -> dict[str, str]:
    # Before an editable install of the sources, in the commands too that tests start.
    return os.environ | {"PYTHONPATH": str(tree)}


def _python(tree: Path, code: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tree, env=_environment(tree) | environment, check=True, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
