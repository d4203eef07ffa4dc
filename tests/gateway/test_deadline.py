"""The client's own time: ``x-request-timeout`` from the first byte of a request to its last."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import DeadlineExceeded, InvalidRequest
from gateway.proxy.deadline import HEADER, deadline_of, line_of
from gateway.proxy.limits import Limits
from tests.fakes.engine import (
    DONE,
    FINISH,
    ROLE,
    End,
    RawEngine,
    Script,
    answer,
    content,
    head,
    openai_engine,
    stream,
)
from tests.fakes.faults import FaultProxy, Faults
from tests.fakes.gateway import RawClient, chat, gateway, wire
from tests.support import poll_until

if TYPE_CHECKING:
    from tests.fakes.engine import Seen

TEXT = content("some text")


def timeout(seconds: str) -> dict[str, str]:
    return {HEADER: seconds}


# What a client may say


@given(st.floats(min_value=0.001, max_value=1e9 - 1))
def test_any_positive_number_of_seconds_is_taken(seconds: float) -> None:
    deadline_s = deadline_of(f"{seconds:.6f}", 100.0, 100.0)

    assert deadline_s == pytest.approx(100.0 + seconds, abs=1e-4, rel=1e-9)


@given(
    st.one_of(
        st.sampled_from(
            ["", "0", "0.0", "-1", "+1", "nan", "inf", "1e3", "1_0", " 1", "1 ", "1,5"]
        ),
        st.sampled_from(["½", "٣", "1" * 10, "1.", ".5", "1.2.3", "10s", "5, 6"]),
        st.text(st.characters(categories=["L", "P", "S", "Z"]), max_size=8),
    )
)
def test_anything_else_is_refused(given_text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        deadline_of(given_text, 0.0, 0.0)

    assert (caught.value.status, caught.value.param) == (400, HEADER)


def test_a_time_that_is_over_before_the_body_is_there_is_a_miss() -> None:
    assert deadline_of("2", 10.0, 11.9) == 12.0
    with pytest.raises(DeadlineExceeded):
        deadline_of("2", 10.0, 12.0)


def test_a_worker_may_go_on_a_little_longer_and_is_never_told_that_nothing_is_left() -> None:
    assert line_of(2.5) == b"x-request-timeout: 3.000\r\n"
    assert line_of(-0.00001) == b"x-request-timeout: 0.500\r\n"


async def test_what_is_no_number_of_seconds_is_a_400_and_reaches_no_worker() -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        status, body, _ = await gw.post(headers=timeout("soon"))

    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (400, "invalid_timeout", HEADER)
    assert not engine.seen


# What workers get to know


async def test_a_worker_gets_what_is_left_and_nothing_if_nothing_was_said() -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        assert (await gw.post(headers=timeout("30")))[0] == 200
        assert (await gw.post(headers={"x-stainless-timeout": "600"}))[0] == 200

    told, untold = (seen.headers for seen in engine.seen)
    assert 25.0 < float(told[HEADER]) <= 30.5
    assert HEADER not in untold
    assert untold["x-stainless-timeout"] == "600"


async def test_a_second_attempt_has_less_time_than_the_first() -> None:
    async with (
        RawEngine(lambda _: [0.2, End.RST]) as broken,
        openai_engine() as engine,
        gateway(broken.url, engine.url) as gw,
    ):
        for i in range(4):
            assert (await gw.post(body=chat(str(i)), headers=timeout("30")))[0] == 200

    by_id = {seen.headers["x-request-id"]: float(seen.headers[HEADER]) for seen in broken.seen}
    moved = [seen for seen in engine.seen if seen.headers["x-request-id"] in by_id]
    assert moved
    for seen in moved:
        assert float(seen.headers[HEADER]) < by_id[seen.headers["x-request-id"]] - 0.15


# Where it may run out

PHASES = [
    pytest.param([End.HANG], id="before the head"),
    pytest.param([head(200, "content-length: 9") + b"x", End.HANG], id="in the body"),
    pytest.param([head(200, f"content-length: {4 << 20}"), b"x" * (2 << 20), End.HANG], id="long"),
]


@pytest.mark.parametrize("script", PHASES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_answer_that_is_not_there_in_time_is_a_504_no_sdk_repeats(
    script: Script, path: str
) -> None:
    is_long = len(script) == 3
    body = chat() if "chat" in path else {"model": "m", "prompt": "q"}
    async with (
        RawEngine(lambda _: script) as engine,
        gateway(engine.url, engine.url, engine.url) as gw,
        asyncio.timeout(10),
    ):
        if is_long:
            client = await RawClient.connect(gw.port)
            data = json.dumps(body).encode()
            await client.send(wire(data, f"{HEADER}: 0.3", path=path))
            status, headers = await client.head()
            assert (status, int(headers["content-length"])) == (200, 4 << 20)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.reader.readexactly(4 << 20)
            await client.close()
        else:
            status, answered, response = await gw.post(path, body, headers=timeout("0.3"))
            error = json.loads(answered)["error"]
            assert (status, error["code"]) == (504, "deadline_exceeded")
            assert error["type"] == "timeout_error"
            assert response.headers["x-should-retry"] == "false"
        await poll_until(lambda: engine.num_aborted == 1)
        record = await gw.record()
        health = [w.health for w in gw.pools[0].workers.values()]

    # One attempt, and nobody's fault.
    assert (record.outcome, record.attempts, len(engine.seen)) == ("deadline", 1, 1)
    assert [h.failures for h in health] == [0, 0, 0]


@pytest.mark.parametrize(
    "begin", [[], [ROLE], [ROLE, TEXT], [ROLE, TEXT, TEXT[:20]]], ids=lambda b: str(len(b))
)
async def test_a_stream_that_does_not_end_in_time_ends_in_an_error_event(
    begin: list[bytes],
) -> None:
    async with (
        RawEngine(lambda _: stream(*begin, End.HANG)) as engine,
        gateway(engine.url) as gw,
        asyncio.timeout(10),
    ):
        status, body, _ = await gw.post(body=chat(stream=True), headers=timeout("0.3"))
        await poll_until(lambda: engine.num_aborted == 1)
        record = await gw.record()
        failures = gw.pools[0].workers["w0"].health.failures

    assert status == 200
    assert b'"code":"deadline_exceeded"' in body
    assert b"[DONE]" not in body
    assert (record.outcome, failures) == ("deadline", 0)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_worker_that_cannot_be_connected_to_takes_no_more_than_the_time(
    is_stream: bool,
) -> None:
    async with (
        openai_engine() as engine,
        FaultProxy(engine.port, Faults(blackhole=True)) as hole,
        gateway(hole.url) as gw,
        asyncio.timeout(10),
    ):
        status, body, _ = await gw.post(body=chat(stream=is_stream), headers=timeout("0.2"))

    assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")


async def test_another_apis_client_gets_its_own_shape_of_it() -> None:
    async with (
        RawEngine(lambda _: [End.HANG]) as engine,
        gateway(engine.url) as gw,
        asyncio.timeout(10),
    ):
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}
        status, got, response = await gw.post("/v1/messages", body, headers=timeout("0.2"))
        record = await gw.record()

    error = json.loads(got)
    assert (status, error["type"], error["error"]["type"]) == (504, "error", "timeout_error")
    assert response.headers["x-should-retry"] == "false"
    assert record.outcome == "deadline"
    assert record.duration_s < 3.0


async def test_an_upload_that_takes_all_the_time_reaches_no_worker() -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        data = json.dumps(chat()).encode()
        client = await RawClient.connect(gw.port)
        whole = wire(data, f"{HEADER}: 0.05")
        await client.send(whole[:-1])
        await asyncio.sleep(0.1)
        await client.send(whole[-1:])
        status, headers = await client.head()
        await client.close()
        record = await gw.record()

    assert (status, headers["x-should-retry"]) == (504, "false")
    assert (record.attempts, engine.seen) == (0, [])


async def test_the_wait_for_a_worker_counts() -> None:
    async with RawEngine(lambda _: [End.HANG]) as engine, gateway(engine.url) as gw:
        gw.pools[0].workers["w0"].capacity_tokens = 1000
        first = asyncio.create_task(gw.post(body=chat("long " * 2000)))
        await poll_until(lambda: len(engine.seen) == 1)
        status, body, response = await gw.post(body=chat("other " * 2000), headers=timeout("0.2"))
        record = await gw.record()
        first.cancel()

    assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
    assert response.headers["x-should-retry"] == "false"
    assert (record.outcome, record.attempts, len(engine.seen)) == ("deadline", 0, 1)
    assert record.queue_s > 0.1


async def test_enough_time_changes_nothing() -> None:
    def respond(_: Seen) -> Script:
        return [0.1, *stream(ROLE, 0.1, TEXT, FINISH, DONE)]

    async with RawEngine(respond) as engine, gateway(engine.url) as gw:
        status, body, _ = await gw.post(body=chat(stream=True), headers=timeout("20"))
        engine.scripts.append([0.1, *answer(b'{"ok":1}')])
        assert (await gw.post(headers=timeout("20")))[:2] == (200, b'{"ok":1}')

    assert (status, body) == (200, ROLE + TEXT + FINISH + DONE)


async def test_the_gateways_own_limit_holds_whatever_a_client_allows() -> None:
    async with (
        RawEngine(lambda _: stream(TEXT, End.HANG)) as engine,
        gateway(engine.url, limits=Limits(request_s=1.5)) as gw,
        asyncio.timeout(10),
    ):
        _, body, _ = await gw.post(body=chat(stream=True), headers=timeout("1000"))
        record = await gw.record()

    assert b"deadline_exceeded" in body
    assert record.outcome == "deadline"
