"""A gateway in front of two real runners, one of which has an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.fleet import Fleet, cached_tokens, chat, make_runner, wait_for, workers_of
from tests.runner.lora_parts import make_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK = 16
DOCUMENT = "Parcels are delivered on weekdays between eight and six. " * 40


@pytest.fixture(scope="module")
def gateway(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("lora-fleet")
    adapter = make_adapter(folder / "tone", smollm2_dir, rank=4, targets=("q_proj", "v_proj"))
    runners = [make_runner(folder, f"runner-{at}", smollm2_dir) for at in range(2)]
    runners[0].args += ["--lora", f"tone={adapter}"]
    fleet = Fleet(folder, runners)
    try:
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.wait_ready()
        process = fleet.gateway("gateway")
        wait_for(lambda: workers_of(process)[0]["adapters"] == ["tone"], "the adapter is known")
        yield process.url
    finally:
        for process in (*fleet.gateways, *fleet.runners):
            process.stop()


def ask_again(gateway: str) -> str:
    return chat(gateway, DOCUMENT, "Why?", model="tone").headers["x-warmlane-hit-tokens"]


def test_an_adapter_is_routed_to_who_has_it_and_hits_its_own_cache_as_predicted(
    gateway: str,
) -> None:
    names = [card["id"] for card in httpx.get(f"{gateway}/v1/models").json()["data"]]
    assert "tone" in names

    cold = chat(gateway, DOCUMENT, "When?", model="tone")
    wait_for(lambda: int(ask_again(gateway)) > 400, "the events have arrived")
    warm = [chat(gateway, DOCUMENT, f"Is it {at}?", model="tone") for at in range(3)]
    base = chat(gateway, DOCUMENT, "When?", model="smollm2")

    workers = [answer.headers["x-warmlane-worker"] for answer in (cold, *warm)]
    assert workers == ["w0"] * 4
    assert cached_tokens(cold) == cached_tokens(base) == 0
    assert base.headers["x-warmlane-hit-tokens"] == "0"
    for answer in warm:
        assert cached_tokens(answer) > 400
        # What the gateway knew from the events is what the engine had, to a block.
        predicted = int(answer.headers["x-warmlane-hit-tokens"])
        assert abs(predicted - cached_tokens(answer)) <= BLOCK
    assert [answer.json()["model"] for answer in (cold, base)] == ["tone", "smollm2"]
