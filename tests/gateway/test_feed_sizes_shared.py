"""Workers with larger blocks than the index, read by one gateway and known to all."""

from __future__ import annotations

from typing import Any

import redis

from prefix_index import hash_blocks, root_hash
from tests.gateway.routing_parts import BLOCK
from tests.gateway.sharing_parts import Side, batch, publishing, running
from tests.prefix_index.publisher import Publisher
from tests.prefix_index.sized_engine import SizedEngine
from tests.support import poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]

SIZE = 4 * BLOCK
ROOT = root_hash("m")
TOKENS = list(range(6 * SIZE))
# Parts from the first prompt inside its third block.
OTHER = [*TOKENS[: 2 * SIZE + BLOCK], *range(9000, 9000 + 2 * SIZE)]


class Engine(SizedEngine):
    """An engine with a publisher, which is given what happened by ``flush``."""

    def __init__(self, publisher: Publisher) -> None:
        self._events: list[Any] = []
        self._publisher = publisher
        super().__init__(SIZE, lambda *events: self._events.extend(events))

    async def flush(self) -> None:
        await self._publisher.publish(batch(*self._events))
        self._events.clear()


def is_equal(side: Side, engine: Engine) -> bool:
    """Whether a gateway's view is what the engine holds, block by block and copy by copy."""
    copies = {
        block: sum(number << {"gpu": 0, "cpu": 16}[tier] for tier, number in held.items())
        for block, held in engine.copies(BLOCK, ROOT).items()
    }
    return {block: held for block, (_, held) in side.content("w").items()} == copies


def hit_tokens(side: Side, tokens: list[int]) -> int:
    hit = side.index.match(hash_blocks(tokens, BLOCK, ROOT)).get("w")
    return 0 if hit is None else hit.total // SIZE * SIZE


async def test_whole_blocks_survive_a_hand_over(valkey: Valkey) -> None:
    async with publishing("w") as publishers:
        engine = Engine(publishers["w"])
        one = Side(valkey.url, publishers, name="one")
        two = Side(valkey.url, publishers, name="two")
        async with running(two):
            await one.start()
            engine.store(TOKENS)
            await engine.flush()
            engine.store(OTHER)
            engine.offload(TOKENS[: 4 * SIZE])
            await engine.flush()
            await poll_until(lambda: is_equal(one, engine) and is_equal(two, engine))
            await poll_until(lambda: {one.role("w"), two.role("w")} == {"hold", "tail"})
            reader, other = (one, two) if one.role("w") == "hold" else (two, one)
            await poll_until(lambda: reader.view("w").publication.is_empty)
            # What the buffer no longer has, nobody could learn again.
            del publishers["w"].buffer[:1]
            await reader.stop()
            await poll_until(lambda: other.role("w") == "hold")
            for number in (0, 7, 3):
                engine.remove(number, "gpu")
            engine.remove(1, "cpu")
            await engine.flush()
            await poll_until(lambda: is_equal(other, engine))
            for tokens in (TOKENS, OTHER):
                assert hit_tokens(other, tokens) == engine.hit_tokens(tokens)
            assert other.following.feeds["w"].restarts == 0
            if other is one:
                await one.stop()
            await two.start() if reader is two else None


async def test_whole_blocks_are_published_again_when_redis_lost_them(valkey: Valkey) -> None:
    async with publishing("w") as publishers:
        engine = Engine(publishers["w"])
        one = Side(valkey.url, publishers, name="one")
        async with running(one):
            engine.store(TOKENS)
            engine.store(OTHER)
            await engine.flush()
            await poll_until(lambda: is_equal(one, engine) and one.role("w") == "hold")
            await poll_until(lambda: one.view("w").publication.is_empty)
            redis.Redis.from_url(valkey.url).flushall()
            two = Side(valkey.url, publishers, name="two")
            async with running(two):
                await poll_until(lambda: is_equal(two, engine), deadline_s=20)
                await poll_until(lambda: {one.role("w"), two.role("w")} == {"hold", "tail"})
                for number in (0, 5, 2):
                    engine.remove(number, "gpu")
                await engine.flush()
                await poll_until(lambda: is_equal(one, engine) and is_equal(two, engine))
