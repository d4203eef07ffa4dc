"""A whole runner with tiers, over HTTP: restarts, figures, decisions, refusals."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from runner import weights
from runner.config import PoolSize, RunnerConfig
from tests.live_runner import LiveRunner
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from runner.model import Model

TEXT = "Handbook rule 7: refunds are accepted within thirty days of delivery. " * 12


def config_of(smollm2_dir: Path, **settings: Any) -> RunnerConfig:
    pool = PoolSize(tokens=1024)
    return RunnerConfig(model=str(smollm2_dir), port=0, pool=pool, **settings)


def ask(url: str, prompt: str = TEXT, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def tiers_of(url: str) -> dict[str, Any]:
    tiers: dict[str, Any] = httpx.get(f"{url}/cache").json()["tiers"]
    return tiers


@pytest.fixture(scope="module", autouse=True)
def _shared_weights(smollm2: Model) -> Iterator[None]:
    """All runners here compute with the weights that the other tests have read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "load_model", lambda *_, **__: smollm2)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def first_answer(smollm2_dir: Path, folder: Path) -> dict[str, Any]:
    """What a runner said that has ended since and left its KV on disk."""
    config = config_of(smollm2_dir, ssd_dir=folder, ssd_bytes=256 * 2**20)
    with LiveRunner.start(config) as live:
        answer = ask(live.url)
        num_blocks = answer["usage"]["prompt_tokens"] // 16
        # A block whose queue was full is stored when it is hit again.
        for _ in range(20):
            if tiers_of(live.url)["disk"]["num_blocks"] >= num_blocks:
                break
            ask(live.url, max_tokens=1)
    return answer


@pytest.fixture(scope="module")
def restarted(
    smollm2_dir: Path, folder: Path, first_answer: dict[str, Any]
) -> Iterator[LiveRunner]:
    del first_answer
    config = config_of(
        smollm2_dir,
        ssd_dir=folder,
        ssd_bytes=256 * 2**20,
        host_bytes=64 * 2**20,
        peers=("http://127.0.0.1:9",),
        serve_peers=True,
    )
    with LiveRunner.start(config) as live:
        yield live


def test_a_restarted_runner_takes_the_prefix_from_disk_and_says_the_same(
    restarted: LiveRunner, first_answer: dict[str, Any]
) -> None:
    again = ask(restarted.url)

    assert again["choices"][0]["text"] == first_answer["choices"][0]["text"]
    assert cached_tokens(again) == (first_answer["usage"]["prompt_tokens"] - 1) // 16 * 16
    decisions = httpx.get(f"{restarted.url}/cache/decisions").json()["decisions"]
    assert decisions[-1]["decision"] == "restore"
    assert decisions[-1]["actual"]["blocks_by_tier"].keys() == {"disk"}


async def test_the_cache_document_names_every_tier_and_block_state(
    restarted: LiveRunner,
) -> None:
    ask(restarted.url, "Another prompt that is long enough for a block or two of sixteen tokens.")

    def is_quiet() -> bool:
        tiers = tiers_of(restarted.url)
        return tiers["gpu"]["blocks"]["pinned"] == 0 and tiers["cpu"]["num_blocks"] > 0

    await poll_until(is_quiet)
    document = (await asyncio.to_thread(httpx.get, f"{restarted.url}/cache")).json()
    blocks = document["tiers"]["gpu"]["blocks"]
    assert blocks.keys() == {"total", "free", "cached", "active", "loading", "pinned"}
    assert blocks["total"] == sum(blocks.values()) - blocks["total"]
    assert document["tiers"]["disk"]["used_bytes"] > 0
    assert document["tiers"]["cpu"]["capacity_bytes"] <= 64 * 2**20
    assert document["peers"]["serves"]
    assert "http://127.0.0.1:9" in document["peers"]["pulls"]


def test_a_peer_that_is_not_configured_is_refused_and_one_that_is_away_costs_nothing(
    restarted: LiveRunner,
) -> None:
    prompt = "A question nobody has asked before, with enough words to fill two blocks. " * 3
    body = {"prompt": prompt, "max_tokens": 2}
    source = {"url": "http://127.0.0.1:10", "tokens": 64}
    refused = httpx.post(
        f"{restarted.url}/v1/completions",
        json=body | {"kv_transfer_params": {"source": source}},
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "peer_not_allowed"

    allowed = {"source": {"url": "http://127.0.0.1:9/", "tokens": 64}}
    assert ask(restarted.url, prompt, kv_transfer_params=allowed)["usage"]["completion_tokens"] == 8


def test_a_runner_without_tiers_names_the_pool_alone(smollm2_dir: Path) -> None:
    with LiveRunner.start(config_of(smollm2_dir)) as live:
        ask(live.url, "Hello")

        assert tiers_of(live.url).keys() == {"gpu"}
        assert httpx.get(f"{live.url}/cache/decisions").json() == {"decisions": []}
        refused = httpx.post(f"{live.url}/kv/blocks", content=b"{}")
        assert refused.status_code == 403
