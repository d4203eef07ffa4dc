"""The tiers over real memory, real files and a real server, through restarts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefix_index.events import BlockStored
from runner.kvkeys import event_hash
from runner.leases import LeaseBook
from runner.pool.blocks import BlockPool
from runner.tiers.arena import map_memory
from runner.tiers.assemble import TiersError, build_tiers
from runner.tiers.options import TierOptions
from runner.tiers.remote import RemoteStore
from runner.tiers.segments.store import SegmentStore
from tests.runner.tier_parts import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    NAMESPACE,
    ManualClock,
    Memory,
    Observer,
    Rig,
    payload_of,
)
from tests.valkey import Valkey

PROMPT = list(range(400))
SSD_BYTES = 4 * 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    started = Valkey(tmp_path_factory.mktemp("v"))
    started.start()
    yield started
    started.stop()


def rig_on_disk(folder: Path, clock: ManualClock, **parts: object) -> Rig:
    """Return a rig as a new process would make it."""
    disk, recovered = SegmentStore.open(
        folder,
        namespace=NAMESPACE,
        facts={"model": "rig"},
        block_bytes=BLOCK_BYTES,
        block_size=BLOCK_SIZE,
        capacity_bytes=SSD_BYTES,
        clock=clock,
    )
    rig = Rig(num_blocks=1024, disk=disk, recovered=tuple(recovered), clock=clock, **parts)
    rig.wait(lambda: disk.ready_slots >= 110, "segments")
    return rig


def test_what_one_process_stored_on_disk_the_next_one_restores(tmp_path: Path) -> None:
    clock = ManualClock()
    first = rig_on_disk(tmp_path, clock)
    chain = first.compute(PROMPT)
    first.settle()
    first.wait(lambda: first.tiers._tiers["disk"].store.ready_slots >= 200, "segments")
    salted = first.compute(PROMPT, salt="s")
    first.tiers.close()

    second = rig_on_disk(tmp_path, clock)
    second.poll()
    stored = [event for event in second.events if isinstance(event, BlockStored)]
    assert {block for event in stored for block in event.block_hashes} == {
        event_hash(key) for key in chain.keys
    }
    for held in (chain, salted):
        done = second.restore(held)
        assert done is not None
        assert done.blocks_by_tier == {"disk": 100}
    assert second.stats("disk").num_blocks == 200
    second.check()
    second.tiers.close()


def test_all_three_tiers_give_back_what_they_were_given(tmp_path: Path, server: Valkey) -> None:
    clock = ManualClock()
    remote = RemoteStore(server.url, namespace=NAMESPACE, block_bytes=BLOCK_BYTES, clock=clock)
    rig = rig_on_disk(tmp_path, clock, host_slots=128, remote=remote)
    chain = rig.compute(PROMPT)
    rig.settle()
    rig.forget_pool()
    for name, others in (("cpu", ["disk", "remote"]), ("disk", ["remote"]), ("remote", [])):
        done = rig.restore(chain)
        assert done is not None
        assert done.blocks_by_tier == {name: 100}
        tier = rig.tiers._tiers[name]
        if others:
            for entry in list(tier.books):
                tier.drop(entry)
    rig.check()
    rig.tiers.close()


def test_a_neighbour_finds_what_this_runner_wrote_to_the_shared_store(server: Valkey) -> None:
    clock = ManualClock()

    def rig() -> Rig:
        remote = RemoteStore(server.url, namespace=NAMESPACE, block_bytes=BLOCK_BYTES, clock=clock)
        return Rig(num_blocks=1024, remote=remote, clock=clock)

    one, other = rig(), rig()
    chain = one.compute(range(5000, 5400))
    one.settle()
    done = other.restore(chain)
    assert done is not None
    assert done.blocks_by_tier == {"remote": 100}
    for used in (one, other):
        used.check()
        used.tiers.close()


def test_blocks_of_a_damaged_disk_are_recomputed_and_stored_again(tmp_path: Path) -> None:
    clock = ManualClock()
    rig = rig_on_disk(tmp_path, clock)
    chain = rig.compute(PROMPT)
    rig.settle()
    rig.forget_pool()
    place = rig.tiers._tiers["disk"].books.get(chain.keys[50])
    assert place is not None
    for segment in tmp_path.rglob("seg-*.kv"):
        data = bytearray(segment.read_bytes())
        at = data.find(payload_of(chain.keys[50]))
        if at >= 0:
            data[at + 100] ^= 1
            with segment.open("r+b") as file:
                file.write(data)
    done = rig.restore(chain)
    assert done is not None
    assert (done.num_blocks, done.outcome) == (50, "damaged")
    rig.compute(PROMPT)
    rig.settle()
    rig.forget_pool()
    done = rig.restore(chain)
    assert done is not None
    assert done.num_blocks == 100
    rig.check()
    rig.tiers.close()


class TestBuild:
    def build(self, options: TierOptions, *, is_cuda: bool = False):
        pool = BlockPool(64, BLOCK_SIZE)
        return build_tiers(
            options,
            pool=pool,
            mover=Memory(64),
            leases=LeaseBook(pool.pin, pool.unpin),
            namespace=NAMESPACE,
            facts={"model": "rig"},
            chunk_tokens=64,
            wake=lambda: None,
            observer=Observer(),
            is_cuda=is_cuda,
        )

    def test_without_tiers_there_is_nothing(self) -> None:
        assert self.build(TierOptions()) is None

    def test_all_configured_tiers_are_built_in_the_order_they_are_asked(
        self, tmp_path: Path, server: Valkey
    ) -> None:
        tiers = self.build(
            TierOptions(
                host_bytes=2**20,
                disk_dir=tmp_path,
                disk_bytes=SSD_BYTES,
                remote_url=server.url,
                peers=("http://127.0.0.1:1",),
            )
        )
        assert tiers is not None
        assert [stats.tier for stats in tiers.stats()] == ["cpu", "disk", "remote", "peer"]
        assert tiers.peers is not None
        tiers.close()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"host_bytes": 1000}, "--host-bytes 1000: less than one block"),
            ({"disk_bytes": 100}, "--ssd-dir: 100 bytes hold no block"),
            ({"remote_url": "ftp://x:secret@y"}, "^--remote: expected redis://"),
        ],
        ids=["host", "disk", "remote"],
    )
    def test_what_cannot_be_had_is_named(
        self, tmp_path: Path, options: dict[str, object], words: str
    ) -> None:
        if "disk_bytes" in options:
            options = {"disk_dir": tmp_path, **options}
        with pytest.raises(TiersError, match=words):
            self.build(TierOptions(**options))  # type: ignore[arg-type]

    def test_memory_that_the_device_cannot_pin_is_had_unpinned(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def pin_memory(num_bytes: int) -> memoryview:
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr("runner.tiers.media.PINNED_FIRST", (pin_memory, map_memory))
        tiers = self.build(TierOptions(host_bytes=2**20), is_cuda=True)
        assert tiers is not None
        (line,) = caplog.messages
        assert "--host-bytes 1048576" in line
        assert tiers.stats()[0].capacity_bytes == 128 * BLOCK_BYTES
        tiers.close()

    def test_a_directory_in_use_is_refused_and_free_again_after_closing(
        self, tmp_path: Path
    ) -> None:
        options = TierOptions(disk_dir=tmp_path, disk_bytes=SSD_BYTES)
        first = self.build(options)
        assert first is not None
        with pytest.raises(TiersError, match=str(tmp_path)):
            self.build(options)
        first.close()
        second = self.build(options)
        assert second is not None
        second.close()
