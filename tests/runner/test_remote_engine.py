"""Two engines share a server: what one computed the other restores, whatever the server does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

import pytest
import redis
import torch

from prefix_index.events import BlockStored
from runner.kvkeys import BlockChain, root_key
from runner.metrics import TransferMeter
from runner.model import Model
from runner.tiers.assemble import build_tiers
from runner.tiers.options import TierOptions
from runner.tiers.types import TierStats
from tests.runner.driver import Driver
from tests.valkey import Valkey

NUM_TOKENS = 520
FULL_BLOCKS = NUM_TOKENS // 16
MAX_TOUCHES = 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    started = Valkey(tmp_path_factory.mktemp("v"))
    started.start()
    yield started
    started.stop()


def prompt_of(seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(100, 20_000) for _ in range(NUM_TOKENS)]


def engine(model: Model, url: str) -> Driver:
    options = TierOptions(remote_url=url)
    driver = Driver(model, build_tiers=partial(build_tiers, options, observer=TransferMeter("m")))
    # As the engine's thread does: what recomputing costs here is what loads are weighed against.
    driver.core.calibrate()
    return driver


def remote(driver: Driver) -> TierStats:
    [stats] = [tier for tier in driver.core.stats().tiers if tier.tier == "remote"]
    return stats


def chain_of(driver: Driver, prompt: list[int]) -> BlockChain:
    chain = BlockChain(root_key(driver.core.namespace), 16)
    chain.extend(prompt)
    return chain


def kv_of(driver: Driver, prompt: list[int]) -> list[torch.Tensor]:
    """Return the KV of a prompt's full blocks, as it lies in the pool."""
    found = driver.core._pool.find(chain_of(driver, prompt), FULL_BLOCKS)
    return [driver.core._kv.data[block].clone() for block in found]


def computed(model: Model, url: str, prompt: list[int]) -> tuple[Driver, list[int]]:
    """Return an engine that has computed a prompt and stored it, and the tokens it made."""
    driver = engine(model, url)
    tokens = driver.complete(prompt)
    # What is not believed to be worth its write at first is, when it is asked for again.
    for _ in range(MAX_TOUCHES):
        driver.settle(lambda: not remote(driver).queue_bytes["write"])
        if remote(driver).moved_blocks_total["write"] >= FULL_BLOCKS:
            return driver, tokens
        driver.complete(prompt)
    raise AssertionError(f"not stored: {remote(driver)}")


@dataclass
class Original:
    """An engine that computed a prompt, and what the server held then."""

    prompt: list[int]
    driver: Driver
    tokens: list[int]
    stored: dict[bytes, bytes]


@pytest.fixture(scope="module")
def original(smollm2: Model, server: Valkey) -> Iterator[Original]:
    prompt = prompt_of(1)
    driver, tokens = computed(smollm2, server.url, prompt)
    with server.client() as client:
        stored = {key: client.get(key) or b"" for key in client.scan_iter()}
    yield Original(prompt, driver, tokens, stored)
    driver.core.close()


def is_empty(driver: Driver) -> bool:
    stats = driver.core.stats()
    return not (stats.active_blocks or stats.loading_blocks or stats.pinned_blocks)


def test_a_prefix_computed_by_one_is_restored_by_the_other_bit_by_bit(
    smollm2: Model, server: Valkey, original: Original
) -> None:
    prompt, one, expected = original.prompt, original.driver, original.tokens
    other = engine(smollm2, server.url)
    request = other.submit(prompt)
    other.run()

    assert other.tokens(request) == expected
    assert (other.cached_tokens(request), other.last(request).hit_source) == (512, "remote")
    assert remote(other).hit_tokens_total == 512
    for restored, original in zip(kv_of(other, prompt), kv_of(one, prompt), strict=True):
        assert torch.equal(restored, original)
    # The gateway hears where it is: in the pool of both, and where everybody can fetch it.
    announced = {event.medium for event in other.events if isinstance(event, BlockStored)}
    assert "SHARED_STORAGE" in {e.medium for e in one.events if isinstance(e, BlockStored)}
    assert "GPU" in announced
    other.settle(lambda: is_empty(other) and is_empty(one))
    other.core.close()


def lose(client: redis.Redis, name: bytes) -> None:
    client.delete(name)


def flip(client: redis.Redis, name: bytes) -> None:
    value = bytearray(client.get(name) or b"")
    value[len(value) // 2] ^= 4
    client.set(name, bytes(value))


def cut(client: redis.Redis, name: bytes) -> None:
    client.set(name, (client.get(name) or b"")[:1000])


def swap(client: redis.Redis, name: bytes) -> None:
    other = next(key for key in client.scan_iter("warmlane:kv:*") if key != name)
    client.set(name, client.get(other) or b"")


def retype(client: redis.Redis, name: bytes) -> None:
    client.delete(name)
    client.hset(name.decode(), "a", "b")


@pytest.mark.parametrize("fault", [lose, flip, cut, swap, retype])
def test_a_block_that_is_not_what_was_stored_ends_the_load_and_the_text_is_right(
    smollm2: Model,
    server: Valkey,
    original: Original,
    fault: Callable[[redis.Redis, bytes], None],
) -> None:
    one = original.driver
    key = chain_of(one, original.prompt).keys[20]
    name = f"warmlane:kv:v1:{one.core.namespace.hex()[:16]}:{key.hex()}".encode()
    with server.client() as client:
        client.flushall()
        client.mset(original.stored)
        fault(client, name)
    other = engine(smollm2, server.url)
    request = other.submit(original.prompt)
    other.run()

    assert other.tokens(request) == original.tokens
    assert other.cached_tokens(request) == 20 * 16
    other.settle(lambda: is_empty(other))
    other.core.close()


def test_a_server_that_stands_still_or_dies_costs_a_while_and_no_text(
    smollm2: Model, server: Valkey, original: Original
) -> None:
    other = engine(smollm2, server.url)
    for fault, repair in ((server.pause, server.resume), (server.stop, server.start)):
        fault()
        try:
            assert other.complete(original.prompt) == original.tokens
        finally:
            repair()
        other.settle(lambda: is_empty(other))
        assert other.core.reset_prefix_cache()
    other.core.close()
