"""Compiling the kernels: once, safely, and never at the price of a start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from runner.ops.choice import choose_ops
from runner.ops.native.build import BuildError, build, cache_folder
from runner.ops.native.kernels import NativeOps
from runner.ops.native.library import load_kernels
from runner.ops.torch_ops import TorchOps
from tests.runner.ops_parts import config_of


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels as the compiler of this machine makes them."""
    try:
        return build(tmp_path_factory.mktemp("compiled"), os.environ)
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def compiler(tmp_path: Path, compiled: Path) -> Path:
    """What a compiler does, in no time; it notes each call."""
    script = tmp_path / "cxx"
    script.write_text(
        f'#!/bin/sh\necho called >> {tmp_path}/calls\nfor last; do :; done\ncp {compiled} "$last"\n'
    )
    script.chmod(0o755)
    return script


def environ_of(compiler: Path | str, home: Path) -> dict[str, str]:
    return {"CXX": str(compiler), "PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(home)}


def test_kernels_are_compiled_once_and_found_again(compiler: Path, tmp_path: Path) -> None:
    environ = environ_of(compiler, tmp_path / "cache")
    folder = cache_folder(environ)

    first = build(folder, environ)
    second = build(folder, environ)

    assert first == second
    assert (tmp_path / "calls").read_text().count("called") == 1
    # Nothing else stays behind, and nobody else may put anything there.
    assert list(folder.iterdir()) == [first]
    assert folder.stat().st_mode & 0o077 == 0


def test_another_compiler_never_meets_its_library(compiler: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = build(folder, environ_of(compiler, tmp_path))
    other = shutil.copy(compiler, tmp_path / "other")

    assert build(folder, environ_of(other, tmp_path)) != first


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "no C\\+\\+ compiler found"),
        ("#!/bin/sh\necho 'no such header' >&2\nexit 1\n", "no such header"),
        ("#!/bin/sh\nkill -9 $$\n", "failed: no message"),
        ("#!/no/such/interpreter\n", "."),
        ("#!/bin/sh\nexit 0\n", "."),
    ],
    ids=["missing", "fails", "is killed", "cannot run", "writes nothing"],
)
def test_a_compiler_that_does_not_work_costs_speed_and_nothing_else(
    script: str | None, reason: str, tmp_path: Path
) -> None:
    fake = tmp_path / "cxx"
    if script is not None:
        fake.write_text(script)
        fake.chmod(0o755)
    environ = environ_of(fake, tmp_path)

    with pytest.raises(BuildError, match=reason):
        build(cache_folder(environ), environ)
    ops = choose_ops(config_of(), torch.bfloat16, 1, environ)

    assert type(ops) is TorchOps


def test_a_library_that_cannot_be_loaded_leaves_the_torch_path(
    compiler: Path, tmp_path: Path
) -> None:
    environ = environ_of(compiler, tmp_path)
    build(cache_folder(environ), environ).write_bytes(b"not a library")

    assert isinstance(load_kernels(cache_folder(environ), torch.float32, environ), BuildError)
    assert type(choose_ops(config_of(), torch.float32, 1, environ)) is TorchOps


@pytest.mark.parametrize("kind", ["writable by others", "a file", "not writable"])
def test_a_cache_folder_that_cannot_be_trusted_or_used_is_not(
    kind: str, compiler: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kernels"
    if kind == "a file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777 if kind == "writable by others" else 0o500)
    if kind == "not writable" and os.getuid() == 0:
        pytest.skip("root may write everywhere")

    with pytest.raises(BuildError):
        build(folder, environ_of(compiler, tmp_path))


def test_where_a_compiler_is_the_kernels_are_used(compiler: Path, tmp_path: Path) -> None:
    ops = choose_ops(config_of(), torch.bfloat16, 1, environ_of(compiler, tmp_path))

    assert isinstance(ops, NativeOps)
