"""Streams, errors and fields from public reports: what passes, and what is made of it.

The names of the cases are those of the collection they come from.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from gateway.routing.pool import Pool
from prefix_index.prompts import PromptReader
from prefix_index.tokens import PromptTokenizer
from tests.fakes.engine import (
    DONE,
    FINISH,
    End,
    RawEngine,
    Script,
    answer,
    content,
    event,
    openai_engine,
    stream,
    usage,
)
from tests.fakes.gateway import chat, gateway, worker
from tests.support import free_port

if TYPE_CHECKING:
    from pathlib import Path

TOOL_CALLS = [
    {"index": 0, "id": "A", "type": "function", "function": {"name": "search", "arguments": ""}},
    {"index": 1, "id": "B", "type": "function", "function": {"name": "read", "arguments": ""}},
    {"index": 0, "function": {"arguments": '{"query":"x"}'}},
    {"index": 1, "function": {"arguments": '{"path":"y"}'}},
]


async def test_h01_an_event_cut_inside_a_character_arrives_whole() -> None:
    begin = b'data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":'
    rest = b' ok"},"finish_reason":null}]}\n'
    pieces = [begin + b'{"content":"caf', 0.05, b"\xc3", 0.05, b"\xa9", rest, 0.05, b"\n"]
    async with (
        RawEngine(lambda _: stream(*pieces, FINISH, DONE)) as engine,
        gateway(engine.url) as gw,
    ):
        _, body, _ = await gw.post(body=chat(stream=True))
        record = await gw.record()
    first = json.loads(body.split(b"\n\n")[0].removeprefix(b"data: "))

    assert body == b"".join(p for p in pieces if isinstance(p, bytes)) + FINISH + DONE
    assert first["choices"][0]["delta"]["content"] == "caf\u00e9 ok"
    assert record.outcome == "ok"
    assert record.ttft_s is not None
    assert record.ttft_s >= 0.15  # the first event is there once its last piece is


async def test_h03_a_finish_reason_ends_a_stream_that_has_no_end_marker() -> None:
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append([*stream(content("a"), FINISH), End.FIN])
        _, complete, _ = await gw.post(body=chat(stream=True))
        first = await gw.record()
        engine.scripts.append([*stream(content("a")), End.FIN])
        _, cut, _ = await gw.post(body=chat(stream=True))
        second = await gw.record()

    assert (complete, first.outcome) == (content("a") + FINISH, "ok")
    assert second.outcome == "truncated"
    assert cut.startswith(content("a") + b'data: {"error":')
    assert DONE not in cut


async def test_h05_events_without_choices_pass_and_are_no_first_token() -> None:
    counts = event(id="x", choices=[], usage=usage(100, 1, 64))
    pieces = [event(id="x", choices=[]), 0.1, content("a"), FINISH, counts]
    pieces += [event(usage={"x": 1}), DONE]
    async with RawEngine(lambda _: stream(*pieces)) as engine, gateway(engine.url) as gw:
        asked = chat(stream=True, stream_options={"include_usage": True})
        _, body, _ = await gw.post(body=asked)
        record = await gw.record()

    assert body == b"".join(piece for piece in pieces if isinstance(piece, bytes))
    assert record.observed_hit_tokens == 64
    assert record.ttft_s is not None
    assert record.ttft_s >= 0.1


async def test_h07_an_error_in_a_stream_is_the_engines_failure_and_is_not_retried() -> None:
    told = event(error={"message": "engine is out of memory", "type": "InternalServerError"})
    script: Script = stream(told, DONE)
    async with (
        RawEngine(lambda _: script) as a,
        RawEngine(lambda _: script) as b,
        gateway(a.url, b.url) as gw,
    ):
        status, body, _ = await gw.post(body=chat(stream=True))
        record = await gw.record()

    assert (status, body) == (200, told + DONE)
    assert record.outcome == "upstream_error"
    assert len(a.seen) + len(b.seen) == 1


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (400, b'{"object":"error","message":"maximum context length is 4096","code":400}', ()),
        (429, b'{"error":{"message":"queue full","code":429}}', ("retry-after: 7",)),
        (422, b'{"detail":[{"loc":["body","temperature"],"msg":"bad"}]}', ()),
    ],
)
async def test_h21_engine_errors_pass_with_status_and_body(
    status: int, body: bytes, headers: tuple[str, ...]
) -> None:
    async with (
        RawEngine(lambda _: answer(body, status, *headers)) as a,
        RawEngine(lambda _: answer(body, status, *headers)) as b,
        gateway(a.url, b.url) as gw,
    ):
        got, told, response = await gw.post()
        record = await gw.record()
        failures = [w.health.failures for pool in gw.pools for w in pool.workers.values()]

    assert (got, told) == (status, body)
    assert response.headers.get("retry-after") == ("7" if headers else None)
    assert failures == [0, 0]
    if status != 429:  # another worker may have room
        assert len(a.seen) + len(b.seen) == record.attempts == 1


async def test_h25_interleaved_tool_calls_pass_and_the_first_is_the_first_token() -> None:
    pieces = [event(id="x", choices=[{"index": 0, "delta": {"tool_calls": [call]}}])
              for call in TOOL_CALLS]  # fmt: skip
    script: Script = stream(pieces[0], 0.2, *pieces[1:], DONE)
    async with RawEngine(lambda _: script) as engine, gateway(engine.url) as gw:
        _, body, _ = await gw.post(body=chat(stream=True))
        record = await gw.record()

    assert body == b"".join(pieces) + DONE
    assert record.ttft_s is not None
    assert record.ttft_s < record.duration_s - 0.15


async def test_h27_token_ids_pass_as_sent_and_are_hashed_as_their_text_is(
    smollm2_dir: Path,
) -> None:
    tokenizer = PromptTokenizer.from_dir(smollm2_dir)
    text = "The handbook says so. " * 20
    ids = tokenizer.encode(text)
    reader = PromptReader(tokenizer, None, model="m", block_size=16)
    of_text, of_ids = reader.completion(text).complete(), reader.completion(ids).complete()
    of_first = reader.completion([ids, [1, 2]]).complete()
    raw = b'{"model":"m","prompt": [[1, 2,3],[4,5]],"max_tokens":1}'
    async with openai_engine() as engine, gateway(engine.url) as gw:
        status, _, _ = await gw.post("/v1/completions", data=raw)

    assert list(of_text.block_hashes) == list(of_ids.block_hashes) == list(of_first.block_hashes)
    assert len(of_ids.block_hashes) == len(ids) // 16 > 0
    assert status == 200
    assert engine.seen[0].body == raw


async def test_h29_fields_that_nobody_here_knows_reach_the_engine() -> None:
    body = chat(
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.1,
        chat_template_kwargs={"enable_thinking": False},
        return_token_ids=True,
        vllm_xargs={"a": 1},
        separate_reasoning=True,
        cache_prompt=True,
        id_slot=0,
        reasoning_effort="minimal",
        x_future={"k": [1, None]},
    )
    body["messages"][0] |= {"name": "u1", "x_msg": 1}
    raw = json.dumps(body).encode()
    async with openai_engine() as engine, gateway(engine.url) as gw:
        await gw.post(data=raw)

    assert engine.seen[0].body == raw


@pytest.mark.parametrize(
    "limits",
    [
        {"max_completion_tokens": 5},
        {"max_tokens": 5},
        {"max_tokens": 5, "max_completion_tokens": 9},
    ],
    ids=str,
)
async def test_h30_limits_on_the_answer_are_forwarded_as_sent(limits: dict[str, int]) -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        await gw.post(body=chat(**limits))

    assert engine.seen[0].json() == chat(**limits)


async def test_h35_a_refusal_before_the_first_chunk_keeps_its_status() -> None:
    refusal = b'{"error":{"message":"tools[0].function is missing","type":"BadRequestError"}}'
    asked: dict[str, Any] = chat(stream=True, tools=[{"type": "function"}])
    async with RawEngine(lambda _: answer(refusal, 400)) as engine, gateway(engine.url) as gw:
        status, body, _ = await gw.post(body=asked)
    async with gateway(f"http://127.0.0.1:{free_port()}") as gw:
        unreachable, told, _ = await gw.post(body=asked)

    assert (status, body) == (400, refusal)
    assert unreachable == 502
    assert json.loads(told)["error"]["code"] == "worker_unreachable"


async def test_h38_models_are_the_union_and_an_alias_goes_where_it_is_served() -> None:
    async with openai_engine() as a, openai_engine() as b:
        pools = [
            Pool("a", models=["a"], workers=[worker("w1", a.url)]),
            Pool("b", models=["b", "a"], aliases={"b-alias": "b"}, workers=[worker("w2", b.url)]),
        ]
        async with gateway(pools=pools) as gw:
            _, listed, _ = await gw.get("/v1/models")
            status, refused, _ = await gw.post(body={**chat(), "model": "nope"})
            before = len(a.seen) + len(b.seen)
            await gw.post(body={**chat(), "model": "b-alias"})

    assert sorted(card["id"] for card in json.loads(listed)["data"]) == ["a", "b", "b-alias"]
    assert (status, json.loads(refused)["error"]["code"]) == (404, "model_not_found")
    assert before == 0
    assert (len(a.seen), [seen.json()["model"] for seen in b.seen]) == (0, ["b"])
