"""Build hook: with ``WARMLANE_COMPILE=1`` the wheel carries the hot path compiled by mypyc.

Without it, and in an editable install always, the wheel is pure Python. The sources travel in both:
a compiled module is a library beside its source that the import system prefers.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "WARMLANE_COMPILE"
# Optimisation of the C compiler: -O3 takes longer and wins nothing measurable over it.
OPT_LEVEL = "2"
# Of the library that all compiled modules share; mypyc appends to it.
GROUP = "warmlane"


class CompileHook(BuildHookInterface[Any]):
    """Compiles the modules that ``pyproject.toml`` lists and puts them into the wheel."""

    def dependencies(self) -> list[str]:
        """Return what the build needs besides: the compiler, and what the sources import.

        mypyc compiles by types, so those of every package must be there as they are in use.
        """
        if os.environ.get(SWITCH) != "1":
            return []
        compiler: list[str] = self.config["compiler"]
        return [*compiler, *self.metadata.core.dependencies]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, if asked to, and add the libraries to the wheel."""
        if os.environ.get(SWITCH) != "1" or version == "editable":
            return
        # Outlives this call: hatchling copies the libraries into the wheel after it.
        self._folder = tempfile.TemporaryDirectory(prefix="warmlane-compile-")
        folder = Path(self._folder.name)
        for library in compiled(Path(self.root), self.config["modules"], folder):
            build_data["force_include"][str(library)] = str(library.relative_to(folder / "lib"))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was built."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def compiled(root: Path, modules: list[str], folder: Path) -> list[Path]:
    """Compile modules of the project and return the libraries, under ``folder/lib``.

    Changes the working directory while it runs, as mypy reads its settings from there.

    Args:
        root: The project's root.
        modules: Files, relative to it.
        folder: Empty; the C sources and objects go here too.

    Raises:
        SystemExit: The modules do not compile.
    """
    # Only in the environment of a build that compiles.
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    class Command(build_ext):
        """Compiles the files of one library side by side too: nearly all belong to one."""

        def build_extensions(self) -> None:
            one_by_one = self.compiler.compile
            self.compiler.compile = lambda sources, **options: [
                produced
                for batch in pool.map(lambda each: one_by_one([each], **options), sources)
                for produced in batch
            ]
            super().build_extensions()

    before, path = Path.cwd(), list(sys.path)
    os.chdir(root)
    try:
        extensions = mypycify(
            [f"--cache-dir={folder / 'cache'}", *modules],
            opt_level=OPT_LEVEL,
            debug_level="0",
            multi_file=True,
            target_dir=str(folder / "c"),
            group_name=GROUP,
        )
        command = Command(Distribution({"ext_modules": extensions}))
        command.parallel = os.cpu_count()
        command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "objects")
        command.ensure_finalized()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            command.run()
    finally:
        os.chdir(before)
        sys.path[:] = path
    return [Path(output) for output in command.get_outputs()]
