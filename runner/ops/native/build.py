"""Compile the C++ kernels for this machine, once: later starts find the library in a cache folder.

The name of the cached file is a digest of everything it depends on: sources, compiler, flags and
the processor's features, so a home folder shared by different machines holds one for each, and an
upgrade never meets an old one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess  # nosec: runs the compiler, with arguments of our own
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCES = Path(__file__).parent

# What is set for a whole machine or build farm comes first.
_COMPILERS = ("c++", "g++", "clang++")

# A few seconds of work; a compiler that needs more is stuck, and a start must not hang with it.
_TIMEOUT_S = 120

_FLAGS = (
    "-O3", "-std=c++17", "-shared", "-fPIC", "-w",
    # Both only give up what nobody reads here: errno and floating-point traps.
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip

# The same torch brings along, so both share one team of threads. Left out where it is missing.
_THREADS = ("-fopenmp",)


class BuildError(RuntimeError):
    """The kernels cannot be had here; the message says why."""


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return where compiled kernels are kept: below XDG_CACHE_HOME, else below ~/.cache."""
    root = environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "warmlane" / "kernels"


def build(folder: Path, environ: Mapping[str, str]) -> Path:
    """Return the compiled library, compiling it if ``folder`` has none that fits.

    Safe against processes that build at the same time: each writes a file of its own and renames
    it. Any thread.

    Args:
        folder: Cache; made if missing, readable by its owner only.
        environ: ``CXX`` names the compiler if it is set.

    Raises:
        BuildError: If there is no compiler, it fails, or the folder cannot be trusted or written.
    """
    compiler = find_compiler(environ)
    target = folder / f"{_digest(compiler)}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        if not target.is_file():
            _compile(compiler, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler}: {error}") from error
    return target


def find_compiler(environ: Mapping[str, str]) -> str:
    """Return the path of a C++ compiler.

    Raises:
        BuildError: If there is none.
    """
    named = environ.get("CXX")
    for name in (named,) if named else _COMPILERS:
        if path := shutil.which(name, path=environ.get("PATH")):
            return path
    raise BuildError(f"no C++ compiler found (looked for {named or ', '.join(_COMPILERS)})")


def _check_owner(folder: Path) -> None:
    """Code is loaded from here: nobody else may be able to put it there."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BuildError(f"{folder} is not ours alone to write")


def _compile(compiler: str, target: Path) -> None:
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        out = Path(scratch) / "kernels.so"
        message = ""
        for threads in (_THREADS, ()):
            command = [compiler, *_FLAGS, _machine_flag(), *threads, *sources, "-o", str(out)]
            done = subprocess.run(  # noqa: S603
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
            if done.returncode == 0:
                out.rename(target)
                return
            message = done.stderr.strip().splitlines()[0] if done.stderr.strip() else "no message"
        raise BuildError(f"{compiler} failed: {message}")


def _machine_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"


def _digest(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    status = Path(compiler).stat()
    for part in (compiler, status.st_size, status.st_mtime_ns, _FLAGS, _THREADS, _cpu_features()):
        digest.update(repr(part).encode())
    return digest.hexdigest()[:32]


def _cpu_features() -> str:
    """Return what tells processors apart, as far as code made for one fails on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
