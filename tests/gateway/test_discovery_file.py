"""Workers from a file: changes count, broken files do not."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from gateway.config import WorkerConfig
from gateway.config.discovery import FileDiscovery
from gateway.discovery.from_file import FileError, FileSource, read_workers
from gateway.discovery.listing import Found
from tests.gateway.discovery_parts import Told
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ONE = '- {id: w1, url: "http://127.0.0.1:1"}\n'
TWO = ONE + '- {id: w2, url: "http://127.0.0.1:2", kv_events: "tcp://127.0.0.1:3"}\n'


@asynccontextmanager
async def following(path: Path) -> AsyncIterator[Told]:
    told = Told()
    source = FileSource(
        FileDiscovery(type="file", path=str(path)), sleep=lambda _s: asyncio.sleep(0.01)
    )
    task = asyncio.create_task(source.run(told.listing))
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_file_that_is_written_or_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(ONE)
    async with following(path) as told:
        await poll_until(lambda: told.ids == ["w1"])
        path.write_text(TWO)
        await poll_until(lambda: told.ids == ["w1", "w2"])
        other = tmp_path / "new.yaml"
        other.write_text(ONE)
        os.replace(other, path)
        await poll_until(lambda: told.ids == ["w1"])


async def test_a_mounted_config_map_whose_folder_is_exchanged_counts(tmp_path: Path) -> None:
    for name, text in (("v1", ONE), ("v2", TWO)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "workers.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("v1")
    path = tmp_path / "workers.yaml"
    path.symlink_to("..data/workers.yaml")
    async with following(path) as told:
        await poll_until(lambda: told.ids == ["w1"])
        (tmp_path / "..tmp").symlink_to("v2")
        os.replace(tmp_path / "..tmp", tmp_path / "..data")
        await poll_until(lambda: told.ids == ["w1", "w2"])


BROKEN = {
    "no YAML": ("- {id: w1", ":1: not valid YAML"),
    "no list": ("w1", "expected a list of workers"),
    "nothing, as while it is written": ("", ":1: expected a list of workers"),
    "comments only": ("# - {id: w1}\n", ":1: expected a list of workers"),
    "a key without a list": ("workers:\n", ":1: expected a list of workers"),
    "another mapping": ("hosts: []", "expected a list of workers"),
    "unknown key": (TWO + "- {id: w3, url: 'http://h:1', weight: 2}", ":3: unknown key 'weight'"),
    "no id": ("- {url: 'http://h:1'}", ":1: id: is required"),
    "no URL": ("- {id: w1, url: 'ftp://h'}", ":1: url: expected http://HOST"),
    "twice": (ONE + ONE, ":2: worker id 'w1' stands twice"),
    "no text": (b"\xff\xfe\xfd", "not valid YAML"),
    "an item that is none": ("- 7", ":1: worker: "),
}


@pytest.mark.parametrize(("text", "reason"), BROKEN.values(), ids=BROKEN)
async def test_a_broken_file_keeps_the_workers_and_is_told(
    tmp_path: Path, text: str | bytes, reason: str
) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(TWO)
    async with following(path) as told:
        await poll_until(lambda: told.ids == ["w1", "w2"])
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        # Seen while it is written, it may have been broken in another way before.
        await poll_until(lambda: told.listing.num_failures >= 1)
        assert told.ids == ["w1", "w2"]
        with pytest.raises(FileError) as error:
            read_workers(str(path))
        assert reason in str(error.value)
        assert str(path) in str(error.value)
        path.write_text(ONE)
        await poll_until(lambda: told.ids == ["w1"])


async def test_a_file_that_vanishes_keeps_the_workers(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(ONE)
    async with following(path) as told:
        await poll_until(lambda: told.ids == ["w1"])
        path.unlink()
        await poll_until(lambda: told.listing.num_failures == 1)
        assert told.ids == ["w1"]


async def test_an_empty_list_is_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(ONE)
    async with following(path) as told:
        await poll_until(lambda: told.ids == ["w1"])
        path.write_text("workers: []\n")
        await poll_until(lambda: told.listing.found == ())


def test_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_text('{"workers": [{"id": "w1", "url": "http://[::1]:1/"}]}')
    assert [found.worker.url for found in read_workers(str(path))] == ["http://[::1]:1"]


def test_a_huge_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.discovery.from_file.MAX_FILE_BYTES", 100)
    path = tmp_path / "workers.yaml"
    path.write_text(TWO * 10)
    with pytest.raises(FileError, match="expected at most"):
        read_workers(str(path))


def test_that_nobody_is_found_is_said_once_until_somebody_was() -> None:
    told, one = Told().listing, [Found(WorkerConfig(id="w1", url="http://127.0.0.1:1"))]
    with capture_logs() as lines:
        for answer in ([], [], one, one, [], []):
            told.told(answer)
        told.told([], {"w1": "no port"})

    assert [line["event"] for line in lines] == ["discovery_found_nobody"] * 2
