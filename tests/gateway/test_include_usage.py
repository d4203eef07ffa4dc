"""Streams are asked for their usage in one splice; what only the gateway asked for is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.proxy.outbound import put_in
from gateway.proxy.sse import StreamObserver
from gateway.routing.pool import Pool
from tests.fakes.engine import (
    DONE,
    FINISH,
    ROLE,
    End,
    RawEngine,
    content,
    event,
    openai_engine,
    stream,
    usage,
)
from tests.fakes.gateway import CHAT, chat, gateway, worker
from tests.support import poll_until

DATA = Path(__file__).parent.parent / "data"
ADDED = b',"stream_options":{"include_usage":true}'
COUNTS = event(id="x", choices=[], usage=usage(100, 2, 64))


def _lines(name: str) -> list[str]:
    return (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()


def bodies() -> list[bytes]:
    """Bodies of every kind, with a model and streamed; no byte else is touched."""
    raws = [json.loads(line)["raw"] for line in _lines("bodies/reported")]
    for name in ("qwen3", "smollm2"):
        lines = _lines(f"vllm-rendering/{name}")
        raws += [json.dumps(json.loads(line)["body"], ensure_ascii=False) for line in lines]
    prepared = []
    for raw in raws:
        try:
            document = orjson.loads(raw)
        except orjson.JSONDecodeError:
            continue  # too deep for anybody
        missing = {"model": "m", "stream": True}
        begin = "".join(
            f"{json.dumps(name)}: {json.dumps(value)} ,"
            for name, value in missing.items()
            if name not in document
        )
        prepared.append(raw.replace("{", "{ " + begin, 1).encode())
    return prepared


def pool_of(engine: RawEngine, models: list[str]) -> Pool:
    return Pool("chat", models=models, workers=[worker("w0", engine.url)])


async def test_every_reported_body_reaches_the_engine_with_one_insertion() -> None:
    sent = bodies()
    models = list(dict.fromkeys(orjson.loads(body)["model"] for body in sent))
    num_streams = 0
    async with openai_engine() as engine, gateway(pools=[pool_of(engine, models)]) as gw:
        for body in sent:
            status, told, _ = await gw.post(data=body)
            assert status == 200
            document = orjson.loads(body)
            seen = engine.seen[-1].body
            asked = (document.get("stream_options") or {}).get("include_usage")
            if document["stream"] is not True or asked:
                assert seen == body
                continue
            num_streams += 1
            at = seen.rindex(ADDED)
            assert seen[:at] + seen[at + len(ADDED) :] == body
            assert orjson.loads(seen) == document | {"stream_options": {"include_usage": True}}
            assert b'"usage"' not in told
            assert gw.records[-1].completion_tokens == 3

    assert num_streams > 100


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (b"null", b'{"include_usage":true}'),
        (b"{ }", b'{"include_usage":true }'),
        (b'{"include_usage": false}', b'{"include_usage": true}'),
        (b'{ "x" : 1.0, "include_usage":null }', b'{ "x" : 1.0, "include_usage":true }'),
        (b'{"include_usage":true,"x":1.0}', None),
        (b'{"continuous_usage_stats":true}', None),
        (b'"odd"', None),
        (b"[1]", None),
    ],
    ids=str,
)
async def test_the_clients_own_options_are_kept(options: bytes, expected: bytes | None) -> None:
    body = b'{"stream_options" :%b, "model":"m","stream":true,"messages":[]}'
    async with openai_engine() as engine, gateway(engine.url) as gw:
        if isinstance(json.loads(options), dict | None):
            await gw.post(data=body % options)
        else:
            engine.scripts.append(stream(ROLE, FINISH, DONE))
            await gw.post(data=body % options)

    assert engine.seen[0].body == body % (options if expected is None else expected)


@pytest.mark.parametrize("stream_value", [b"false", b"1", b'"true"', b"null"])
async def test_what_is_not_streamed_is_asked_for_nothing(stream_value: bytes) -> None:
    body = b'{"model":"m","messages":[],"stream":%b}' % stream_value
    async with RawEngine() as engine, gateway(engine.url) as gw:
        await gw.post(data=body)

    assert engine.seen[0].body == body


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("asks", [False, True], ids=["hidden", "asked for"])
async def test_only_the_usage_nobody_asked_for_is_left_out(
    newline: bytes, step: int, asks: bool
) -> None:
    kept = [
        event(id="x", choices=[], prompt_filter_results=[]),
        ROLE,
        content("caf\u00e9", usage=None),
        b": keep-alive\n\n",
        content("[]"),
        FINISH,
        event(usage={"x": 1}),
        event(choices=[], usage=None),
    ]
    told = [*kept, COUNTS.replace(b'"choices":[]', b'"choices" : [ ]'), DONE]
    data = b"".join(told).replace(b"\n", newline)
    pieces = [data[at : at + step] for at in range(0, len(data), step)]
    options = {"stream_options": {"include_usage": True}} if asks else {}
    async with RawEngine(lambda _: stream(*pieces)) as engine, gateway(engine.url) as gw:
        _, body, _ = await gw.post(body=chat(stream=True, **options))
        record = await gw.record()

    expected = data if asks else b"".join([*kept, DONE]).replace(b"\n", newline)
    assert body == expected
    assert (record.prompt_tokens, record.observed_hit_tokens) == (100, 64)
    assert record.completion_tokens == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_of_streams_is_known_without_the_client_asking(path: str) -> None:
    body = chat(stream=True) if "chat" in path else {"model": "m", "prompt": "q", "stream": True}
    async with openai_engine(cached=5) as engine, gateway(engine.url) as gw:
        _, told, _ = await gw.post(path, body)
        record = await gw.record()

    assert (record.prompt_tokens, record.completion_tokens, record.observed_hit_tokens) == (7, 3, 5)
    assert b'"usage"' not in told
    assert told.endswith(DONE)


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("step", [1, 7, 40, 90, 1000])
def test_usage_is_left_out_wherever_it_stands_and_however_it_comes(at: int, step: int) -> None:
    wanted = [ROLE, content("a"), content("b"), FINISH, DONE]
    data = b"".join([*wanted[:at], COUNTS, *wanted[at:]])
    observer = StreamObserver(strips_usage=True)

    passed = [observer.feed(data[i : i + step]) for i in range(0, len(data), step)]

    assert b"".join(passed) + observer.rest() == b"".join(wanted)


@pytest.mark.parametrize("step", [1, 40, 1000])
def test_what_counts_no_prompt_is_no_usage_beside_one_either(step: int) -> None:
    other = event(choices=[], usage={"completion_tokens": 2})
    data = ROLE + other + COUNTS + DONE
    observer = StreamObserver(strips_usage=True)

    passed = [observer.feed(data[i : i + step]) for i in range(0, len(data), step)]

    assert b"".join(passed) == ROLE + other + DONE


def test_an_error_with_usage_and_no_choices_is_kept() -> None:
    observer = StreamObserver(strips_usage=True)
    error = event(choices=[], usage=usage(1, 1), error={"message": "boom"})

    assert observer.feed(error) == error


def test_a_last_event_that_was_never_ended_is_left_out_too() -> None:
    observer = StreamObserver(strips_usage=True)
    passed = observer.feed(FINISH + COUNTS.rstrip(b"\n"))

    assert passed + observer.rest() == FINISH
    end = observer.end()
    assert end.is_complete
    assert end.usage is not None


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=6), _values, min_size=1, max_size=5),
    st.sampled_from([None, 1, "\t"]),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_putting_members_in_changes_no_other_byte(
    document: dict[str, Any], indent: Any, escaped: bool
) -> None:
    document.pop("added", None)
    body = (json.dumps(document or {"a": 1}, indent=indent, ensure_ascii=escaped) + "\n").encode(
        "utf-8", "surrogatepass"
    )
    given_document = json.loads(body)
    put = put_in(body, given_document, {"added": b"[1.0]"}, ())
    at = put.rindex(b',"added":[1.0]')

    assert put[:at] + put[at + len(b',"added":[1.0]') :] == body
    assert json.loads(put) == given_document | {"added": [1.0]}


async def test_what_a_stream_brought_is_counted_where_nobody_tells() -> None:
    pieces = [content("a"), content("b"), content("c")]
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append(stream(*pieces, FINISH, DONE))
        await gw.post(body=chat(stream=True))
        silent = await gw.record()
        engine.scripts.append(stream(*pieces, End.HANG))
        async with gw.session.post(gw.url + CHAT, json=chat(stream=True)) as response:
            await response.content.readuntil(pieces[2])
        await poll_until(lambda: len(gw.records) == 2, what="the client has left")

    assert silent.completion_tokens is None
    assert silent.counted_tokens in (4, 5)  # the end marker is shorter than the others
    assert (gw.records[1].outcome, gw.records[1].counted_tokens) == ("client_closed", 3)
