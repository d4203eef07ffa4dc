"""Workers that stand in a YAML or JSON file: read again when it changes or is replaced."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from gateway.config import WorkerConfig
from gateway.config.words import in_words
from gateway.discovery.listing import Found
from gateway.discovery.stamps import LOOK_EVERY_S, Stamp, stamp_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway.config.discovery import FileDiscovery
    from gateway.discovery.listing import Listing

# Thousands of workers are a few hundred kilobytes; more is another file.
MAX_FILE_BYTES = 4 << 20


class FileError(Exception):
    """The file is no list of workers; the message says what was expected and where."""


class FileSource:
    """Reads a file whenever it changed.

    Args:
        config: Where the file is.
        sleep: Waits some seconds.
    """

    def __init__(
        self, config: FileDiscovery, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._path = config.path
        self._sleep = sleep

    async def run(self, listing: Listing) -> None:
        """Look every second; a file that cannot be used leaves the workers as they are."""
        seen: Stamp | object | None = object()
        while True:
            stamp = stamp_of(self._path)
            if stamp != seen:
                seen = stamp
                try:
                    # A folder on the network may be slow to answer.
                    found = await asyncio.to_thread(read_workers, self._path)
                except FileError as error:
                    listing.failed(str(error))
                else:
                    listing.told(found)
            await self._sleep(LOOK_EVERY_S)


def read_workers(path: str) -> list[Found]:
    """Read a file of workers: a list of them, or a mapping with ``workers``.

    Raises:
        FileError: If it cannot be read, or anything in it is wrong; nothing of it counts then.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise FileError(f"{path}: expected at most {MAX_FILE_BYTES >> 20} MiB")
        node = yaml.compose(data, Loader=yaml.SafeLoader)
        document = yaml.safe_load(data)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise FileError(f"{path}{line}: not valid YAML: {problem}") from error
    items, nodes = _items(document, node, path)
    found: dict[str, Found] = {}
    for i, item in enumerate(items):
        where = f"{path}:{nodes[i].start_mark.line + 1}"
        try:
            worker = WorkerConfig.model_validate(item)
        except ValidationError as error:
            raise FileError(f"{where}: {_first_problem(error)}") from None
        if worker.id in found:
            raise FileError(f"{where}: worker id {worker.id!r} stands twice")
        found[worker.id] = Found(worker)
    return list(found.values())


def _items(document: Any, node: Any, path: str) -> tuple[list[Any], list[Any]]:
    if isinstance(document, dict) and set(document) == {"workers"}:
        document, node = document["workers"], node.value[0][1]
    # An empty file is one that is being written: it must not cost a pool all its workers.
    if not isinstance(document, list):
        raise FileError(
            f"{path}:1: expected a list of workers ([] for none), or workers: with such a list"
        )
    return document, node.value


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    at = ".".join(str(part) for part in problem["loc"]) or "worker"
    text = in_words(problem, WorkerConfig)
    return text if problem["type"] == "extra_forbidden" else f"{at}: {text}"
