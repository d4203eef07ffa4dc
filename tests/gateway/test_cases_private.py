"""Keys and prompts, as whole classes: nowhere but with the worker that they are meant for."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway.proxy.asked import Asking
from gateway.telemetry.failures import without_messages
from tests.fakes.engine import RawEngine, Script, Seen, answer, content, stream
from tests.fakes.gateway import RawClient
from tests.gateway.private_parts import events, writing
from tests.gateway.tenancy_parts import CHAT, asking, respond, sent, serving

KEY = "sk-test-CANARY-KEY"
BASIC = base64.b64encode(f"user:{KEY}".encode()).decode()
TENANTS = [{"name": "t1", "key_env": "K1"}]

# D15: wherever clients put keys, by accident or on purpose.
HEADERS: dict[str, dict[str, str]] = {
    "bearer": {"authorization": f"Bearer {KEY}"},
    "a bare key": {"authorization": KEY},
    "another scheme": {"Authorization": f"Token {KEY}"},
    "basic": {"authorization": f"Basic {BASIC}"},
    "anthropic": {"x-api-key": KEY},
    "azure": {"api-key": KEY},
    "google": {"x-goog-api-key": KEY},
    "a proxy's": {"proxy-authorization": f"Bearer {KEY}"},
    "a cookie": {"cookie": f"session={KEY}"},
    "a forwarded one": {"x-forwarded-authorization": f"Bearer {KEY}"},
    "a worker's": {"x-worker-key": KEY},
    "the referer": {"referer": f"http://h/?key={KEY}"},
    "the user agent": {"user-agent": f"client {KEY}"},
    "a session token": {"x-session-token": KEY},
    "baggage": {"baggage": f"key={KEY}"},
    "a broken parent": {"traceparent": f"00-{KEY}"},
    "a broken state": {"tracestate": f"{KEY}"},
    "a tenant": {"x-tenant-id": KEY},
    "a forwarded host": {"x-forwarded-host": KEY},
}
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, asking()),
    "a stream": (CHAT, asking(stream=True)),
    "completions": ("/v1/completions", {"model": "m", "prompt": "q"}),
    "messages": ("/v1/messages", asking(max_tokens=5)),
    "counting": ("/v1/messages/count_tokens", asking()),
    "responses": ("/v1/responses", {"model": "m", "input": "q"}),
    "embeddings": ("/v1/embeddings", {"model": "m", "input": "q"}),
    "rerank": ("/v1/rerank", {"model": "m", "query": "q", "documents": []}),
    "audio": ("/v1/audio/speech", {"model": "m", "input": "q"}),
    "tokens": ("/tokenize", {"model": "m", "prompt": "q"}),
    "no model": (CHAT, asking() | {"model": "none"}),
    "no body": (CHAT, {}),
    "no path": ("/v1/nothing", {}),
    "an admin's": ("/admin/v1/drain", {}),
    "metrics": ("/metrics", {}),
}
QUERIES = [f"?{name}={KEY}" for name in ("api_key", "key", "token", "access_token", "q")]


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K1", "key-t1")
    monkeypatch.setenv("K2", KEY)


def complaining(seen: Seen) -> Script:
    """Refuse every key as OpenAI does: with a part of it in the message."""
    if seen.method == "GET":
        return answer(b"{}")
    message = f"Incorrect API key provided: {KEY}"
    return answer(json.dumps({"error": {"message": message}}).encode(), 401)


async def send_all(gw: Any) -> set[int]:
    """Send a key everywhere; return the statuses."""
    found = set()
    for path, body in PATHS.values():
        for headers in HEADERS.values():
            async with gw.session.post(gw.url + path, json=body, headers=headers) as response:
                await response.read()
                found.add(response.status)
    for query in QUERIES:
        async with gw.session.post(gw.url + CHAT + query, json=asking()) as response:
            found.add(response.status)
        async with gw.session.get(gw.url + "/v1/models" + query) as response:
            found.add(response.status)
    return found


@pytest.mark.parametrize(
    ("tenants", "engine", "statuses"),
    [
        ([], respond, {200, 404}),
        ([], complaining, {401, 404}),
        (TENANTS, respond, {401}),
        ([*TENANTS, {"name": "t2", "key_env": "K2"}], respond, {200, 401}),
    ],
    ids=["the worker's own", "the worker refuses it", "a wrong key", "a right key"],
)
async def test_d15_a_key_is_written_nowhere(
    tenants: list[dict[str, Any]],
    engine: Any,
    statuses: set[int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with (
        RawEngine(engine) as worker,
        writing(tmp_path, capfd, worker, tenants=tenants) as written,
    ):
        found = await send_all(written.gw)
    log = events(written.surfaces["stderr"])

    assert statuses <= found
    assert len([line for line in log if line["event"] == "request_finished"]) > 100
    for text in ("CANARY-KEY", BASIC[8:20]):
        assert written.places_of(text) == []


async def test_d15_heads_that_are_none_are_not_repeated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = [
        f"POST {CHAT}?key={KEY} HTTP/1.1\r\nhost: a\r\nauthorization {KEY}\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nx-api-key: {KEY}\n\r\n\r\n",
        f"GET /{KEY} HTTP/9.9\r\nauthorization: {KEY}\r\n\r\n",
        f"{KEY}\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nauthorization: {KEY}{'x' * (70 << 10)}\r\n\r\n",
    ]
    async with (
        RawEngine(respond) as worker,
        writing(tmp_path, capfd, worker) as written,
    ):
        await written.gw.post(CHAT, asking())
        port = int(written.gw.url.rsplit(":", 1)[1])
        for head in bad:
            client = await RawClient.connect(port)
            await client.send(head.encode())
            said = await client.rest()
            await client.close()
            assert b"CANARY" not in said
    assert written.places_of("CANARY") == []


async def test_d15_workers_keys_and_addresses_with_passwords_are_not_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={KEY}")
    async with (
        RawEngine(respond) as worker,
        writing(tmp_path, capfd, worker, pool={"api_key_env": "K2"}) as written,
    ):
        await written.gw.post(CHAT, asking())
    keys = {seen.headers.get("authorization") for seen in sent(worker)}

    assert keys == {f"Bearer {KEY}"}
    assert written.places_of("CANARY") == []


# D17: whatever a prompt consists of.

MARK = "CANARY-PROMPT"
VOLATILE = f"Today is 2026-11-30T10:00:00Z, request id {MARK}-8f14e45fceea167a5a36dedd4bea2543."
TOOL = {
    "type": "function",
    "function": {
        "name": f"{MARK}_tool",
        "description": MARK,
        "parameters": {"type": "object", "properties": {MARK: {"type": "string", "enum": [MARK]}}},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": f'{{"a":"{MARK}"}}'}}
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "every role": (
        CHAT,
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": VOLATILE},
                {"role": "user", "content": [{"type": "text", "text": MARK}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": MARK},
                {"role": "user", "content": MARK, "name": MARK},
            ],
            "tools": [TOOL],
            "metadata": {"note": MARK},
            "stop": [MARK],
            "response_format": {"type": "json_schema", "json_schema": {"name": MARK}},
            "chat_template_kwargs": {"note": MARK},
        },
    ),
    "a picture": (
        CHAT,
        asking()
        | {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": f"http://h/{MARK}"}}],
                }
            ]
        },
    ),
    "an unknown role": (CHAT, asking() | {"messages": [{"role": MARK, "content": MARK}]}),
    "a completion": ("/v1/completions", {"model": "m", "prompt": VOLATILE, "suffix": MARK}),
    "a message": ("/v1/messages", asking(VOLATILE, system=MARK, max_tokens=5)),
    "counting": ("/v1/messages/count_tokens", asking(MARK)),
    "a response": ("/v1/responses", {"model": "m", "input": MARK, "instructions": VOLATILE}),
    "embeddings": ("/v1/embeddings", {"model": "m", "input": [MARK, VOLATILE]}),
    "tokens": ("/tokenize", {"model": "m", "prompt": MARK}),
}
BROKEN: dict[str, str] = {
    "no end": f'{{"model":"m","messages":"{MARK}"',
    "no list": f'{{"model":"m","messages":"{MARK}"}}',
    "no object": f'["{MARK}"]',
    "text": MARK,
    "a bare word": f'{{"model":"m","messages":[{MARK}]}}',
    "an escape": f'{{"model":"m","messages":["\\x{MARK}"]}}',
    "half a character": f'{{"model":"m","messages":["\\ud800{MARK}"]}}',
    "a model that is none": f'{{"model":["{MARK}"],"messages":[]}}',
    "twice": f'{{"model":"m","messages":[{{"content":"{MARK}"}}],"messages":["{MARK}"]}}',
    "documents": f'{{"model":"m","messages":[],"warmlane":"{MARK}"}}',
    "a document": f'{{"model":"m","messages":[],"warmlane":{{"documents":["{MARK}"]}}}}',
    "a pool": f'{{"model":"m","messages":[],"warmlane":{{"pool":"{MARK}"}}}}',
    "an option": f'{{"model":"m","messages":[],"warmlane":{{"{MARK}":1}}}}',
    "a salt": f'{{"model":"m","messages":[],"cache_salt":["{MARK}"]}}',
    "a limit": f'{{"model":"m","messages":[],"kv_transfer_params":{{"x":"{MARK}"}}}}',
    "a prompt": f'{{"model":"m","prompt":{{"{MARK}":1}}}}',
    "an input": f'{{"model":"m","input":{{"{MARK}":1}}}}',
    "too deep": '{"model":"m","messages":[' + "[" * 2000 + f'"{MARK}"' + "]" * 2000 + "]}",
}
PATHS_OF_BODIES = (
    CHAT,
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/embeddings",
    "/tokenize",
)


def words(seen: Seen) -> Script:
    """Answer with the prompt's own words."""
    if seen.method == "GET":
        return answer(b"{}")
    if seen.json().get("stream"):
        return stream(content(MARK), content(MARK, "stop"), b"data: [DONE]\n\n")
    choice = {"index": 0, "message": {"content": MARK}, "finish_reason": "stop"}
    return answer(json.dumps({"id": "x", "choices": [choice]}).encode())


@pytest.mark.parametrize("canonicalize", ["observe", "rewrite"])
async def test_d17_prompts_and_answers_are_written_nowhere(
    canonicalize: str, smollm2_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rules = ["stable-tools", "attribution-header", "volatile-tail"]
    pool = {
        "tokenizer": str(smollm2_dir),
        "block_size": 16,
        "capacity_tokens": 100_000,
        "canonicalize": {"mode": canonicalize, "rules": rules if canonicalize == "rewrite" else []},
        "keep_warm": {"enabled": True, "store": True},
    }
    async with (
        RawEngine(words) as worker,
        writing(tmp_path, capfd, worker, pool=pool) as written,
    ):
        for number in range(3):
            for path, body in PROMPTS.values():
                # Near-duplicates, which is what the report of misses is about.
                again = json.loads(json.dumps(body).replace("2026-11-30", f"2026-11-{10 + number}"))
                for more in ({}, {"stream": True}):
                    url = written.gw.url + path
                    # An answer may end its connection, and this is not about that.
                    headers = {"connection": "close"}
                    request: Any = {"json": again | more, "headers": headers}
                    async with written.gw.session.post(url, **request) as response:
                        await response.read()
    log = events(written.surfaces["stderr"])

    assert len(sent(worker)) > 20
    assert len(events(written.surfaces["decisions.jsonl"])) > 20
    assert {line["event"] for line in log} >= {"request_finished"}
    assert written.places_of(MARK) == []
    # Nor what stands beside it.
    assert written.places_of("8f14e45fceea167a") == []


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
async def test_d17_a_broken_body_is_repeated_nowhere(
    body: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with (
        RawEngine(words) as worker,
        writing(tmp_path, capfd, worker) as written,
    ):
        await written.gw.post(CHAT, asking())
        for path in PATHS_OF_BODIES:
            headers = {"content-type": "application/json"}
            request: Any = {"data": body.encode(), "headers": headers}
            async with written.gw.session.post(written.gw.url + path, **request) as response:
                said = await response.read()
                if response.status == 400:
                    assert MARK.encode() not in said, (path, said)
    assert written.places_of(MARK) == []


async def test_d17_a_defect_of_the_gateways_own_does_not_tell_the_prompt(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RawEngine(words) as worker, writing(tmp_path, capfd, worker) as written:
        await written.gw.post(CHAT, asking())
        # Of a class that is never compiled: a compiled one's methods cannot be replaced.
        monkeypatch.setattr(Asking, "read", lambda *_: {}[MARK])
        request = {"model": asking()["model"], "input": MARK}
        with structlog.testing.capture_logs() as logs:
            status, said, _ = await written.gw.post("/v1/responses", request)
    (line,) = [without_messages(None, "error", dict(line)) for line in logs]

    assert status == 500
    assert said["error"]["code"] == "internal_error"
    assert (line["event"], line["error"]) == ("request_failed", ["KeyError"])
    assert line["at"][-1].startswith("gateway/test_cases_private.py:")
    assert MARK not in json.dumps([line, said])
    assert written.places_of(MARK) == []


async def test_d17_explain_says_the_shape_of_what_changes_and_not_the_text(
    smollm2_dir: Path,
) -> None:
    pool = {"tokenizer": str(smollm2_dir), "block_size": 16, "capacity_tokens": 100_000}
    async with RawEngine(words) as worker, serving(worker, pool=pool) as gw:
        for path, body in PROMPTS.values():
            if path == CHAT:
                status, explained, _ = await gw.post("/admin/v1/explain", body)
                assert status == 200
                told = json.dumps(explained)
                assert MARK not in told
                assert "8f14e45fceea167a" not in told
        found = [span for part in explained["segments"] for span in part["volatile"]]
    assert found is not None


@pytest.mark.parametrize("allowed", [False, True])
async def test_d17_prompts_are_written_where_they_may_be(
    allowed: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    telemetry = {"log_prompts": allowed}
    async with (
        RawEngine(words) as worker,
        writing(tmp_path, capfd, worker, telemetry=telemetry) as written,
    ):
        await written.gw.post(CHAT, asking(MARK))

    assert written.places_of(MARK) == (["traces"] if allowed else [])
