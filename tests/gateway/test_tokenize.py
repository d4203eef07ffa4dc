"""``POST /tokenize`` on the gateway: our reader's tokens, else a worker's, else 501."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.engine import RawEngine, Script, Seen, answer
from tests.gateway.doctor_parts import CachingEngine, running_gateway

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live_runner import LiveRunner

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why? 🙂"}]
BODIES: dict[str, dict[str, Any]] = {
    "messages": {"messages": MESSAGES},
    "messages without an answer's start": {"messages": MESSAGES, "add_generation_prompt": False},
    "a prompt": {"prompt": "Once upon  a time\n"},
    "a long prompt": {"prompt": "Once upon a time there was. " * 400},
    "an empty prompt": {"prompt": ""},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_the_tokens_are_the_worker_s(
    live_runner: LiveRunner, smollm2_dir: Path, body: dict[str, Any]
) -> None:
    model = live_runner.runner.service.facts.name
    async with running_gateway(
        live_runner.url,
        models=[model],
        aliases={"other": model},
        engine="runner",
        tokenizer=str(smollm2_dir),
    ) as gateway:
        asked = {"model": model, **body}
        async with gateway.session.post(live_runner.url + "/tokenize", json=asked) as response:
            theirs = await response.json()
        status, ours = await gateway.post("/tokenize", asked)
        by_alias = await gateway.post("/tokenize", {**asked, "model": "other"})

    assert status == 200
    assert ours["tokens"] == theirs["tokens"]
    assert ours["count"] == theirs["count"] == len(theirs["tokens"])
    assert ours["max_model_len"] == theirs["max_model_len"]
    assert by_alias == (200, ours)


async def test_an_unknown_model_is_404_in_openai_s_shape() -> None:
    async with RawEngine() as engine, running_gateway(engine.url) as gateway:
        status, body = await gateway.post("/tokenize", {"model": "nope", "prompt": "x"})

    assert (status, body["error"]["code"]) == (404, "model_not_found")


WRONG = {
    "no model": {"prompt": "x"},
    "neither": {"model": "m"},
    "token ids": {"model": "m", "prompt": [1, 2]},
    "messages that are none": {"model": "m", "messages": "hi"},
    "no object": [1],
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
async def test_a_body_that_is_none_is_400(body: Any) -> None:
    async with RawEngine() as engine, running_gateway(engine.url) as gateway:
        status, answered = await gateway.post("/tokenize", body)

    assert (status, answered["error"]["type"]) == (400, "invalid_request_error")


async def test_a_pool_without_a_tokenizer_asks_a_worker_under_the_model_s_own_name() -> None:
    def respond(seen: Seen) -> Script:
        if seen.method == "GET":
            return answer(b"{}")
        assert (seen.target, seen.json()["model"]) == ("/tokenize", "m")
        return answer(b'{"count":2,"max_model_len":9,"tokens":[5,6]}')

    async with (
        RawEngine(respond) as engine,
        running_gateway(engine.url, aliases={"gpt": "m"}) as gateway,
    ):
        answered = await gateway.post("/tokenize", {"model": "gpt", "prompt": "x"})

    assert answered == (200, {"count": 2, "max_model_len": 9, "tokens": [5, 6]})


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_workers_without_the_endpoint_make_it_501(status: int) -> None:
    def respond(seen: Seen) -> Script:
        return answer(b"{}", 200 if seen.method == "GET" else status)

    async with RawEngine(respond) as engine, running_gateway(engine.url) as gateway:
        answered, body = await gateway.post("/tokenize", {"model": "m", "prompt": "x"})

    assert (answered, body["error"]["code"]) == (501, "not_supported")
    assert body["error"]["type"] == "api_error"


async def test_workers_that_are_away_make_it_501() -> None:
    async with running_gateway("http://127.0.0.1:1") as gateway:
        status, _ = await gateway.post("/tokenize", {"model": "m", "prompt": "x"})

    assert status == 501


async def test_what_the_template_refuses_is_the_worker_s_to_answer(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.jinja").write_text("{{ raise_exception('roles must alternate') }}")

    def respond(seen: Seen) -> Script:
        if seen.method == "GET":
            return answer(b"{}")
        return answer(json.dumps({"error": {"message": "roles must alternate"}}).encode(), 400)

    async with (
        RawEngine(respond) as engine,
        running_gateway(
            engine.url,
            engine="vllm",
            tokenizer=str(smollm2_dir),
            template=str(tmp_path / "t.jinja"),
        ) as gateway,
    ):
        status, body = await gateway.post("/tokenize", {"model": "m", "messages": MESSAGES})

    assert (status, body["error"]["message"]) == (400, "roles must alternate")


@pytest.mark.parametrize(
    "field", [{"return_token_strs": True}, {"add_special_tokens": False}], ids=str
)
async def test_special_wishes_are_the_worker_s_to_answer(
    smollm2_dir: Path, field: dict[str, Any]
) -> None:
    def respond(seen: Seen) -> Script:
        if seen.method == "POST" and field.items() <= seen.json().items():
            return answer(b'{"tokens":[7]}')
        return answer(b"{}")

    async with (
        RawEngine(respond) as engine,
        running_gateway(engine.url, engine="vllm", tokenizer=str(smollm2_dir)) as gateway,
    ):
        answered = await gateway.post("/tokenize", {"model": "m", "prompt": "x", **field})

    assert answered == (200, {"tokens": [7]})


async def test_a_worker_that_names_no_length_leaves_it_open(smollm2_dir: Path) -> None:
    fake = CachingEngine()
    async with (
        RawEngine(lambda _: answer(b'{"object":"list","data":[]}')) as engine,
        running_gateway(engine.url, engine="vllm", tokenizer=str(smollm2_dir)) as gateway,
    ):
        fake.reader = gateway.fleet.pools[0].reader
        status, body = await gateway.post("/tokenize", {"model": "m", "prompt": "x y"})

    assert (status, body["max_model_len"]) == (200, None)
    assert body["count"] == len(body["tokens"])
