"""Reported faults of KV offloading, each as its whole class, through a real runner over HTTP.

What the cases ask of a tensor-parallel size (T04) and of images (T12) has no counterpart here: the
runner computes on one device and reads no images. The same holds for it of whatever else makes KV
usable or makes keys differ, and that is tested. T15, a block that left the GPU, is the gateway's.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefix_index.events import BlockRemoved, BlockStored
from runner import weights
from runner.config import ConfigError, PoolSize, RunnerConfig
from runner.model import Model
from runner.serve import StartError
from runner.tiers import media
from runner.tiers.arena import map_memory
from runner.tiers.segments import clean
from runner.tiers.segments.store import SegmentStore
from tests.live_runner import LiveRunner
from tests.runner.segment_parts import FailAt, FaultyOs, nothing
from tests.support import poll_until

HANDBOOK = "Handbook rule 7: refunds are accepted within thirty days of delivery. " * 9
# A whole machine may be busy beside: some of these start two runners.
pytestmark = pytest.mark.timeout(300)
MIB = 2**20
ROOM = 64 * MIB
DEADLINE_S = 120.0


def ask(url: str, text: str = HANDBOOK, **fields: Any) -> tuple[str, int]:
    """Return what a runner says, and how many tokens of the prompt it had."""
    body = {
        "model": "smollm2",
        "messages": [
            {"role": "system", "content": text},
            {"role": "user", "content": "List rule 7."},
        ],
        "temperature": 0,
        "seed": 1,
        "max_tokens": 6,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body | fields, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return told["choices"][0]["message"]["content"], int(cached)


class Lab:
    """A runner whose pool can be emptied while the tiers below keep what they hold.

    Attributes:
        events: All KV events it has told.
    """

    def __init__(self, live: LiveRunner) -> None:
        self.url = live.url
        self.live = live
        self.is_stopped = False
        self.events: list[Any] = []
        self.core = live.runner.engine._core
        self.core._on_events = self.events.extend

    def stop(self) -> None:
        if not self.is_stopped:
            self.is_stopped = True
            self.live.stop()

    def ask(self, text: str = HANDBOOK, **fields: Any) -> tuple[str, int]:
        return ask(self.url, text, **fields)

    def evict(self) -> bool:
        """Empty the pool; False while something of it is in use."""
        return bool(self.live.runner.engine._ask(self.core._pool.clear).result(DEADLINE_S))

    def tier(self, name: str) -> dict[str, Any]:
        figures: dict[str, Any] = httpx.get(f"{self.url}/cache", timeout=30).json()["tiers"][name]
        return figures

    def is_at_rest(self) -> bool:
        tiers = httpx.get(f"{self.url}/cache", timeout=30).json()["tiers"]
        blocks = tiers.pop("gpu")["blocks"]
        queued = [sum(tier["queue_bytes"].values()) for tier in tiers.values()]
        return blocks["free"] + blocks["cached"] == blocks["total"] and not any(queued)

    async def rest(self) -> None:
        await poll_until(self.is_at_rest, deadline_s=DEADLINE_S, what="everything is at rest")

    async def evict_at_rest(self) -> None:
        await self.rest()
        await poll_until(self.evict, deadline_s=DEADLINE_S, what="the pool is empty")

    def decisions(self) -> list[dict[str, Any]]:
        listed = httpx.get(f"{self.url}/cache/decisions", timeout=30).json()["decisions"]
        return list(listed)

    def announced(self, medium: str) -> int:
        """Return how many blocks others believe to be on a tier."""
        held: set[object] = set()
        for event in list(self.events):
            if isinstance(event, BlockStored) and event.medium == medium:
                held.update(event.block_hashes)
            elif isinstance(event, BlockRemoved) and event.medium == medium:
                held.difference_update(event.block_hashes)
        return len(held)


StartLab = Callable[..., Lab]


@pytest.fixture
def start_lab(
    smollm2_dir: Path, smollm2: Model, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StartLab]:
    """Start runners in float32; all weights are read once."""
    running: list[Lab] = []
    read = weights.load_model
    known = {(smollm2_dir, "float32"): smollm2}

    def load_model(path: Path, dtype: str, *args: Any, **more: Any) -> Model:
        if (path, dtype) not in known:
            known[path, dtype] = read(path, dtype, *args, **more)
        return known[path, dtype]

    monkeypatch.setattr(weights, "load_model", load_model)

    def start(**settings: Any) -> Lab:
        usual: dict[str, Any] = {"served_model_name": "smollm2", "pool": PoolSize(tokens=1024)}
        model = str(settings.pop("model", smollm2_dir))
        config = RunnerConfig(model=model, port=0, **usual, **settings)
        running.append(Lab(LiveRunner.start(config)))
        return running[-1]

    yield start
    for lab in running:
        lab.stop()


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> FaultyOs:
    """The system calls of every disk tier that is opened in this test."""
    faulty = FaultyOs()
    monkeypatch.setattr(media.SegmentStore, "open", partial(SegmentStore.open, files=faulty))
    return faulty


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("nth", [1, 2], ids=["payload", "entries"])
async def test_t01_a_store_that_failed_is_offered_to_nobody(
    start_lab: StartLab, files: FaultyOs, tmp_path: Path, nth: int, code: int
) -> None:
    lab = start_lab(ssd_dir=tmp_path, ssd_bytes=ROOM)
    files.before = FailAt("pwritev", nth, code)
    first, _ = lab.ask()
    await lab.evict_at_rest()
    files.before = nothing
    disk = lab.tier("disk")
    assert disk["store_failed_total"] >= 1
    assert lab.announced("STORAGE") == disk["num_blocks"]
    assert lab.ask()[0] == first
    assert lab.ask(cache_salt="computed") == (first, 0)
    assert (lab.tier("disk")["damaged_total"], lab.tier("disk")["load_failed_total"]) == (0, 0)
    await lab.rest()


@pytest.mark.parametrize("nth", [1, 2], ids=["payload", "entries"])
async def test_t03_a_block_is_not_read_while_it_is_written(
    start_lab: StartLab, files: FaultyOs, tmp_path: Path, nth: int
) -> None:
    lab = start_lab(ssd_dir=tmp_path, ssd_bytes=ROOM)
    gate, seen = threading.Event(), threading.Semaphore(0)
    count = iter(range(1, 10_000))

    def wait(name: str, target: Any, offset: int) -> None:
        if name == "pwritev" and next(count) == nth:
            seen.release()
            gate.wait(DEADLINE_S)

    files.before = wait
    try:
        first, _ = lab.ask()
        await poll_until(lambda: seen.acquire(blocking=False), deadline_s=DEADLINE_S)
        with ThreadPoolExecutor(2) as threads:
            during = [text for text, _ in threads.map(lambda _: lab.ask(), range(2))]
        lab.evict()
        during.append(lab.ask()[0])
        assert lab.tier("disk")["hit_tokens_total"] == 0
    finally:
        gate.set()
    await lab.evict_at_rest()
    after, cached = lab.ask()
    assert {first, *during, after} == {first}
    assert cached > 0
    assert lab.tier("disk")["damaged_total"] == 0


@pytest.fixture
def other_revision(smollm2_dir: Path, tmp_path: Path) -> Path:
    """The same model with one bit of one weight changed."""
    folder = tmp_path / "revision"
    shutil.copytree(smollm2_dir, folder)
    with (folder / "model.gguf").open("r+b") as file:
        file.seek(-4096, 2)
        byte = file.read(1)[0]
        file.seek(-4096, 2)
        file.write(bytes([byte ^ 1]))
    return folder


@pytest.mark.parametrize("change", ["dtype", "weights", "block size", "revision"])
async def test_t04_a_folder_of_another_setting_gives_nothing_and_counts(
    start_lab: StartLab,
    tmp_path: Path,
    other_revision: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
) -> None:
    settings: dict[str, dict[str, Any]] = {
        "dtype": {"dtype": "bfloat16"},
        "weights": {"dtype": "int8"},
        "block size": {"block_size": 32},
        "revision": {"model": other_revision},
    }
    room = {"ssd_dir": tmp_path / "kv", "ssd_bytes": ROOM}
    before = start_lab(**room)
    before.ask()
    await before.rest()
    before.stop()

    without = start_lab(**settings[change])
    clean_start, _ = without.ask()
    without.stop()
    lab = start_lab(**settings[change], **room)
    text, cached = lab.ask()
    assert (text, cached) == (clean_start, 0)
    assert lab.tier("disk")["hit_tokens_total"] == 0
    assert clean.main([str(tmp_path / "kv"), "--json"]) == 0
    # The cleanup command lists the other one, and the bound holds over both.
    listed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len({namespace["namespace"] for namespace in listed}) == 2
    assert sum(namespace["bytes"] for namespace in listed) <= ROOM


async def test_t06_a_full_disk_costs_no_request_and_is_tried_again(
    start_lab: StartLab, files: FaultyOs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lab = start_lab(ssd_dir=tmp_path, ssd_bytes=ROOM)
    files.before = FailAt("pwritev", 10, errno.ENOSPC, forever=True)
    caplog.set_level(logging.INFO)
    num_logged = len(caplog.records)
    for number in range(12):
        lab.ask(f"Prompt {number} of many: " + f"gate {number} opens at noon. " * 12)
    disk = lab.tier("disk")
    assert disk["store_failed_total"] > 0
    told = [r for r in caplog.records[num_logged:] if r.name.startswith("runner.tiers")]
    assert len(told) <= 6
    await lab.rest()

    files.before = nothing
    stored = lab.tier("disk")["moved_blocks_total"]["write"]

    def is_stored_again() -> bool:
        lab.ask(f"Prompt {next(count)} of many: " + "the disk has room again. " * 12, max_tokens=1)
        return bool(lab.tier("disk")["moved_blocks_total"]["write"] > stored)

    count = iter(range(100, 10_000))
    await poll_until(is_stored_again, deadline_s=DEADLINE_S, what="the disk is written to again")
    assert not lab.tier("disk")["is_paused"]


class SlowOs(FaultyOs):
    """A disk of so many bytes a second, one reader at a time."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s
        self.stopped = threading.Event()
        self._lock = threading.Lock()

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        num_bytes = super().preadv(fd, buffers, offset)
        with self._lock:
            self.stopped.wait(num_bytes / self.bytes_per_s)
        return num_bytes


async def test_t08_a_disk_that_is_slower_than_computing_is_not_waited_for(
    start_lab: StartLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowOs(500_000.0)
    monkeypatch.setattr(media.SegmentStore, "open", partial(SegmentStore.open, files=slow))
    lab = start_lab(ssd_dir=tmp_path, ssd_bytes=ROOM)
    expected, _ = lab.ask()
    try:
        for _ in range(5):
            await lab.evict_at_rest()
            assert lab.ask(max_tokens=6)[0] == expected
        decisions = lab.decisions()
    finally:
        slow.stopped.set()
    tried = [d for d in decisions if d["decision"] == "restore"]
    refused = [d for d in decisions if d["decision"] == "recompute" and d["hit_blocks"] > 4]
    assert len(tried) <= 3
    assert refused
    for decision in refused:
        assert decision["source"] == "own"
        assert decision["predicted"]["restore_s"] > decision["predicted"]["recompute_s"] > 0


def limited(num_bytes: int) -> Callable[[int], memoryview]:
    """Return an allocator that has so many bytes in all."""
    left = [num_bytes]

    def allocate(size: int) -> memoryview:
        if size > left[0]:
            raise OSError(errno.ENOMEM, "cannot allocate memory")
        left[0] -= size
        return map_memory(size)

    return allocate


async def test_t10_less_memory_than_was_asked_for_is_used_or_named(
    start_lab: StartLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = {"ssd_dir": tmp_path, "ssd_bytes": ROOM}
    with pytest.raises(ConfigError, match=f"--host-bytes {2**60}") as refused:
        start_lab(host_bytes=2**60)
    assert "\n" not in str(refused.value)

    # Nothing at all: it stops with the reason, and holds nothing on to it.
    monkeypatch.setattr(media, "PLAIN", (limited(0),))
    with pytest.raises(StartError, match="--host-bytes") as stopped:
        start_lab(host_bytes=32 * MIB, **room)
    assert "\n" not in str(stopped.value)
    monkeypatch.setattr(media, "PLAIN", (map_memory,))
    lab = start_lab(host_bytes=32 * MIB, **room)
    expected, _ = lab.ask()
    await lab.evict_at_rest()
    assert lab.ask()[0] == expected
    assert lab.tier("cpu")["num_blocks"] > 0


@pytest.mark.parametrize("tier", ["cpu", "disk"])
async def test_t12_the_same_text_under_another_key_restores_nothing(
    start_lab: StartLab, tmp_path: Path, tier: str
) -> None:
    room = {"cpu": {"host_bytes": ROOM}, "disk": {"ssd_dir": tmp_path, "ssd_bytes": ROOM}}
    lab = start_lab(**room[tier])
    expected, _ = lab.ask(cache_salt="A")
    await lab.evict_at_rest()
    for other in ({"cache_salt": "B"}, {}, {"cache_salt": "a"}):
        assert lab.ask(**other) == (expected, 0)
        await lab.evict_at_rest()
    text, cached = lab.ask(cache_salt="A")
    assert text == expected
    assert cached > 0
    assert all(len(key) * 8 >= 64 for key in lab.core._tiers._tiers[tier].books._entries)


async def test_a_block_damaged_in_host_memory_is_not_lent_and_the_text_is_right(
    start_lab: StartLab,
) -> None:
    lender = start_lab(host_bytes=ROOM, serve_peers=True)
    expected, _ = lender.ask()
    await lender.evict_at_rest()
    host = lender.core._tiers._parts.host
    damaged = lender.core._tiers._tiers["cpu"].books
    entry = sorted(damaged, key=lambda entry: entry.record.depth)[5]
    host._arena.view(entry.slot)[100] ^= 1

    asking = start_lab(peers=(lender.url,))
    source = {"url": lender.url, "tokens": 1024}
    text, cached = asking.ask(kv_transfer_params={"source": source})
    assert (text, cached) == (expected, 5 * 16)
    assert asking.live.runner.engine.puller.figures()[lender.url].failed == 1
    await poll_until(lambda: lender.tier("cpu")["damaged_total"] == 1)
    await lender.rest()
    await asking.rest()
