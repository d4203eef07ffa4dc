"""Greedy float32 tokens and the bytes of KV are the same whatever tier a prefix comes back from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from prefix_index.events import BlockStored
from runner.kvkeys import BlockChain, event_hash, root_key
from runner.metrics import TransferMeter
from runner.model import Model
from runner.tiers.assemble import build_tiers
from runner.tiers.options import TierOptions
from runner.types import HitSource
from runner.weights import load_model
from tests.runner.driver import Driver
from tests.runner.fake_tiers import FakeTiers
from tests.runner.lora_parts import make_adapter
from tests.runner.test_greedy_equality import text_like
from tests.valkey import Valkey

# At and around the block of 16 tokens, two whole blocks, and longer ones.
LENGTHS = (15, 16, 17, 32, 33, 100)
PROMPTS = [text_like(seed, length) for seed, length in enumerate(LENGTHS)]
NUM_TOKENS = 8

# Of a hundredth of a second each: stores have had their time.
TURNS_UNTIL_ASKED_AGAIN = 50

# Six prompts computed, stored thrice and restored, on a machine that others use too.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("patient_lookups")]

MEDIUMS: dict[HitSource, str] = {"cpu": "CPU", "disk": "STORAGE", "remote": "SHARED_STORAGE"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    started = Valkey(tmp_path_factory.mktemp("v"))
    started.start()
    yield started
    started.stop()


def over(model: Model, options: TierOptions, **sizes: Any) -> Driver:
    """Return a driver over real tiers, as a fresh process would be; it restores what it can."""
    build = partial(build_tiers, options, observer=TransferMeter("test"))
    driver = Driver(model, build_tiers=build, **sizes)
    tiers: Any = driver.core._tiers
    # A busy machine may be slow at either, so no step is timed and computing is dear for good:
    # restoring always pays, and a load has all the time that it takes.
    for tokens in (16, 32, 64):
        tiers.observe_step(tokens, tokens * tokens, 0, float(tokens))
    tiers.observe_step = lambda *step: None
    return driver


def chain_over(driver: Driver, tokens: list[int], salt: str = "") -> BlockChain:
    chain = BlockChain(root_key(driver.core.namespace, salt=salt), 16, salt)
    chain.extend(tokens)
    return chain


def bytes_of(driver: Driver, prompt: list[int]) -> list[bytes]:
    """Return the bytes of the prompt's blocks that the pool holds, as far as they can be hits."""
    held = driver.core._pool.find(chain_over(driver, prompt), (len(prompt) - 1) // 16)
    return [driver.core._kv.data[block].numpy().tobytes() for block in held]


def store(driver: Driver, prompt: list[int], mediums: list[str]) -> list[int]:
    """Complete a prompt until its full blocks are announced on every medium."""
    tokens = driver.complete(prompt, max_tokens=NUM_TOKENS)
    wanted = {event_hash(key) for key in chain_over(driver, prompt).keys}
    turns = count(1)

    def is_stored() -> bool:
        stored = [event for event in driver.events if isinstance(event, BlockStored)]
        missing = [
            medium
            for medium in mediums
            if wanted - {at for one in stored if one.medium == medium for at in one.block_hashes}
        ]
        if missing and next(turns) % TURNS_UNTIL_ASKED_AGAIN == 0:
            # A block whose turn did not come is offered again when it is hit.
            driver.complete(prompt, max_tokens=1)
        return not missing

    driver.settle(is_stored)
    return tokens


@dataclass
class Written:
    """What a runner computed, and left on all three tiers beneath it.

    Attributes:
        restored: Tokens and sources of the same prompts, restored from its own host memory.
    """

    options: TierOptions
    tokens: list[list[int]]
    payloads: list[list[bytes]]
    restored: list[tuple[list[int], HitSource | None, list[bytes]]]


@pytest.fixture(scope="module")
def written(smollm2: Model, server: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Written:
    options = TierOptions(
        host_bytes=64 * 2**20,
        disk_dir=tmp_path_factory.mktemp("kv"),
        disk_bytes=128 * 2**20,
        remote_url=server.url,
    )
    driver = over(smollm2, options)
    tokens = [store(driver, prompt, list(MEDIUMS.values())) for prompt in PROMPTS]
    payloads = [bytes_of(driver, prompt) for prompt in PROMPTS]
    driver.settle(lambda: driver.core.stats().pinned_blocks == 0)
    # The pool alone forgets.
    assert driver.core._pool.clear()
    restored = [restore(driver, prompt) for prompt in PROMPTS]
    driver.core.close()
    return Written(options, tokens, payloads, restored)


def restore(driver: Driver, prompt: list[int]) -> tuple[list[int], HitSource | None, list[bytes]]:
    request_id = driver.submit(prompt, max_tokens=NUM_TOKENS)
    driver.run()
    last = driver.last(request_id)
    assert last.cached_tokens == (len(prompt) - 1) // 16 * 16
    return driver.tokens(request_id), last.hit_source, bytes_of(driver, prompt)


def check(
    written: Written,
    restored: list[tuple[list[int], HitSource | None, list[bytes]]],
    source: HitSource,
) -> None:
    for at, prompt in enumerate(PROMPTS):
        tokens, came_from, payload = restored[at]
        assert tokens == written.tokens[at]
        assert came_from == (source if len(prompt) > 16 else None)
        assert payload == written.payloads[at]


def test_tokens_do_not_depend_on_tiers_being_there(smollm2: Model, written: Written) -> None:
    driver = Driver(smollm2)
    for prompt, tokens in zip(PROMPTS, written.tokens, strict=True):
        assert driver.complete(prompt, max_tokens=NUM_TOKENS) == tokens


def test_host_memory_gives_back_the_same_bytes_and_tokens(written: Written) -> None:
    check(written, written.restored, "cpu")


@pytest.mark.parametrize("source", ["disk", "remote"])
def test_another_process_restores_the_same_bytes_and_tokens(
    smollm2: Model, written: Written, source: HitSource
) -> None:
    only = replace(written.options, host_bytes=0)
    if source == "disk":
        only = replace(only, remote_url=None)
    else:
        only = replace(only, disk_dir=None, disk_bytes=0)
    driver = over(smollm2, only)
    try:
        check(written, [restore(driver, prompt) for prompt in PROMPTS], source)
        assert driver.core.stats().miss_tokens["failed"] == 0
    finally:
        driver.core.close()


@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 32), ("bfloat16", 16), ("int8", 16)])
def test_other_arithmetic_or_block_sizes_load_nothing_of_a_folder_they_share(
    smollm2_dir: Path, smollm2: Model, written: Written, dtype: str, block_size: int
) -> None:
    model = smollm2 if dtype == "float32" else load_model(smollm2_dir, dtype, 1)
    prompt = PROMPTS[-1]
    clean = Driver(model, block_size=block_size).complete(prompt, max_tokens=2)
    only = replace(written.options, host_bytes=0, remote_url=None)
    driver = over(model, only, block_size=block_size)
    try:
        request_id = driver.submit(prompt, max_tokens=2)
        driver.run()

        assert driver.tokens(request_id) == clean
        assert driver.cached_tokens(request_id) == 0
    finally:
        driver.core.close()


def test_eight_at_once_with_one_prefix_say_what_each_says_alone(
    smollm2: Model, written: Written
) -> None:
    prefix = PROMPTS[-1]
    prompts = [[*prefix, *text_like(100 + at, 3 * at + 1)] for at in range(8)]
    plain = Driver(smollm2)
    alone = [plain.complete(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
    driver = over(smollm2, replace(written.options, remote_url=None))
    try:
        ids = [driver.submit(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
        driver.run()

        assert [driver.tokens(at) for at in ids] == alone
        assert [driver.cached_tokens(at) for at in ids] == [96] * 8
        assert driver.core.stats().hit_tokens["disk"] == 96, "loaded once for all"
    finally:
        driver.core.close()


def test_what_a_small_pool_evicted_comes_back_from_host_memory(smollm2: Model) -> None:
    driver = over(smollm2, TierOptions(host_bytes=64 * 2**20), pool_tokens=16 * 16)
    prompt = text_like(50, 150)
    try:
        expected = store(driver, prompt, ["CPU"])
        payload = bytes_of(driver, prompt)
        driver.complete(text_like(51, 230), max_tokens=2)
        assert len(bytes_of(driver, prompt)) < 3, "the pool had to give it up"
        tokens, source, again = restore(driver, prompt)

        assert (tokens, source) == (expected, "cpu")
        assert again == payload
    finally:
        driver.core.close()


def test_preempted_prompts_over_host_memory_give_the_same_tokens(smollm2: Model) -> None:
    prompts = [text_like(seed, length) for seed, length in ((60, 17), (61, 32), (62, 33))]

    def complete_together(driver: Driver) -> list[list[int]]:
        ids = [driver.submit(prompt, max_tokens=34) for prompt in prompts]
        driver.run()
        return [driver.tokens(at) for at in ids]

    roomy = complete_together(Driver(smollm2, pool_tokens=20 * 16))
    tight = over(smollm2, TierOptions(host_bytes=64 * 2**20), pool_tokens=10 * 16)
    try:
        assert complete_together(tight) == roomy
        assert tight.core.stats().preemptions_total > 0
    finally:
        tight.core.close()


@pytest.fixture(scope="module")
def adapted(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("adapters")
    folders = {
        name: make_adapter(root / name, tiny_dir, seed=seed, strength=3)
        for seed, name in enumerate("ab", start=1)
    }
    return load_model(tiny_dir, "float32", 1, folders)


def test_adapters_and_salts_restore_their_own_kv_and_nobody_elses(adapted: Model) -> None:
    tiers = FakeTiers()
    driver = Driver(adapted, build_tiers=tiers.build)
    rng = random.Random(5)
    prompt = [rng.randrange(2, 97) for _ in range(50)]
    identities = [(name, salt) for name in ("", "a", "b") for salt in ("", "s", "t")]

    def run() -> dict[tuple[str, str], tuple[list[int], int]]:
        answers = {}
        for name, salt in identities:
            request_id = driver.submit(prompt, adapter=name, salt=salt, max_tokens=20)
            driver.run()
            answers[name, salt] = driver.tokens(request_id), driver.cached_tokens(request_id)
        return answers

    cold = run()
    assert {cached for _, cached in cold.values()} == {0}
    held = dict(tiers.held)
    assert driver.core.reset_prefix_cache()
    tiers.held = held
    restored = run()

    assert {cached for _, cached in restored.values()} == {48}
    assert {at: tokens for at, (tokens, _) in restored.items()} == {
        at: tokens for at, (tokens, _) in cold.items()
    }
    # The adapters are strong enough that a block of another one would show.
    assert len({tuple(cold[name, ""][0]) for name in ("", "a", "b")}) == 3
