"""The official clients against a gateway over a bundled runner with real weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from gateway.proxy.server import Front, Listener
from gateway.serve import Gateway
from gateway.settings import load
from runner.config import PoolSize, RunnerConfig
from tests.live_runner import LiveRunner
from tests.support import poll_until

COLD: Any = {"extra_body": {"temperature": 0.0}}
SYSTEM = "You answer from this handbook. " + "Parcels leave the house at noon. " * 12
ASKED: Any = [{"role": "user", "content": "When do parcels leave?"}]
TOOL: Any = {
    "name": "look_up",
    "description": "Looks a parcel up",
    "input_schema": {"type": "object", "properties": {"id": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def runner(smollm2_dir: Path) -> Iterator[LiveRunner]:
    config = RunnerConfig(
        model=str(smollm2_dir), port=0, pool=PoolSize(tokens=4096), served_model_name="m"
    )
    with LiveRunner.start(config) as live:
        yield live


@pytest.fixture(params=["aiohttp", "raw"])
async def url(runner: LiveRunner, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    front: Front = request.param
    workers = [{"id": "w0", "url": runner.url}]
    pool = {"name": "chat", "models": ["m"], "engine": "runner", "workers": workers}
    settings, _ = load(None, flags={("pools",): [pool]}, environ={})
    gateway = Gateway(settings)
    await gateway.start()
    listener = await Listener.start(gateway.app, "127.0.0.1", 0, front=front)
    try:
        [served] = gateway.fleet.pools
        await poll_until(
            lambda: served.reader is not None, deadline_s=30.0, what="prompts are read"
        )
        yield f"http://127.0.0.1:{listener.port}"
    finally:
        await listener.stop(0.0)
        await gateway.close()


@pytest.fixture
async def claude(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
async def gpt(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
        yield client


async def test_messages_are_answered_counted_and_reuse_what_is_cached(
    claude: anthropic.AsyncAnthropic,
) -> None:
    counted = await claude.messages.count_tokens(model="m", system=SYSTEM, messages=ASKED)
    told = [
        await claude.messages.create(model="m", system=SYSTEM, messages=ASKED, max_tokens=8, **COLD)
        for _ in range(2)
    ]
    first, second = (message.usage for message in told)

    assert [message.type for message in told] == ["message", "message"]
    assert told[0].content[0].type == "text"
    assert told[0].content[0].text == told[1].content[0].text  # type: ignore[union-attr]
    assert told[0].stop_reason in ("end_turn", "max_tokens")
    for usage in (first, second):
        cached = usage.cache_read_input_tokens or 0
        assert usage.input_tokens + cached == counted.input_tokens
        assert 0 < usage.output_tokens <= 8
    assert second.cache_read_input_tokens is not None
    assert second.cache_read_input_tokens >= counted.input_tokens - 32


async def test_a_streamed_message_says_what_a_whole_one_says(
    claude: anthropic.AsyncAnthropic,
) -> None:
    asked: Any = {"model": "m", "system": SYSTEM, "messages": ASKED, "max_tokens": 12}
    whole = await claude.messages.create(**asked, **COLD)
    async with claude.messages.stream(**asked, **COLD) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()

    assert "".join(texts) == whole.content[0].text  # type: ignore[union-attr]
    assert len(texts) > 1
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason


async def test_tools_and_their_results_are_taken(claude: anthropic.AsyncAnthropic) -> None:
    used = {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"id": "7"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "It left at noon."}
    messages: Any = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, used]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    told = await claude.messages.create(model="m", messages=messages, tools=[TOOL], max_tokens=4)

    assert told.usage.output_tokens > 0


async def test_a_stop_sequence_ends_a_message(claude: anthropic.AsyncAnthropic) -> None:
    begun: Any = [*ASKED, {"role": "assistant", "content": "Parcels leave the house at"}]
    told = await claude.messages.create(
        model="m", system=SYSTEM, messages=begun, max_tokens=12, stop_sequences=["."], **COLD,
    )  # fmt: skip

    assert "." not in told.content[0].text  # type: ignore[union-attr]
    assert told.usage.output_tokens < 12


async def test_errors_are_raised_as_the_clients_own(
    claude: anthropic.AsyncAnthropic, gpt: openai.AsyncOpenAI
) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(model="nope", messages=ASKED, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError):
        await claude.messages.create(model="m", messages=ASKED, max_tokens=20_000)
    with pytest.raises(openai.InternalServerError, match="responses API") as caught:
        await gpt.responses.create(model="m", input="q")

    assert caught.value.status_code == 501


async def test_chat_and_text_completions_and_their_streams(gpt: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "system", "content": SYSTEM}, *ASKED]
    whole = await gpt.chat.completions.create(
        model="m", messages=messages, max_tokens=8, temperature=0.0
    )
    chunks = await gpt.chat.completions.create(
        model="m", messages=messages, max_tokens=8, temperature=0.0, stream=True
    )
    seen = [chunk async for chunk in chunks]
    text = await gpt.completions.create(model="m", prompt=[1, 2, 3, 4], max_tokens=2)

    assert "".join(c.choices[0].delta.content or "" for c in seen) == (
        whole.choices[0].message.content
    )
    assert all(chunk.choices for chunk in seen)  # usage was asked for by the gateway alone
    assert text.usage is not None
    assert text.usage.prompt_tokens == 4


async def test_models_are_listed_and_told_one_by_one(gpt: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in gpt.models.list()] == ["m"]
    assert (await gpt.models.retrieve("m")).id == "m"


async def test_explain_reads_a_message_as_it_will_be_sent(
    url: str, claude: anthropic.AsyncAnthropic
) -> None:
    counted = await claude.messages.count_tokens(model="m", system=SYSTEM, messages=ASKED)
    body = {"model": "m", "max_tokens": 1, "system": SYSTEM, "messages": ASKED}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/admin/v1/explain", json=body) as response,
    ):
        told = await response.json()

    assert (told["tokens"], told["prompt_tokens"]) == ("exact", counted.input_tokens)
    assert told["segments"][0]["kind"] == "system"
