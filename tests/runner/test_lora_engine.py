"""Adapters in the engine: the right text, and KV that no other adapter or generation can hit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from prefix_index.blocks import hash_blocks, root_hash
from prefix_index.events import BlockStored, EventBatch, decode_batch, encode_batch
from prefix_index.index import Index
from prefix_index.ingest import WorkerFeed
from runner.model import Model
from runner.weights import load_model
from tests.runner.driver import Driver
from tests.runner.lora_parts import make_adapter, merge

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = ("", "a", "b")

# Enough to need more blocks than the prompt.
NUM_TOKENS = 24


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(97) for _ in range(length)]


PROMPTS = [prompt_of(length, length) for length in (16, 33, 50, 90)]


@pytest.fixture(scope="module")
def folders(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    # Strong enough that each continues every prompt in its own way.
    return {
        "a": make_adapter(root / "a", tiny_dir, seed=1, strength=3),
        "b": make_adapter(root / "b", tiny_dir, seed=2, rank=5, strength=3),
    }


@pytest.fixture(scope="module")
def adapted(tiny_dir: Path, folders: dict[str, Path]) -> Model:
    return load_model(tiny_dir, "float32", 1, folders)


@pytest.fixture(scope="module")
def expected(
    tiny_dir: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[int]]]:
    """What models with merged weights say to each prompt."""
    root = tmp_path_factory.mktemp("merged")
    merged = {"": tiny_dir} | {
        name: merge(folder, tiny_dir, root / name) for name, folder in folders.items()
    }
    answers = {}
    for name, folder in merged.items():
        driver = Driver(load_model(folder, "float32", 1))
        answers[name] = [driver.complete(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
    return answers


def test_each_name_says_what_its_merged_weights_say_cold_and_warm(
    adapted: Model, expected: dict[str, list[list[int]]]
) -> None:
    driver = Driver(adapted)
    for at, prompt in enumerate(PROMPTS):
        assert len({tuple(expected[name][at]) for name in NAMES}) == 3
        for name in NAMES:
            cold, warm = (
                driver.submit(prompt, adapter=name, max_tokens=NUM_TOKENS) for _ in range(2)
            )
            driver.run()

            assert driver.tokens(cold) == driver.tokens(warm) == expected[name][at]
            assert driver.cached_tokens(cold) == 0
            assert driver.cached_tokens(warm) == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize(
    ("pool_tokens", "budget"), [(4096, 512), (144, 32)], ids=["roomy", "tight"]
)
def test_all_names_together_say_what_each_says_alone(
    adapted: Model, expected: dict[str, list[list[int]]], pool_tokens: int, budget: int
) -> None:
    """Tight: small prefill chunks between decodes, and preemption."""
    driver = Driver(adapted, pool_tokens=pool_tokens, max_batched_tokens=budget)
    ids = {
        (name, at): driver.submit(prompt, adapter=name, max_tokens=NUM_TOKENS)
        for at, prompt in enumerate(PROMPTS)
        for name in NAMES
    }
    driver.run()

    assert bool(driver.core.stats().preemptions_total) == (pool_tokens == 144)
    for (name, at), request_id in ids.items():
        assert driver.tokens(request_id) == expected[name][at]


def test_salts_and_adapters_keep_apart_independently(adapted: Model) -> None:
    driver = Driver(adapted)
    for name in NAMES:
        for salt in ("", "tenant", "a"):
            request_id = driver.submit(PROMPTS[1], adapter=name, salt=salt)
            driver.run()

            assert driver.cached_tokens(request_id) == 0


def test_samples_of_an_adapter_share_its_prompt(
    adapted: Model, expected: dict[str, list[list[int]]]
) -> None:
    driver = Driver(adapted)
    request_id = driver.submit(PROMPTS[2], adapter="b", n=4, max_tokens=NUM_TOKENS)
    driver.run()

    assert [driver.tokens(request_id, at) for at in range(4)] == [expected["b"][2]] * 4


def keys_of(model: Model, adapter: str) -> set[int]:
    driver = Driver(model)
    driver.complete(PROMPTS[2], adapter=adapter, max_tokens=1)
    return set(driver.core.cached_hashes())


def test_other_weights_under_the_same_name_are_another_generation(
    tiny_dir: Path, tmp_path: Path
) -> None:
    variants = {
        "first": {"seed": 1},
        "other weights": {"seed": 2},
        "other scale": {"seed": 1, "alpha": 7},
    }
    keys = {
        variant: keys_of(
            load_model(
                tiny_dir, "float32", 1, {"a": make_adapter(tmp_path / variant, tiny_dir, **how)}
            ),
            "a",
        )
        for variant, how in variants.items()
    }
    again = make_adapter(tmp_path / "elsewhere", tiny_dir, seed=1)
    same = keys_of(load_model(tiny_dir, "float32", 1, {"a": again}), "a")

    assert len(set.union(*keys.values())) == sum(len(found) for found in keys.values()) == 9
    assert same == keys["first"]


def test_two_names_of_the_same_weights_share_nothing(tiny_dir: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", tiny_dir)
    model = load_model(tiny_dir, "float32", 1, {"a": folder, "b": folder})

    assert keys_of(model, "a").isdisjoint(keys_of(model, "b"))


def test_an_unknown_adapter_ends_its_request_with_the_reason(adapted: Model) -> None:
    driver = Driver(adapted)
    request_id = driver.submit([1, 2], adapter="c")

    assert driver.last(request_id).error == "there is no adapter c"
    assert not driver.core.has_work


def stored(driver: Driver) -> list[BlockStored]:
    return [event for event in driver.events if isinstance(event, BlockStored)]


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_events_name_the_adapter_where_vllm_does(adapted: Model, salt: str) -> None:
    driver = Driver(adapted, max_batched_tokens=32)
    driver.complete(PROMPTS[3], adapter="a", salt=salt, max_tokens=1)
    driver.complete(PROMPTS[3], max_tokens=1)
    events = stored(driver)
    of_adapter = [event for event in events if event.lora_name is not None]

    assert {(event.lora_id, event.lora_name) for event in of_adapter} == {(1, "a")}
    keys = [block for event in of_adapter for block in event.extra_keys or []]
    assert keys == [["a", salt] if salt else ["a"], *[["a"]] * 4]
    of_base = [event for event in events if event.lora_name is None]
    assert {event.lora_id for event in of_base} == {None}
    assert all(block is None for event in of_base for block in event.extra_keys or [])


def test_an_index_of_the_events_finds_each_prompt_under_its_own_adapter_only(
    adapted: Model,
) -> None:
    """What the gateway does, over the wire format."""
    driver = Driver(adapted)
    asked: Sequence[tuple[str, str]] = [("", ""), ("a", ""), ("b", "tenant")]
    for name, salt in asked:
        driver.complete(PROMPTS[2], adapter=name, salt=salt, max_tokens=1)
    index = Index(block_size=16, max_blocks=1000)
    feed = WorkerFeed(index, "w", "tiny")
    feed.apply(decode_batch(encode_batch(EventBatch(0.0, driver.events, 0))))

    for name in (*NAMES, "c"):
        for salt in ("", "tenant"):
            root = root_hash("tiny", adapter=name, salt=salt)
            hashes = hash_blocks(PROMPTS[2], 16, root)
            held = [block for block in hashes if index.holds("w", block)]
            assert len(held) == (3 if (name, salt) in asked else 0)
