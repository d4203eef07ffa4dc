"""The standing check of tokens: equal, diverged, unknown, and what each does to routing."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import zmq.asyncio
from structlog.testing import capture_logs

from gateway.config import Settings
from gateway.fleet import worker_tokens
from gateway.fleet.feed import Feed
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import FleetCollector
from gateway.fleet.parity import CHECK_AGAIN_S, CHECK_EVERY_S, ParityCheck
from gateway.fleet.probes import PROBES
from gateway.routing.dispatch import Dispatcher, Outcome, Usage
from gateway.routing.pool import Pool, Worker
from gateway.telemetry.requests import Telemetry
from gateway.upstream.client import Upstream
from prefix_index.events import BlockStored, EventBatch
from prefix_index.index import Index
from tests.fakes.engine import End, RawEngine, Script, Seen, answer
from tests.gateway.miss_parts import TEMPLATE, reader
from tests.gateway.routing_parts import BLOCK, Clock, chat
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from prefix_index.prompts import PromptReader
    from tests.live_runner import LiveRunner

OTHER_TEMPLATE = TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n\n")


CONNECTIONS: list[Upstream] = []


@asynccontextmanager
async def serving(engine: RawEngine) -> AsyncIterator[RawEngine]:
    """Run an engine; the connections to it are closed before it stops."""
    async with engine:
        try:
            yield engine
        finally:
            while CONNECTIONS:
                CONNECTIONS.pop().close()


class Tokenizing:
    """An engine that renders with its own template, which a test may exchange."""

    def __init__(self, template: str = TEMPLATE, path: str = "/tokenize") -> None:
        self.reader: PromptReader = reader(template)
        self.path = path
        self.engine = RawEngine(self.respond)

    def respond(self, seen: Seen) -> Script:
        if seen.target != self.path:
            return answer(b"", 404)
        body = seen.json()
        prompt = body.get("prompt")
        draft = self.reader.chat(body) if prompt is None else self.reader.completion(prompt)
        ids = list(draft.complete().token_ids)
        return answer(json.dumps({"count": len(ids), "tokens": ids}).encode())


def make_check(url: str, engine: str = "vllm", **options: Any) -> tuple[ParityCheck, Clock]:
    clock = Clock()
    worker = Worker("w0", url, upstream=Upstream(url, connect_timeout_s=30.0))
    pool = Pool(
        "chat", models=["m"], engine=engine, reader=reader(), index=Index(BLOCK), workers=[worker]
    )
    assert worker.upstream is not None
    CONNECTIONS.append(worker.upstream)
    options = {"resume": lambda: None, **options}
    return ParityCheck(pool, worker, worker.upstream, clock=clock, **options), clock


def worker_of(check: ParityCheck) -> Worker:
    return check._worker


async def test_equal_tokens_are_equal() -> None:
    fake = Tokenizing()
    async with serving(fake.engine) as engine:
        check, _ = make_check(engine.url)

        assert check.value == -1
        assert await check.check() == 1
        assert check.value == 1
        assert len(engine.seen) == len(PROBES)
        assert all(seen.json()["model"] == "m" for seen in engine.seen)
        assert worker_of(check).mode == "approximate"


async def test_sglang_is_asked_at_its_own_path_and_never_for_a_second_bos() -> None:
    fake = Tokenizing(path="/v1/tokenize")
    async with serving(fake.engine) as engine:
        check, _ = make_check(engine.url, engine="sglang")

        assert await check.check() == 1
        flags = {"messages" in s.json(): s.json()["add_special_tokens"] for s in engine.seen}
        assert flags == {True: False, False: True}


async def test_an_endpoint_that_knows_no_chat_leaves_it_unknown() -> None:
    """SGLang before chat bodies: a prompt's equal tokens say nothing about the template."""
    fake = Tokenizing(path="/v1/tokenize")

    def respond(seen: Seen) -> Script:
        return answer(b"{}", 422) if "messages" in seen.json() else fake.respond(seen)

    async with serving(RawEngine(respond)) as engine:
        check, _ = make_check(engine.url, engine="sglang")

        assert await check.check() == -1


async def test_a_generic_engine_is_never_asked() -> None:
    async with serving(RawEngine()) as engine:
        check, _ = make_check(engine.url, engine="openai")

        assert not check.is_due
        assert await check.check() == -1
        assert engine.seen == []


async def test_another_template_diverges_in_one_clear_line_and_routes_by_text() -> None:
    fake = Tokenizing(OTHER_TEMPLATE)
    async with serving(fake.engine) as engine:
        check, clock = make_check(engine.url)
        with capture_logs() as lines:
            assert await check.check() == 0
            clock.now_s += CHECK_EVERY_S
            assert await check.check() == 0

    # The template's own text: everything before the place is equal, and one line feed is new.
    expected = list(reader().chat(PROBES["chat"]).complete().token_ids)
    (line,) = lines
    assert line["event"] == "parity_diverged"
    assert (line["worker"], line["probe"]) == ("w0", "chat")
    assert line["position"] == len(expected)
    assert line["our_token"] is None
    assert line["their_token"] == expected[-1]
    assert line["their_tokens"] == line["our_tokens"] + 1
    assert line["text"].endswith("<|im_start|>assistant\n>>>")
    assert "routed by text" in line["effect"]
    worker = worker_of(check)
    assert worker.mode == "text"
    assert not check._pool.is_readable(worker)
    assert check.value == 0


async def test_a_difference_in_the_middle_is_shown_with_the_text_around_it() -> None:
    fake = Tokenizing(TEMPLATE.replace("{{ m.role }}\n", "{{ m.role }}: "))
    async with serving(fake.engine) as engine:
        check, _ = make_check(engine.url)
        with capture_logs() as lines:
            await check.check()

    (line,) = lines
    # One token per byte: the mark stands exactly where the texts part.
    before, after = line["text"].split(">>>")
    assert before.endswith("<|im_start|>system")
    assert after.startswith("\nAnswer from the handbook.")


async def test_a_diverged_worker_is_believed_again_once_a_check_passes() -> None:
    fake = Tokenizing(OTHER_TEMPLATE)
    resumed: list[bool] = []
    async with serving(fake.engine) as engine:
        check, clock = make_check(engine.url, resume=lambda: resumed.append(True))
        await check.check()
        routes = Dispatcher([check._pool], clock=clock, seed=0)
        plan = await routes.plan(check._pool, chat("Tell me all about block hashes. " * 8))
        ticket = routes.admit(plan, routes.choose(plan))
        assert ticket.decision.mode == "text"
        # Equal counts in live answers do not lift what the probes found.
        ticket.finish(Outcome.OK, Usage(plan.num_tokens, 1, 0))
        assert worker_of(check).mode == "text"
        assert check.value == 0
        fake.reader = reader()
        with capture_logs() as lines:
            assert await check.check() == 1

    assert [line["event"] for line in lines] == ["parity_restored"]
    assert resumed == [True]
    assert worker_of(check).mode == "approximate"
    assert check.value == 1


SAYS_NOTHING: dict[str, Callable[[Seen], Script]] = {
    "404": lambda _: answer(b'{"detail":"Not Found"}', 404),
    "500": lambda _: answer(b"", 500),
    "400": lambda _: answer(b'{"error":{"message":"no"}}', 400),
    "no JSON": lambda _: answer(b"<html>tokens</html>"),
    "cut JSON": lambda _: answer(b'{"tokens":[1,2'),
    "a list": lambda _: answer(b"[1,2,3]"),
    "no tokens": lambda _: answer(b'{"count":3}'),
    "empty tokens": lambda _: answer(b'{"tokens":[]}'),
    "tokens of text": lambda _: answer(b'{"tokens":["a","b"]}'),
    "tokens of booleans": lambda _: answer(b'{"tokens":[true,false]}'),
    "negative tokens": lambda _: answer(b'{"tokens":[1,-2]}'),
    "tokens as an object": lambda _: answer(b'{"tokens":{"0":1}}'),
    "a reset": lambda _: [End.RST],
    "a closed connection": lambda _: [End.FIN],
    "silence": lambda _: [End.HANG],
    "half an answer": lambda _: [b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", End.HANG],
    "not HTTP": lambda _: [b"hello\r\n\r\n", End.FIN],
}


@pytest.mark.parametrize("respond", SAYS_NOTHING.values(), ids=SAYS_NOTHING)
async def test_a_worker_that_does_not_tell_is_unknown_never_diverged(
    respond: Callable[[Seen], Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_tokens, "DEADLINE_S", 0.2)
    monkeypatch.setattr("gateway.fleet.parity.PROBES", {"chat": PROBES["chat"]})
    async with serving(RawEngine(respond)) as engine:
        check, clock = make_check(engine.url)
        with capture_logs() as lines:
            assert await check.check() == -1

        assert (check.value, worker_of(check).mode, lines) == (-1, "approximate", [])
        assert not check.is_due
        clock.now_s += CHECK_AGAIN_S
        assert check.is_due


async def test_silence_after_a_divergence_lifts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Tokenizing(OTHER_TEMPLATE)
    async with serving(fake.engine) as engine:
        check, _ = make_check(engine.url)
        await check.check()
    assert await check.check() == -1

    assert check.value == 0
    assert worker_of(check).mode == "text"


async def test_a_worker_that_is_away_is_unknown() -> None:
    check, _ = make_check("http://127.0.0.1:1")

    assert await check.check() == -1


async def test_probes_that_the_model_cannot_render_are_left_out() -> None:
    template = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + TEMPLATE
    fake = Tokenizing(template)
    async with serving(fake.engine) as engine:
        check, _ = make_check(engine.url)
        check._pool.reader = reader(template)

        assert await check.check() == 1
        assert not any("tools" in seen.json() for seen in engine.seen)


async def test_checks_come_every_five_minutes_and_soon_after_a_live_count_differs() -> None:
    fake = Tokenizing()
    async with serving(fake.engine) as engine:
        check, clock = make_check(engine.url)
        assert check.is_due
        await check.check()
        clock.now_s += CHECK_EVERY_S - 1.0
        assert not check.is_due
        clock.now_s += 1.0
        assert check.is_due
        await check.check()
        routes = Dispatcher([check._pool], clock=clock, seed=0, on_finish=check.finished)
        plan = await routes.plan(check._pool, chat("How long may I wait?"))
        ticket = routes.admit(plan, routes.choose(plan))
        ticket.finish(Outcome.OK, Usage(plan.num_tokens + 1, 1, 0))
        assert not check.is_due
        clock.now_s += CHECK_AGAIN_S
        assert check.is_due
        check.restarted()
        assert check.is_due


@pytest.mark.parametrize("log_prompts", [False, True])
async def test_a_live_body_that_differs_is_told_without_its_text(log_prompts: bool) -> None:
    """The worker prints a system text of its own unless there is one: no probe shows all bodies."""
    template = TEMPLATE.replace("{{ m.content }}", "{{ m.content | replace('secret', 's3cret') }}")
    fake = Tokenizing(template)
    async with serving(fake.engine) as engine:
        check, clock = make_check(engine.url, log_prompts=log_prompts)
        routes = Dispatcher([check._pool], clock=clock, seed=0, on_finish=check.finished)
        plan = await routes.plan(check._pool, chat("My secret is 42."))
        ticket = routes.admit(plan, routes.choose(plan))
        ticket.finish(Outcome.OK, Usage(plan.num_tokens, 1, 0))
        with capture_logs() as lines:
            assert await check.check() == 1

    (line,) = lines
    assert (line["event"], line["probe"]) == ("parity_diverged", "live")
    assert ("ecret is" in json.dumps(line)) is log_prompts
    assert check.value == 0
    # One odd body does not change how all others are routed.
    assert worker_of(check).mode == "approximate"


async def test_events_of_a_diverged_worker_are_not_believed_until_it_is_resumed() -> None:
    worker = Worker("w0", "http://h:1", mode="text")
    index = Index(BLOCK)
    pool = Pool("chat", models=["m"], reader=reader(), index=index, workers=[worker])
    context = zmq.asyncio.Context()
    try:
        feed = Feed(pool, worker, index, events="tcp://127.0.0.1:1", replay=None, context=context)
        stored = BlockStored(
            block_hashes=[1], parent_block_hash=None, token_ids=list(range(BLOCK)), block_size=BLOCK
        )
        batch = EventBatch(ts=0.0, events=[stored])
        feed._apply(0, batch)
        assert (worker.mode, index.num_blocks) == ("text", 0)
        assert worker.last_event_s is not None
        feed.resume()
        assert worker.mode == "exact"
        feed._apply(0, batch)
        assert index.num_blocks == 1
    finally:
        context.destroy(linger=0)


async def test_the_fleet_checks_a_runner_at_registration(live_runner: LiveRunner) -> None:
    settings = Settings.model_validate(
        {
            "pools": [
                {
                    "name": "chat",
                    "models": ["smollm2"],
                    "engine": "runner",
                    "workers": [{"id": "w0", "url": live_runner.url}],
                }
            ]
        }
    )
    fleet = Fleet(settings)
    telemetry = Telemetry()
    telemetry.register(FleetCollector(fleet, telemetry, lambda: 0.0))
    await fleet.start()
    try:
        await poll_until(lambda: fleet.parities["w0"].result != -1, what="a verdict")

        assert fleet.parities["w0"].divergence is None
        assert fleet.parity_of(fleet.pools[0].workers["w0"]) == 1
        line = 'warmlane_worker_parity{pool="chat",worker="w0"} 1.0'
        assert line in telemetry.render().decode()
    finally:
        await fleet.stop()
