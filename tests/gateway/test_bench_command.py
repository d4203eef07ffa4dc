"""``warmlane bench``: what it sends, what it finds, and how it ends."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import NamedTuple

import pytest

from gateway.bench.client import Answer
from gateway.bench.report import document, table
from gateway.bench.workload import workload
from tests.fakes.engine import (
    DONE,
    ROLE,
    End,
    RawEngine,
    Script,
    Seen,
    answer,
    content,
    event,
    openai_engine,
    stream,
)
from tests.fakes.gateway import gateway
from tests.support import free_port

MODELS = answer(b'{"object":"list","data":[{"id":"m"}]}')
FAULTS: dict[str, Script] = {
    "refused": answer(b'{"error":{"message":"no room"}}', 429),
    "error in the stream": stream(ROLE, event(error={"message": "worker lost"})),
    "cut off": stream(ROLE, content("word"), End.RST),
    "no JSON": stream(b"data: {nonsense\n\n", DONE),
    "no text": stream(ROLE, DONE),
    "no answer": [End.RST],
}


class Done(NamedTuple):
    code: int | None
    out: str
    err: str


async def bench(*args: str) -> Done:
    command = [sys.executable, "-m", "warmlane", "bench", *args]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return Done(process.returncode, out.decode(), err.decode())


async def test_it_asks_a_gateway_and_says_what_clients_saw() -> None:
    async with openai_engine(words=2, cached=5) as engine, gateway(engine.url) as gw:
        done = await bench("--gateway", gw.url, "--requests", "6", "--documents", "2", "--json")

    found = json.loads(done.out)
    assert (done.code, found["model"], found["errors"]) == (0, "m", {})
    assert found["workers"] == {"w0": 6}
    assert found["all"]["requests"] == 6
    assert found["all"]["prompt_tokens"] == 6 * 7
    assert found["all"]["cached_share"] == pytest.approx(5 / 7)
    assert 1 <= found["first_of_a_document"]["requests"] <= 2
    assert found["all"]["ttft_p50_s"] > 0
    # Engines get a stream each, and no hint of what the gateway is to find by itself.
    assert {seen.json()["stream"] for seen in engine.seen if seen.method == "POST"} == {True}


async def test_the_same_seed_asks_the_same_and_no_seed_something_new() -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        for options in (["--seed", "7"], ["--seed", "7"], []):
            await bench("--gateway", gw.url, "--requests", "2", "--concurrency", "1", *options)

    asked = [seen.json()["messages"] for seen in engine.seen if seen.method == "POST"]
    assert asked[:2] == asked[2:4] != asked[4:]


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_fails_is_counted_with_its_reason_and_the_rest_goes_on(fault: str) -> None:
    good = stream(ROLE, content("word"), DONE)
    num_asked = 0

    def respond(seen: Seen) -> Script:
        nonlocal num_asked
        if seen.method == "GET":
            return MODELS
        num_asked += 1
        return FAULTS[fault] if num_asked == 2 else good

    async with RawEngine(respond) as engine:
        done = await bench(
            *("--gateway", engine.url, "--requests", "4", "--concurrency", "1", "--json")
        )

    found = json.loads(done.out)
    assert (done.code, found["all"]["requests"], found["all"]["failed"]) == (3, 4, 1)
    (reason,) = found["errors"]
    assert reason
    assert num_asked == 4


async def test_it_fails_where_nothing_is_answered_or_nobody_listens() -> None:
    async with RawEngine(
        lambda seen: MODELS if seen.method == "GET" else FAULTS["refused"]
    ) as engine:
        refused = await bench("--gateway", engine.url, "--requests", "2")
    away = await bench("--gateway", f"http://127.0.0.1:{free_port()}")

    assert (refused.code, away.code, away.out) == (1, 1, "")
    assert "no room" in refused.out
    assert "/v1/models: expected a list of models" in away.err


async def test_of_several_models_one_must_be_named() -> None:
    models = answer(b'{"data":[{"id":"a"},{"id":"b"}]}')
    async with RawEngine(lambda _: models) as engine:
        done = await bench("--gateway", engine.url)

    assert (done.code, done.out) == (2, "")
    assert "a, b" in done.err


async def test_a_key_goes_with_every_request() -> None:
    async with openai_engine() as engine:
        await bench("--gateway", engine.url, "--model", "m", "--requests", "1", "--key", "k1")

    assert [seen.headers["authorization"] for seen in engine.seen] == ["Bearer k1"]


def test_documents_differ_from_their_first_words_on_and_popular_ones_come_more_often() -> None:
    asks = workload(1, num_requests=400, num_documents=4, num_words=30)
    texts = [ask.messages[0]["content"] for ask in asks]
    documents = sorted(set(texts), key=texts.count)

    assert len({text.split()[1] for text in documents}) == len(documents) == 4
    assert texts.count(documents[-1]) > 2 * texts.count(documents[0])
    assert sum(ask.is_first for ask in asks) == 4
    assert len({ask.messages[1]["content"] for ask in asks}) == 400


def test_the_report_takes_ranks_and_says_nothing_of_what_nobody_told() -> None:
    answers = [Answer(False, ttft_s=number / 100) for number in range(1, 101)]
    found = document([*answers, Answer(True, error="503 away")], 10.0)

    figures = found["all"]
    times = [figures[name] for name in ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s")]
    assert times == [0.50, 0.95, 0.99]
    assert (figures["cached_share"], found["requests_per_s"]) == (None, 10.0)
    assert found["first_of_a_document"]["ttft_p50_s"] is None
    assert "failed 1 times: 503 away" in table(found)
