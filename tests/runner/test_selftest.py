"""The disk tier's self-test: on a good disk, on bad ones, within its bounds, over HTTP."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from runner.config import PoolSize, RunnerConfig
from runner.errors import ApiError
from runner.selftest import MAX_BYTES, PAUSE_S, SelfTest
from runner.tiers.segments.direct_io import Os
from runner.tiers.segments.errors import SegmentsError, SegmentsInUseError
from runner.tiers.segments.store import SegmentStore
from runner.tiers.segments.stress import SCRATCH_NAME, StressResult, stress
from runner.tiers.segments.usage import namespaces
from tests.live_runner import LiveRunner
from tests.runner.segment_parts import ManualClock

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BLOCK_BYTES, BLOCK_SIZE = 36_864, 16
CAPACITY = 4 * 2**20


def stressed(root: Path, *, files: Os | None = None, max_s: float = 20.0) -> StressResult:
    return stress(
        root,
        block_bytes=BLOCK_BYTES,
        block_size=BLOCK_SIZE,
        max_bytes=CAPACITY,
        max_s=max_s,
        num_readers=3,
        files=files,
    )


def test_a_good_disk_gives_back_every_block_and_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "0123456789abcdef").mkdir()
    (tmp_path / "0123456789abcdef" / "seg-000001.kv").write_bytes(b"somebody's")
    result = stressed(tmp_path)

    assert result.is_ok
    assert result.blocks_written * BLOCK_BYTES > CAPACITY // 2
    assert result.blocks_read >= result.blocks_written, "each at least once, in the end"
    assert result.num_readers == 3
    assert result.write_bytes_per_s > 0 < result.read_bytes_per_s
    assert [path.name for path in tmp_path.iterdir()] == ["0123456789abcdef"]
    assert (tmp_path / "0123456789abcdef" / "seg-000001.kv").read_bytes() == b"somebody's"


class Flipping(Os):
    """A disk that gives back one bit wrong in payloads."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = super().preadv(fd, buffers, offset)
        if buffers[0].nbytes >= BLOCK_BYTES:
            buffers[0][100] ^= 1
        return count


class Refusing(Os):
    """A disk that fails with an error on some kind of call, once it has begun."""

    def __init__(self, call: str, code: int) -> None:
        self._call, self._code, self._num_left = call, code, 3

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._may("preadv", buffers[0].nbytes)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        self._may("pwritev", sum(memoryview(buffer).nbytes for buffer in buffers))
        return super().pwritev(fd, buffers, offset)

    def _may(self, call: str, num_bytes: int) -> None:
        # Not the tables and the zeroing of new segments: payloads.
        if call == self._call and num_bytes >= BLOCK_BYTES and num_bytes % BLOCK_BYTES == 0:
            self._num_left -= 1
            if self._num_left < 0:
                raise OSError(self._code, os.strerror(self._code))


def test_damaged_blocks_are_found(tmp_path: Path) -> None:
    result = stressed(tmp_path, files=Flipping(), max_s=1.0)

    assert not result.is_ok
    assert result.damaged > 0
    assert not (tmp_path / SCRATCH_NAME).exists()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_refuses_is_no_good_disk(tmp_path: Path, call: str, code: int) -> None:
    result = stressed(tmp_path, files=Refusing(call, code), max_s=1.0)

    assert not result.is_ok
    assert (result.failed_reads if call == "preadv" else result.failed_writes) > 0
    assert not (tmp_path / SCRATCH_NAME).exists()


def test_it_ends_at_its_time(tmp_path: Path) -> None:
    result = stressed(tmp_path, max_s=0.0)

    assert not result.is_ok, "nothing was tested"
    assert (result.blocks_written, result.blocks_read) == (0, 0)


def test_what_a_killed_test_left_is_neither_counted_nor_in_the_way(tmp_path: Path) -> None:
    left = tmp_path / SCRATCH_NAME / "0123456789abcdef"
    left.mkdir(parents=True)
    (left / "seg-000001.kv").write_bytes(b"half a segment")

    assert namespaces(tmp_path) == []
    assert stressed(tmp_path).is_ok
    assert not (tmp_path / SCRATCH_NAME).exists()


def test_one_test_at_a_time_per_folder(tmp_path: Path) -> None:
    from runner.kvkeys import namespace_key

    store, _ = SegmentStore.open(
        tmp_path / SCRATCH_NAME,
        namespace=namespace_key({"selftest": BLOCK_BYTES}),
        facts={},
        block_bytes=BLOCK_BYTES,
        block_size=BLOCK_SIZE,
        capacity_bytes=CAPACITY,
        clock=ManualClock(),
    )
    try:
        with pytest.raises(SegmentsInUseError):
            stressed(tmp_path)
        assert (tmp_path / SCRATCH_NAME).exists(), "the other one's"
    finally:
        store.close()


def test_without_room_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs(tmp_path)
    few = os.statvfs_result((*found[:4], 1, *found[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _path: few)
    with pytest.raises(SegmentsError, match="No space left"):
        stressed(tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_it_is_not_run_twice_in_a_row(tmp_path: Path) -> None:
    clock = ManualClock()
    test = SelfTest(tmp_path, CAPACITY, block_bytes=BLOCK_BYTES, block_size=BLOCK_SIZE, clock=clock)
    first = asyncio.create_task(test.run())
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as during:
        await test.run()
    assert (await first)["ok"]
    with pytest.raises(ApiError) as after:
        await test.run()
    clock.now_s += PAUSE_S
    assert (await test.run())["ok"]
    assert {during.value.status, after.value.status} == {429}
    assert after.value.retry_after_s == int(PAUSE_S)


async def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    test = SelfTest(tmp_path / "gone", CAPACITY, block_bytes=BLOCK_BYTES, block_size=BLOCK_SIZE)
    with pytest.raises(ApiError) as refused:
        await test.run()
    assert (refused.value.status, refused.value.code) == (507, "selftest_impossible")


def selftest(url: str) -> tuple[int, Any]:
    answer = httpx.post(f"{url}/cache/selftest", timeout=30)
    return answer.status_code, answer.json()


def test_a_runner_tests_its_own_disk(smollm2_dir: Path, tmp_path: Path) -> None:
    config = RunnerConfig(
        model=str(smollm2_dir),
        port=0,
        pool=PoolSize(tokens=1024),
        ssd_dir=tmp_path,
        ssd_bytes=256 * 2**20,
    )
    with LiveRunner.start(config) as live:
        before = httpx.get(f"{live.url}/cache").json()
        status, found = selftest(live.url)
        again, refusal = selftest(live.url)
        after = httpx.get(f"{live.url}/cache").json()

    assert status == 200
    assert found["disk"]["ok"], found
    assert found["disk"]["block_bytes"] == before["block_bytes"]
    assert 0 < found["disk"]["blocks_written"] * before["block_bytes"] <= MAX_BYTES
    assert again == 429
    assert refusal["error"]["code"] == "selftest_too_soon"
    assert after["tiers"]["disk"]["num_blocks"] == before["tiers"]["disk"]["num_blocks"]
    assert not (tmp_path / SCRATCH_NAME).exists()


def test_a_runner_without_a_disk_says_so(smollm2_dir: Path) -> None:
    config = RunnerConfig(model=str(smollm2_dir), port=0, pool=PoolSize(tokens=1024))
    with LiveRunner.start(config) as live:
        assert selftest(live.url) == (200, {"disk": None})
