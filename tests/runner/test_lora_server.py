"""Adapters over HTTP: models of their own name, beside the base model, on the real weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError
from safetensors.torch import load_file, save_file

from prefix_index.events import BlockStored
from runner.config import PoolSize, RunnerConfig
from runner.serve import StartError, load
from tests.live_runner import LiveRunner
from tests.runner.lora_parts import make_adapter
from tests.runner.test_server import events, replay
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

PROMPT = list(range(300, 340))
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    silent = make_adapter(root / "silent", smollm2_dir, rank=2, targets=("q_proj",))
    tensors = load_file(silent / "adapter_model.safetensors")
    zeros = {name: tensor * 0 for name, tensor in tensors.items()}
    save_file(zeros, silent / "adapter_model.safetensors")
    return {
        "loud": make_adapter(root / "loud", smollm2_dir, rank=4, targets=("v_proj", "up_proj")),
        "silent": silent,
    }


@pytest.fixture(scope="module")
def live(smollm2_dir: Path, folders: dict[str, Path]) -> Iterator[LiveRunner]:
    config = RunnerConfig(
        model=str(smollm2_dir),
        port=0,
        pool=PoolSize(tokens=1_024),
        kv_events="tcp://127.0.0.1:0",
        kv_replay="tcp://127.0.0.1:0",
        lora=folders,
    )
    with LiveRunner.start(config) as live:
        yield live


@pytest.fixture
async def http(live: LiveRunner) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=live.url, timeout=60) as http:
        await http.post("/reset_prefix_cache")
        yield http


async def complete(http: httpx.AsyncClient, model: str, **fields: Any) -> dict[str, Any]:
    response = await http.post("/v1/completions", json=GREEDY | {"model": model} | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_adapters_are_listed_below_their_base(
    live: LiveRunner, http: httpx.AsyncClient, folders: dict[str, Path]
) -> None:
    cards = (await http.get("/v1/models")).json()["data"]
    async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="-", max_retries=0) as client:
        card = await client.models.retrieve("loud")
        with pytest.raises(NotFoundError, match="serves `smollm2`, `loud`, `silent`"):
            await client.models.retrieve("quiet")

    assert [(card["id"], card["parent"]) for card in cards] == [
        ("smollm2", None),
        ("loud", "smollm2"),
        ("silent", "smollm2"),
    ]
    assert [card["root"] for card in cards[1:]] == [str(folder) for folder in folders.values()]
    assert card.id == "loud"


async def test_a_request_runs_with_the_adapter_it_names_and_hits_no_other_cache(
    http: httpx.AsyncClient,
) -> None:
    answers = {name: await complete(http, name) for name in ("smollm2", "loud", "silent")}
    again = {name: await complete(http, name) for name in answers}
    texts = {name: answer["choices"][0]["text"] for name, answer in answers.items()}

    assert texts["silent"] == texts["smollm2"] != texts["loud"]
    for name, answer in answers.items():
        assert answer["model"] == name
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again[name]["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        assert again[name]["choices"][0]["text"] == texts[name]


async def test_a_stream_and_a_chat_run_with_the_adapter_too(http: httpx.AsyncClient) -> None:
    whole = await complete(http, "loud")
    chunks = await events(http, "/v1/completions", GREEDY | {"model": "loud"})
    messages = [{"role": "user", "content": "Name three colours."}]
    chats = [
        (
            await http.post(
                "/v1/chat/completions",
                json={"model": name, "messages": messages, "temperature": 0, "max_tokens": 5},
            )
        ).json()
        for name in ("smollm2", "loud")
    ]

    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == whole["choices"][0]["text"]
    assert {chunk["model"] for chunk in chunks} == {"loud"}
    assert chats[1]["model"] == "loud"
    assert chats[0]["choices"] != chats[1]["choices"]


async def test_an_adapter_tokenizes_as_its_base(http: httpx.AsyncClient) -> None:
    asked = [
        await http.post("/tokenize", json={"model": name, "prompt": "Name three colours."})
        for name in ("smollm2", "loud")
    ]

    assert asked[0].json() == asked[1].json()
    assert asked[0].status_code == 200


async def test_published_events_name_the_adapter(live: LiveRunner, http: httpx.AsyncClient) -> None:
    publisher = live.runner.publisher
    assert publisher is not None
    prompt = list(range(700, 740))
    await complete(http, "loud", prompt=prompt, cache_salt="tenant", max_tokens=1)

    def stored() -> list[BlockStored]:
        return [
            event
            for batch in replay(publisher.replay_endpoint)
            for event in batch.events
            if isinstance(event, BlockStored) and event.token_ids[:1] == [700]
        ]

    await poll_until(lambda: bool(stored()), what="events of the prompt")
    (event,) = stored()
    assert event.lora_name == "loud"
    assert event.extra_keys == [["loud", "tenant"], ["loud"]]


def test_a_bad_adapter_keeps_the_runner_from_starting_with_its_name_and_reason(
    smollm2_dir: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    foreign = make_adapter(tmp_path / "tone", tiny_dir)
    config = RunnerConfig(model=str(smollm2_dir), port=0, lora={"tone": foreign})

    with pytest.raises(StartError, match=r"adapter tone: .*expected.*another model\?"):
        load(config)
