"""The official client against the gateway: what it gets, streamed or not, and what it raises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.fakes.engine import ROLE, End, RawEngine, answer, content, openai_engine, stream
from tests.fakes.gateway import Gateway, gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MESSAGES: Any = [{"role": "user", "content": "q"}]


def client_of(gw: Gateway, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gw.url + "/v1", api_key="sk-test", **options)


@pytest.fixture
async def served() -> AsyncIterator[tuple[openai.AsyncOpenAI, RawEngine]]:
    async with (
        openai_engine(cached=5) as engine,
        gateway(engine.url) as gw,
        client_of(gw) as client,
    ):
        yield client, engine


async def test_a_chat_completion(served: tuple[openai.AsyncOpenAI, RawEngine]) -> None:
    client, engine = served
    completion = await client.chat.completions.create(model="m", messages=MESSAGES)
    usage = completion.usage

    assert completion.choices[0].message.content == "word word word "
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 5
    assert engine.seen[0].headers["authorization"] == "Bearer sk-test"


async def test_a_streamed_chat_completion(served: tuple[openai.AsyncOpenAI, RawEngine]) -> None:
    client, _ = served
    chunks = await client.chat.completions.create(
        model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    seen = [chunk async for chunk in chunks]

    assert "".join(c.choices[0].delta.content or "" for c in seen if c.choices) == "word " * 3
    assert seen[-1].usage is not None


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3]], ids=str)
async def test_text_completions(served: tuple[openai.AsyncOpenAI, RawEngine], prompt: Any) -> None:
    client, _ = served
    whole = await client.completions.create(model="m", prompt=prompt)
    pieces = await client.completions.create(model="m", prompt=prompt, stream=True)
    streamed = "".join([piece.choices[0].text async for piece in pieces])

    assert whole.choices[0].text == streamed == "word word word "


async def test_models_are_listed(served: tuple[openai.AsyncOpenAI, RawEngine]) -> None:
    client, _ = served

    assert [model.id async for model in client.models.list()] == ["m"]


async def test_an_unknown_model_raises_not_found(
    served: tuple[openai.AsyncOpenAI, RawEngine],
) -> None:
    client, engine = served
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="nope", messages=MESSAGES)

    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert caught.value.request_id
    assert engine.seen == []


async def test_a_stream_that_breaks_off_raises_an_api_error() -> None:
    broken = stream(ROLE, content("some"), 0.02, End.RST, end=None)
    async with (
        RawEngine(lambda _: broken) as engine,
        gateway(engine.url) as gw,
        client_of(gw) as client,
    ):
        chunks = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        texts: list[str] = []

        async def read() -> None:
            async for chunk in chunks:
                texts.append(chunk.choices[0].delta.content or "")  # noqa: PERF401  # kept if it raises

        with pytest.raises(openai.APIError, match="broke off"):
            await read()

    assert "".join(texts) == "some"
    assert len(engine.seen) == 1


async def test_a_spent_retry_budget_is_not_retried_by_the_client() -> None:
    async with (
        RawEngine(lambda _: [End.FIN]) as engine,
        gateway(engine.url, engine.url) as gw,
        client_of(gw, max_retries=2) as client,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)

    assert caught.value.code == "worker_unreachable"
    assert len(engine.seen) == 2


async def test_an_engines_own_error_keeps_its_body() -> None:
    refusal = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
    async with (
        RawEngine(lambda _: answer(refusal, 400)) as engine,
        gateway(engine.url) as gw,
        client_of(gw) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="too long"):
            await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
