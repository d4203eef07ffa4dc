"""Whatever workers do: one honest answer, few retries, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from structlog.testing import capture_logs

from gateway.fleet.watch import Watch
from gateway.proxy.deadline import HEADER
from gateway.proxy.limits import Limits
from gateway.proxy.retry import MAX_SAVED, retry_after_s
from gateway.routing.health import Breaker
from gateway.routing.metrics import DispatchCollector
from gateway.routing.pool import Retry
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
from tests.fakes.gateway import chat, gateway
from tests.fakes.gateway import worker as make_worker
from tests.support import free_port, poll_until

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from tests.fakes.engine import Seen
    from tests.fakes.gateway import Gateway

TEXT = content("some text")
CHAT, TEXTS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
LOADING = b'{"error":{"message":"the engine is loading"}}'
NO_ROOM = b'{"error":{"message":"slow down","type":"rate_limit_error","x":[1.0,"\\u00fc"]}}'


def good(seen: Seen) -> Script:
    """Whole answers that every API takes."""
    if seen.json().get("stream"):
        return stream(ROLE, TEXT, FINISH, DONE)
    return answer(b'{"choices":[{"finish_reason":"stop"}],"data":[]}')


# What a worker does to a request, by name.
BEHAVIOURS: dict[str, Callable[[Seen], Script]] = {
    "fin": lambda _: [End.FIN],
    "rst": lambda _: [End.RST],
    "half a head": lambda _: [b"HTTP/1.1 200 O", End.FIN],
    "hang": lambda _: [End.HANG],
    "slow": lambda seen: [0.05, *good(seen)],
    "garbage": lambda _: [b"\x16\x03\x01\x00garbage\r\n\r\n"],
    "500": lambda _: answer(b'{"error":{}}', 500),
    "503": lambda _: answer(LOADING, 503),
    "503 later": lambda _: answer(LOADING, 503, "retry-after: 1"),
    "429": lambda _: answer(NO_ROOM, 429),
    "429 later": lambda _: answer(NO_ROOM, 429, "retry-after: 1"),
    "400": lambda _: answer(b'{"error":{}}', 400),
    "cut body": lambda _: [
        head(200, "content-type: application/json", "content-length: 99") + b"{",
        End.RST,
    ],
    "cut stream": lambda _: stream(ROLE, TEXT, 0.01, End.FIN, end=None),
    "hang in stream": lambda _: stream(ROLE, TEXT, End.HANG),
    "error event": lambda _: stream(ROLE, b'data: {"error":{"message":"oom"}}\n\n', DONE),
    "closes": lambda seen: [*good(seen), End.FIN],
}
# Nothing of an answer has been sent then, so another worker may be asked.
MOVABLE = {"fin", "rst", "half a head", "503", "503 later", "429 later"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, chat()),
    "chat stream": (CHAT, chat(stream=True)),
    "text": (TEXTS, {"model": "m", "prompt": [1, 2, 3]}),
    "text stream": (TEXTS, {"model": "m", "prompt": "q", "stream": True}),
    "embeddings": (EMBEDDINGS, {"model": "m", "input": ["a"]}),
}


async def is_at_rest(gw: Gateway) -> None:
    """Nothing in flight, no connection to a worker but idle ones, one account per request."""
    await poll_until(lambda: gw.num_in_flight == 0, what="nothing in flight")
    await poll_until(lambda: gw.lifecycle.num_running == 0, what="nothing runs")
    assert not gw.dispatcher.gate.lines
    for pool in gw.pools:
        assert not pool.pending
        assert not pool.pending_texts
        for each in pool.workers.values():
            assert each.upstream is not None
            assert each.upstream.num_connections == each.upstream.num_idle


def num_tasks() -> int:
    return len(asyncio.all_tasks())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
async def test_each_fault_of_each_kind_of_request_is_answered_once_and_leaves_nothing(
    behaviour: str, kind: str
) -> None:
    path, body = KINDS[kind]
    async with (
        RawEngine(BEHAVIOURS[behaviour]) as bad,
        RawEngine(good) as well,
        gateway(bad.url) as alone,
        gateway(bad.url, well.url) as beside,
        asyncio.timeout(20),
    ):
        for gw in (alone, beside):
            before = num_tasks()
            headers = {HEADER: "0.2"} if "hang" in behaviour else {}
            status, got, _ = await gw.post(path, body, headers=headers)
            await is_at_rest(gw)
            assert len(gw.records) == 1
            record = gw.records[0]
            assert record.status == status
            if status == 200 and record.outcome != "ok":
                assert b'"error"' in got
            if record.outcome == "ok":
                assert status == 200
                assert not body.get("stream") or got.endswith(DONE) or "stream" in behaviour
            assert record.attempts <= (2 if behaviour in MOVABLE else 1)
            if gw is beside and behaviour in MOVABLE:
                assert (status, record.outcome, record.worker) == (200, "ok", "w1") or (
                    record.attempts == 1
                )
            await poll_until(lambda n=before: num_tasks() <= n + 8, what="no task is left")
        assert bad.seen


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.lists(st.sampled_from(sorted(BEHAVIOURS)), min_size=1, max_size=6),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=24),
)
def test_any_mixture_of_faults_at_once_leaves_nothing_and_repeats_little(
    workers: list[list[str]], kinds: list[str]
) -> None:
    async def run() -> None:
        engines = []
        for names in workers:
            engine = RawEngine(lambda seen: good(seen))
            await engine.__aenter__()
            engine.scripts.extend(
                [_Late(BEHAVIOURS[name], kinds[0]) for name in names for _ in range(3)]
            )
            engines.append(engine)
        async with gateway(*(engine.url for engine in engines)) as gw, asyncio.timeout(30):
            posts = (gw.post(*KINDS[kind], headers={HEADER: "0.3"}) for kind in kinds)
            answers = await asyncio.gather(*posts)
            await is_at_rest(gw)
            assert len(gw.records) == len(kinds)
            attempts = sum(record.attempts for record in gw.records)
            assert all(status in (200, 400, 429, 500, 502, 503, 504) for status, _, _ in answers)
            # A reused connection that the worker closed meanwhile may cost one repetition more.
            reused = sum(engine.num_connections for engine in engines)
            assert sum(len(engine.seen) for engine in engines) <= attempts + reused
            assert attempts <= 1.2 * len(kinds) + MAX_SAVED / 2 + 1
        for engine in engines:
            await engine.stop()

    asyncio.run(run())


class _Late(list[Any]):
    """A script that is made when it is played: of a request that is not known before."""

    def __init__(self, behaviour: Callable[[Seen], Script], kind: str) -> None:
        _, body = KINDS[kind]
        seen = type("Asked", (), {"json": staticmethod(lambda: body)})()
        super().__init__(behaviour(seen))


# Retries


@pytest.mark.parametrize("behaviour", sorted(MOVABLE))
async def test_retries_are_a_fifth_of_the_requests_when_all_workers_fail(behaviour: str) -> None:
    num_requests = 150
    async with (
        RawEngine(BEHAVIOURS[behaviour]) as engine,
        gateway(*[engine.url] * 4) as gw,
        asyncio.timeout(30),
    ):
        began_s = time.monotonic()
        answers = [await gw.post(body=chat(str(i))) for i in range(num_requests)]
        elapsed_s = time.monotonic() - began_s
        attempts = sum(record.attempts for record in gw.records)
        refused = gw.pools[0].num_retries_refused

    # Ten were saved up by a quiet time, and one a second may be made whatever comes.
    assert attempts <= 1.2 * num_requests + MAX_SAVED / 2 + elapsed_s + 1
    assert len(engine.seen) == attempts
    assert all(status >= 429 for status, _, _ in answers)
    if behaviour in ("fin", "rst", "503"):
        assert refused > num_requests / 2


async def test_another_budget_holds_from_the_next_request_on() -> None:
    async with RawEngine(BEHAVIOURS["fin"]) as engine, gateway(engine.url, engine.url) as gw:
        attempts = []
        for budget in (0.2, 0.0, 0.2):
            gw.pools[0].retry = Retry(budget, 2)
            await gw.post()
            attempts.append(gw.records[-1].attempts)

    assert attempts == [2, 1, 2]


async def test_a_worker_that_failed_is_not_asked_again_by_the_same_request() -> None:
    async with RawEngine(BEHAVIOURS["fin"]) as engine:
        limits = Limits(attempts=6)
        async with gateway(*[engine.url] * 3, limits=limits) as gw:
            await gw.post()
            record = await gw.record()
            tried = [w.health.failures for w in gw.pools[0].workers.values()]

    assert (record.attempts, tried) == (3, [1, 1, 1])


# What busy workers ask for


@pytest.mark.parametrize(
    ("lines", "expected_s"),
    [
        (["retry-after: 7"], 7.0),
        (["Retry-After:  7 "], 7.0),
        (["retry-after: 0.5"], 0.5),
        (["retry-after: 7", "retry-after-ms: 250"], 0.25),
        (["retry-after: Fri, 31 Dec 1999 23:59:59 GMT"], None),
        (
            ["date: Fri, 31 Dec 1999 23:59:49 GMT", "retry-after: Fri, 31 Dec 1999 23:59:59 GMT"],
            10.0,
        ),
        (
            ["date: Fri, 31 Dec 1999 23:59:59 GMT", "retry-after: Fri, 31 Dec 1999 23:59:49 GMT"],
            None,
        ),
        (["retry-after: 0"], None),
        (["retry-after: -3"], None),
        (["retry-after: soon"], None),
        (["retry-after: 9999999999999999999999"], None),
        (["retry-after: \xff"], None),
        (["x: y"], None),
    ],
)
def test_retry_after_is_read_in_all_its_forms(lines: list[str], expected_s: float | None) -> None:
    pairs = [line.encode("latin-1").split(b":", 1) for line in lines]

    assert retry_after_s([(name, value) for name, value in pairs]) == expected_s


@given(st.lists(st.tuples(st.sampled_from([b"retry-after", b"date"]), st.binary(max_size=40))))
def test_no_retry_after_is_too_odd(headers: list[tuple[bytes, bytes]]) -> None:
    wait_s = retry_after_s(headers)

    assert wait_s is None or wait_s > 0.0


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("status", [429, 503])
async def test_who_asks_for_time_is_left_alone_and_the_request_moves(
    status: int, is_stream: bool
) -> None:
    async with (
        RawEngine(lambda _: answer(NO_ROOM, status, "retry-after: 20")) as busy,
        RawEngine(good) as free,
        gateway(busy.url, free.url) as gw,
    ):
        for i in range(8):
            assert (await gw.post(body=chat(str(i), stream=is_stream)))[0] == 200
        health = gw.pools[0].workers["w0"].health
        now_s = time.monotonic()
        state, bias = health.breaker(now_s), health.bias(now_s)

    # One request found out; the next ones went elsewhere at once.
    assert len(busy.seen) == 1
    assert state is (Breaker.OPEN if status == 503 else Breaker.CLOSED)
    assert bias > 2.0
    assert [record.attempts for record in gw.records].count(2) == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_passes_untouched_when_there_is_nobody_else(status: int) -> None:
    async with (
        RawEngine(lambda _: answer(NO_ROOM, status, "retry-after: 20", "x-own: 1")) as busy,
        gateway(busy.url) as gw,
    ):
        for _ in range(2):
            got, body, response = await gw.post()
            assert (got, body) == (status, NO_ROOM)
            assert (response.headers["retry-after"], response.headers["x-own"]) == ("20", "1")
        attempts = [record.attempts for record in gw.records]

    assert (attempts, len(busy.seen)) == ([1, 1], 2)


@pytest.mark.parametrize("status", [429, 503])
async def test_overload_everywhere_is_told_and_not_handed_round(status: int) -> None:
    async with (
        RawEngine(lambda _: answer(NO_ROOM, status, "retry-after: 20")) as busy,
        gateway(*[busy.url] * 3) as gw,
    ):
        for i in range(12):
            got, body, _ = await gw.post(body=chat(str(i)))
            assert (got, body) == (status, NO_ROOM)
        attempts = Counter(record.attempts for record in gw.records)

    if status == 503:
        # Each of the three asked for time; from then on nobody is asked twice for one request.
        assert attempts[2] <= 2
    assert len(busy.seen) <= 1.2 * 12 + MAX_SAVED / 2 + 2


async def test_a_429_without_a_time_is_its_clients_own_matter() -> None:
    async with (
        RawEngine(lambda _: answer(NO_ROOM, 429)) as busy,
        gateway(busy.url, busy.url) as gw,
    ):
        status, body, _ = await gw.post()
        record = await gw.record()
        biases = [w.health.bias(time.monotonic()) for w in gw.pools[0].workers.values()]

    assert (status, body, record.attempts) == (429, NO_ROOM, 1)
    assert biases == [1.0, 1.0]


# Probes of the gateway's own


async def test_no_clients_request_is_risked_on_a_worker_whose_check_fails() -> None:
    is_well = False

    def respond(seen: Seen) -> Script:
        if seen.method == "GET":
            return answer(b"", 200 if is_well else 503)
        return good(seen) if is_well else [End.FIN]

    async with (
        RawEngine(respond) as ill,
        RawEngine(good) as free,
        gateway(ill.url, free.url) as gw,
    ):
        worker = gw.pools[0].workers["w0"]
        assert worker.upstream is not None

        async def nothing(_: object) -> None: ...

        watch = Watch("w0", [worker], worker.upstream, on_epoch=lambda: None, on_alive=nothing)
        worker.health.check_succeeded(time.monotonic())
        for _ in range(3):
            worker.health.failed(time.monotonic())
        watching = asyncio.create_task(watch.run())
        # Longer than the first pause: without checks a request would be tried now.
        end_s = time.monotonic() + 1.5
        i = 0
        while time.monotonic() < end_s:
            i += 1
            assert (await gw.post(body=chat(str(i))))[0] == 200
            await asyncio.sleep(0.02)
        assert [seen.method for seen in ill.seen if seen.method == "POST"] == []
        is_well = True
        await poll_until(lambda: worker.health.breaker(time.monotonic()) is Breaker.HALF_OPEN)
        gw.pools[0].drain("w1")
        assert (await gw.post())[0] == 200
        assert worker.health.breaker(time.monotonic()) is Breaker.CLOSED
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    assert {record.outcome for record in gw.records} == {"ok"}


@pytest.mark.parametrize("fault", ["nobody there", "an error"])
async def test_a_worker_that_is_not_ready_is_logged_with_address_and_reason(fault: str) -> None:
    is_well = False

    def respond(_: Seen) -> Script:
        return answer(b"", 200 if is_well else 503)

    async with RawEngine(respond) as engine:
        url = engine.url if fault == "an error" else f"http://127.0.0.1:{free_port()}"
        worker = make_worker("w0", url)
        assert worker.upstream is not None

        async def nothing(_: object) -> None: ...

        watch = Watch("w0", [worker], worker.upstream, on_epoch=lambda: None, on_alive=nothing)
        with capture_logs() as lines:
            watching = asyncio.create_task(watch.run())
            await poll_until(lambda: bool(lines))
            is_well = True
            if fault == "an error":
                await poll_until(lambda: len(lines) > 1)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    expected = "/health answered 503" if fault == "an error" else url.removeprefix("http://")
    assert (lines[0]["log_level"], lines[0]["url"]) == ("warning", url)
    assert expected in lines[0]["reason"]
    again = [line["log_level"] for line in lines[1:] if line["event"] == "worker_ready"]
    assert again == ["info"] * (fault == "an error")


# Drain

NUM_STREAMS = 150
# What asyncio's servers let wait to be accepted is 100.
NUM_AT_ONCE = 50


async def begin_streams(
    gw: Gateway, engine: RawEngine, num_streams: int
) -> list[asyncio.Task[tuple[int, bytes, aiohttp.ClientResponse]]]:
    """Have so many streams under way."""
    begun = []
    for i in range(num_streams):
        begun.append(asyncio.create_task(gw.post(body=chat(str(i), stream=True))))
        if len(begun) % NUM_AT_ONCE == 0:
            await poll_until(lambda: len(engine.seen) == len(begun))
    return begun


async def test_a_drained_worker_ends_all_its_streams_and_gets_nothing_new() -> None:
    go_on = asyncio.Event()
    async with (
        RawEngine(lambda _: stream(ROLE, TEXT, go_on, FINISH, DONE)) as old,
        RawEngine(good) as new,
        gateway(old.url) as gw,
        asyncio.timeout(60),
    ):
        begun = await begin_streams(gw, old, NUM_STREAMS)
        gw.pools[0].add(make_worker("w1", new.url))
        gw.pools[0].drain("w0")
        for i in range(20):
            assert (await gw.post(body=chat(f"new {i}")))[0] == 200
        assert len(old.seen) == NUM_STREAMS
        assert gw.pools[0].workers["w0"].books.in_flight == NUM_STREAMS
        go_on.set()
        answers = await asyncio.gather(*begun)
        gw.pools[0].workers["w1"].upstream.close()  # type: ignore[union-attr]

    assert len(new.seen) == 20
    assert all((status, body[-len(DONE) :]) == (200, DONE) for status, body, _ in answers)


@pytest.mark.parametrize("is_over", [False, True], ids=["all end", "time is over"])
async def test_a_draining_gateway_lets_all_streams_end_and_leaves_nothing(is_over: bool) -> None:
    go_on = asyncio.Event()
    async with (
        RawEngine(lambda _: stream(ROLE, TEXT, go_on, FINISH, DONE)) as engine,
        gateway(engine.url) as gw,
        asyncio.timeout(60),
    ):
        begun = await begin_streams(gw, engine, NUM_STREAMS)
        stopping = asyncio.create_task(gw.listener.stop(1.0 if is_over else 30.0))
        await poll_until(lambda: gw.lifecycle.draining)
        status, body, response = await gw.post()
        assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
        assert response.headers["connection"] == "close"
        if not is_over:
            assert not stopping.done()
            go_on.set()
        answers = await asyncio.gather(*begun)
        await stopping
        await is_at_rest(gw)
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", gw.port)
        outcomes = Counter(record.outcome for record in gw.records)

    if is_over:
        assert all(b'"code":"shutting_down"' in body for _, body, _ in answers)
        assert outcomes["cancelled"] == NUM_STREAMS
    else:
        assert all(body.endswith(DONE) for _, body, _ in answers)
        assert outcomes["ok"] == NUM_STREAMS


# Metrics


async def test_metrics_tell_who_is_out_who_is_dear_and_what_was_not_tried_again() -> None:
    async with openai_engine() as engine:
        dead = f"http://127.0.0.1:{free_port()}"
        async with gateway(dead, engine.url, limits=Limits(retry_ratio=0.0)) as gw:
            for i in range(12):
                await gw.post(body=chat(str(i)))
            registry = CollectorRegistry()
            registry.register(DispatchCollector(gw.dispatcher))
            text = generate_latest(registry).decode()
            num_failed = sum(record.status == 502 for record in gw.records)

    assert num_failed
    assert f'warmlane_retries_refused_total{{pool="chat"}} {float(num_failed)}' in text
    assert 'warmlane_worker_bias{pool="chat",worker="w1"} 1.0' in text
    is_out = float(num_failed >= 3)
    assert f'warmlane_worker_ejections_total{{pool="chat",worker="w0"}} {is_out}' in text
    assert f'warmlane_worker_ejected{{pool="chat",worker="w0"}} {is_out}' in text
