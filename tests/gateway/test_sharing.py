"""Gateways whose fleets share one index through Redis."""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from gateway.fleet.sharing import SharingCollector
from prefix_index import root_hash
from tests.gateway.feed_parts import OURS
from tests.gateway.routing_parts import BLOCK
from tests.gateway.sharing_parts import Side, batch, blocks, gone, publishing, running
from tests.support import free_port, poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]


def hit_blocks(side: Side, worker_id: str = "w") -> int:
    hit = side.index.match(OURS).get(worker_id)
    return 0 if hit is None else hit.total // BLOCK


async def test_one_process_reads_a_workers_events_and_all_route_by_them(valkey: Valkey) -> None:
    async with publishing("w") as publishers:
        one = Side(valkey.url, publishers, name="one")
        two = Side(valkey.url, publishers, name="two")
        async with running(one, two):
            await publishers["w"].publish(batch(blocks(0, 4)))
            await poll_until(lambda: hit_blocks(one) == hit_blocks(two) == 4)
            await poll_until(lambda: {one.role("w"), two.role("w")} == {"hold", "tail"})
            await publishers["w"].publish(batch(gone(3), gone(2)))
            await poll_until(lambda: hit_blocks(one) == hit_blocks(two) == 2)
            assert len(one.following.feeds) + len(two.following.feeds) == 1
            assert one.pool.workers["w"].mode == two.pool.workers["w"].mode == "exact"


async def test_the_next_reader_goes_on_behind_the_last_published_batch(valkey: Valkey) -> None:
    async with publishing("w") as publishers:
        one = Side(valkey.url, publishers, name="one")
        two = Side(valkey.url, publishers, name="two")
        async with running(two):
            await one.start()
            await publishers["w"].publish(batch(blocks(0, 4)))
            await publishers["w"].publish(batch(blocks(4, 6)))
            await poll_until(lambda: hit_blocks(one) == hit_blocks(two) == 6)
            await poll_until(lambda: {one.role("w"), two.role("w")} == {"hold", "tail"})
            reader, other = (one, two) if one.role("w") == "hold" else (two, one)
            await poll_until(lambda: reader.view("w").publication.is_empty)
            # What the buffer no longer has, nobody could learn again.
            del publishers["w"].buffer[:1]
            await reader.stop()
            await poll_until(lambda: other.role("w") == "hold")
            await publishers["w"].publish(batch(gone(5)))
            await poll_until(lambda: hit_blocks(other) == 5)
            assert other.following.feeds["w"].restarts == 0
            if other is one:
                await one.stop()
            await two.start() if reader is two else None


async def test_what_fails_for_an_unforeseen_reason_is_started_again(valkey: Valkey) -> None:
    async with publishing("w") as publishers:
        one = Side(valkey.url, publishers, name="one")
        two = Side(valkey.url, publishers, name="two")
        async with running(one, two):
            await publishers["w"].publish(batch(blocks(0, 2)))
            await poll_until(lambda: hit_blocks(one) == hit_blocks(two) == 2)
            await poll_until(lambda: {one.role("w"), two.role("w")} == {"hold", "tail"})
            for side in (one, two):
                replica = side.sharing.pools["chat"].replica
                tick, side_failed = replica.leases.tick, asyncio.Event()

                async def fail(_: object, failed: asyncio.Event = side_failed) -> object:
                    failed.set()
                    raise ZeroDivisionError

                replica.leases.tick = fail  # type: ignore[method-assign,assignment]
                await side_failed.wait()
                replica.leases.tick = tick  # type: ignore[method-assign]
            await publishers["w"].publish(batch(blocks(2, 4)))
            await poll_until(lambda: hit_blocks(one) == hit_blocks(two) == 4)
            await poll_until(lambda: {one.role("w"), two.role("w")} == {"hold", "tail"})


async def test_the_gateways_serve_without_redis_and_share_again_when_it_is_back(
    valkey: Valkey,
) -> None:
    """R17: down at the start, started, standing still, back: never worse than one process."""
    valkey.stop()
    async with publishing("w") as publishers:
        one = Side(valkey.url, publishers, name="one", timeout_s=0.2)
        two = Side(valkey.url, publishers, name="two", timeout_s=0.2)
        async with running(one, two):
            await publishers["w"].publish(batch(blocks(0, 4)))
            await poll_until(lambda: hit_blocks(one) == hit_blocks(two) == 4)
            valkey.start()
            await poll_until(
                lambda: {one.role("w"), two.role("w")} == {"hold", "tail"}, deadline_s=10
            )
            await publishers["w"].publish(batch(blocks(4, 5)))
            await poll_until(lambda: hit_blocks(one) == hit_blocks(two) == 5)
            valkey.pause()
            await poll_until(lambda: not one.link.is_up and not two.link.is_up)
            # The circuit is open: what is asked of the link answers at once.
            asked = one.link.errors.total()
            for _ in range(100):
                one.sharing.routed(one.pool, one.pool.workers["w"], OURS, root_hash("m"))
            await poll_until(lambda: {one.role("w"), two.role("w")} == {"alone"})
            await publishers["w"].publish(batch(gone(4)))
            await poll_until(lambda: hit_blocks(one) == hit_blocks(two) == 4)
            assert one.link.errors.total() - asked < 50
            valkey.resume()
            await poll_until(
                lambda: {one.role("w"), two.role("w")} == {"hold", "tail"}, deadline_s=10
            )
            await publishers["w"].publish(batch(blocks(4, 8)))
            await poll_until(lambda: hit_blocks(one) == hit_blocks(two) == 8)


async def test_a_call_never_waits_whatever_redis_does(valkey: Valkey) -> None:
    """All that a request calls is synchronous; a server that stands still changes nothing."""
    async with publishing("w") as publishers:
        side = Side(valkey.url, publishers, name="one", timeout_s=0.2, silent=("quiet",))
        async with running(side):
            await poll_until(lambda: side.link.is_up)
            valkey.pause()
            try:
                quiet = side.pool.workers["quiet"]
                for _ in range(2000):
                    side.sharing.routed(side.pool, quiet, OURS, root_hash("m"))
                assert side.sharing.pools["chat"].touches.dropped == 2000 - 1024
            finally:
                valkey.resume()


async def test_routings_to_workers_without_events_are_believed_everywhere(valkey: Valkey) -> None:
    root = root_hash("m")
    one = Side(valkey.url, {}, name="one", silent=("quiet",))
    two = Side(valkey.url, {}, name="two", silent=("quiet",))
    async with running(one, two):
        quiet = one.pool.workers["quiet"]
        one.sharing.routed(one.pool, quiet, OURS[:3], root)
        await poll_until(lambda: hit_blocks(two, "quiet") == 3)
        one.sharing.routed(one.pool, quiet, OURS[:6], root)
        await poll_until(lambda: hit_blocks(two, "quiet") == 6)
        three = Side(valkey.url, {}, name="three", silent=("quiet",))
        async with running(three):
            await poll_until(lambda: hit_blocks(three, "quiet") == 6)
        assert hit_blocks(one, "quiet") == 0, "its own ticket does that"


async def test_a_chain_that_the_view_has_no_room_for_is_looked_up_behind_the_request(
    valkey: Valkey,
) -> None:
    async with publishing("w") as publishers:
        large = Side(valkey.url, publishers, name="large")
        async with running(large):
            await publishers["w"].publish(batch(blocks(0, 8)))
            await poll_until(lambda: large.view("w").publication.is_empty)
            await poll_until(lambda: hit_blocks(large) == 8)
            small = Side(valkey.url, publishers, name="small", max_blocks=100)
            async with running(small):
                await poll_until(lambda: hit_blocks(small) == 8)
                small.index.clear("w")
                shared = small.sharing.pools["chat"]
                shared.lookup.look_up(OURS, root_hash("m"), ["w"])
                await poll_until(lambda: hit_blocks(small) == 8)
                assert shared.lookup.filled == 8
                assert not shared.is_full


async def test_a_worker_that_was_diverged_is_read_from_redis_again(valkey: Valkey) -> None:
    async with publishing("w") as publishers:
        one = Side(valkey.url, publishers, name="one")
        two = Side(valkey.url, publishers, name="two")
        async with running(one, two):
            await publishers["w"].publish(batch(blocks(0, 4)))
            await poll_until(lambda: hit_blocks(one) == hit_blocks(two) == 4)
            await poll_until(lambda: {one.role("w"), two.role("w")} == {"hold", "tail"})
            other = two if one.role("w") == "hold" else one
            other.pool.set_mode(other.pool.workers["w"], "text")
            assert hit_blocks(other) == 0
            # What the parity check does when the tokens are the same again.
            other.pool.set_mode(other.pool.workers["w"], "approximate")
            await poll_until(lambda: hit_blocks(other) == 4)
            assert other.pool.workers["w"].mode == "exact"


async def test_a_removed_worker_leaves_nothing_behind(valkey: Valkey) -> None:
    async with publishing("w") as publishers:
        side = Side(valkey.url, publishers, name="one")
        async with running(side):
            await publishers["w"].publish(batch(blocks(0, 4)))
            await poll_until(lambda: side.view("w").publication.is_empty and hit_blocks(side) == 4)
            side.on_gone(side.pool.workers["w"])
            side.pool.remove("w")
            with valkey.client() as client:
                await poll_until(lambda: not client.keys("*:w"))
            assert not side.following.feeds


async def test_no_salt_and_no_text_reaches_redis(valkey: Valkey) -> None:
    async with publishing("w") as publishers:
        side = Side(valkey.url, publishers, name="one", silent=("quiet",))
        async with running(side):
            salted = blocks(0, 2)
            salted = type(salted)(
                block_hashes=salted.block_hashes,
                parent_block_hash=None,
                token_ids=salted.token_ids,
                block_size=BLOCK,
                extra_keys=[["secret-of-a-tenant"], []],
            )
            await publishers["w"].publish(batch(salted))
            root = root_hash("m", salt="secret-of-a-tenant")
            side.sharing.routed(side.pool, side.pool.workers["quiet"], OURS, root)
            await poll_until(lambda: side.view("w").num_shared == 2)
            with valkey.client() as client:
                await poll_until(lambda: client.exists(side.link.key("chat", "touches")))
                dumps = b"".join(client.dump(key) or b"" for key in client.keys("*"))
            assert b"secret" not in dumps


async def test_operators_see_who_reads_what_and_how_old_the_view_is(valkey: Valkey) -> None:
    async with publishing("w") as publishers:
        side = Side(valkey.url, publishers, name="one")
        async with running(side):
            await publishers["w"].publish(batch(blocks(0, 4)))
            await poll_until(lambda: side.view("w").num_shared == 4)
            state = side.sharing.state()
            worker = state["pools"]["chat"]["workers"]["w"]
            assert (state["is_up"], state["index_age_s"]) == (True, 0.0)
            assert (worker["role"], worker["holder"], worker["blocks"]) == ("hold", "one", 4)
            registry = CollectorRegistry()
            registry.register(SharingCollector(side.sharing))
            text = generate_latest(registry).decode()
            assert "warmlane_redis_up 1.0" in text
            assert 'warmlane_index_shared_blocks{pool="chat"} 4.0' in text
            assert "warmlane_index_age_seconds 0.0" in text


async def test_redis_away_is_told_once_and_so_is_its_return(valkey: Valkey) -> None:
    from structlog.testing import capture_logs

    with capture_logs() as lines:
        valkey.stop()
        side = Side(valkey.url, {}, name="one", timeout_s=0.2)
        async with running(side):
            await poll_until(lambda: any(line["event"] == "redis_down" for line in lines))
            await poll_until(lambda: side.link.errors.total() > 5)
            valkey.start()
            await poll_until(lambda: side.link.is_up)
            valkey.stop()
            await poll_until(lambda: not side.link.is_up)
            await asyncio.sleep(0)
        events = [line["event"] for line in lines]
        assert events == ["redis_down", "redis_up", "redis_down"]


async def test_a_url_where_nobody_listens_costs_the_start_nothing() -> None:
    began_s = time.monotonic()
    side = Side(f"redis://127.0.0.1:{free_port()}", {}, name="one")
    async with running(side):
        assert not side.link.is_up
    assert time.monotonic() - began_s < 5


async def test_a_slow_redis_is_one_that_is_away_and_comes_back_within_seconds(
    valkey: Valkey,
) -> None:
    """R17: behind a proxy that delays each answer by 300 ms, with a timeout of 20 ms."""
    proxy = SlowProxy(valkey.port)
    async with publishing("w") as publishers, proxy.running() as url:
        one = Side(url, publishers, name="one", timeout_s=0.02)
        async with running(one):
            await publishers["w"].publish(batch(blocks(0, 4)))
            await poll_until(lambda: hit_blocks(one) == 4)
            proxy.delay_s = 0.3
            await poll_until(lambda: not one.link.is_up)
            tried = one.link.errors.total()
            for _ in range(1000):
                one.sharing.routed(one.pool, one.pool.workers["w"], OURS, root_hash("m"))
            assert one.link.errors.total() == tried, "no request tries the server"
            await publishers["w"].publish(batch(blocks(4, 6)))
            await poll_until(lambda: hit_blocks(one) == 6)
            proxy.delay_s = 0.0
            await poll_until(lambda: one.link.is_up and one.role("w") == "hold", deadline_s=10)


class SlowProxy:
    """Passes bytes on, the server's after a while."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self._port = port

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        finally:
            server.close()

    async def _connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                await asyncio.gather(
                    self._pass(reader, server_writer, delays=False),
                    self._pass(server_reader, writer, delays=True),
                )
            finally:
                server_writer.close()
        except OSError:
            pass
        finally:
            writer.close()

    async def _pass(self, reader: StreamReader, writer: StreamWriter, *, delays: bool) -> None:
        while data := await reader.read(65536):
            if delays and self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
        writer.close()
