"""The official clients against a real vLLM through the gateway, on the APIs that vLLM has itself.

    python -m bench.vllm_clients --tokenizer DIR --kv-events ipc:///tmp/kv --kv-replay ipc:///tmp/replay

Needs a vLLM that is up with what ``bench/vllm_parity.py`` names. Each request of the messages API
goes three ways: to vLLM, through the gateway as it is, and through the gateway for an isolated
tenant, whose messages are translated to chat and back. All must say the same (in float32 at
temperature 0), and the gateway's prediction of cached tokens is held against what vLLM reports.
Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anthropic
import openai

from gateway.proxy.server import Listener
from gateway.serve import Gateway
from gateway.settings import load
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# Events of the last answer are on their way for a few milliseconds.
SETTLE_S = 0.2
READY_DEADLINE_S = 60.0
KEYS = {"PLAIN": "plain-key", "APART": "apart-key", "SALT": "a secret of this run alone"}
EXPLAIN = {"x-warmlane-explain": "1"}
LONG = "You answer from this handbook. " + "Parcels leave the house at noon. " * 60
TOOL: dict[str, Any] = {
    "name": "look_up",
    "description": "Looks a parcel up",
    "input_schema": {
        "type": "object",
        "properties": {"id": {"type": "string", "maxLength": 8}},
        "required": ["id"],
        "additionalProperties": False,
    },
}


def messages_cases(mark: str) -> dict[str, dict[str, Any]]:
    """Return requests by name; ``mark`` makes their prompts new to the engine."""
    asked = {"role": "user", "content": "When do parcels leave?"}
    system = f"Run {mark}. {LONG}"
    used = {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"id": "7"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "It left at noon."}
    turns = [
        asked,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, used]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    blocks = [
        {"type": "text", "text": f"{system} "},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    return {
        "plain": {"system": system, "messages": [asked]},
        "blocks": {"system": blocks, "messages": [{**asked, "content": [_text("When?")]}]},
        "turns": {
            "system": system,
            "messages": [asked, {"role": "assistant", "content": "At noon."}, asked],
        },
        "tools offered": {"system": system, "messages": [asked], "tools": [TOOL]},
        "a tool's result": {"system": system, "messages": turns, "tools": [TOOL]},
        "a tool demanded": {
            "system": system,
            "messages": [asked],
            "tools": [TOOL],
            "tool_choice": {"type": "any"},
            "max_tokens": 60,
        },
        "a stop sequence": {"system": system, "messages": [asked], "stop_sequences": ["noon"]},
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


class Report:
    """Prints a line per check and counts those that fail."""

    def __init__(self) -> None:
        self.num_failed = 0
        self.num_checks = 0

    def check(self, what: str, is_good: bool, seen: object = "") -> None:
        """Take one result."""
        self.num_checks += 1
        self.num_failed += not is_good
        print(f"{'ok  ' if is_good else 'FAIL'} {what}  {seen}", flush=True)


def said(message: Any) -> list[tuple[Any, ...]]:
    """Return what a message says, without ids that are drawn anew."""
    blocks = (
        (block.type, getattr(block, "text", None), getattr(block, "input", None))
        for block in message.content
    )
    return [(message.stop_reason,), *blocks]


def prompt_tokens(usage: Any) -> int:
    """Return all tokens of a prompt: of the cache, new to it, and those of no whole block."""
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return int(usage.input_tokens) + int(cached)


def is_near(predicted: int, cached: int, turn: str, block_size: int) -> bool:
    """Say whether a prediction is within a block; of long text never seen here, not above it."""
    return abs(predicted - cached) <= block_size or (turn == "first" and predicted < cached)


async def whole(client: anthropic.AsyncAnthropic, body: dict[str, Any]) -> tuple[Any, int]:
    """Return a message, and the hit tokens that were predicted."""
    raw = await client.messages.with_raw_response.create(**body)
    await asyncio.sleep(SETTLE_S)
    return await raw.parse(), int(raw.headers.get("x-warmlane-hit-tokens", -1))


async def streamed(client: anthropic.AsyncAnthropic, body: dict[str, Any]) -> Any:
    """Return a message as its stream adds up."""
    async with client.messages.stream(**body) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_message()


async def messages(options: argparse.Namespace, url: str, report: Report) -> None:
    """Ask everything of the messages API."""
    ways = {
        "vLLM": (options.vllm, "k"),
        "passed on": (url, "plain-key"),
        "translated": (url, "apart-key"),
    }
    clients = {
        way: anthropic.AsyncAnthropic(
            base_url=base_url, api_key=key, max_retries=0, default_headers=EXPLAIN
        )
        for way, (base_url, key) in ways.items()
    }
    for name, fields in messages_cases(str(os.getpid())).items():
        body: dict[str, Any] = {
            "model": options.model_name,
            "max_tokens": 12,
            "extra_body": {"temperature": 0.0},
            **fields,
        }
        counted = {k: v for k, v in body.items() if k in ("model", "system", "messages", "tools")}
        try:
            expected, _ = await whole(clients["vLLM"], body)
        except anthropic.APIStatusError as error:
            await failing(clients, f"messages, {name}", body, error, report)
            continue
        total = prompt_tokens(expected.usage)
        for way in ("passed on", "translated"):
            client = clients[way]
            label = f"messages, {name}, {way}"
            for turn in ("first", "again"):
                got, predicted = await whole(client, body)
                cached = got.usage.cache_read_input_tokens or 0
                report.check(f"{label}, {turn}: says", said(got) == said(expected), said(got))
                report.check(f"{label}, {turn}: tokens", prompt_tokens(got.usage) == total, total)
                near = is_near(predicted, cached, turn, options.block_size)
                report.check(f"{label}, {turn}: hit", near, f"predicted {predicted}, {cached}")
            stream = await streamed(client, body)
            report.check(f"{label}, stream: says", said(stream) == said(expected), said(stream))
            count = await client.messages.count_tokens(**counted)
            report.check(f"{label}: counted", count.input_tokens == total, count.input_tokens)
    await refusals(clients, options.model_name, report)
    for client in clients.values():
        await client.close()


async def failing(
    clients: dict[str, anthropic.AsyncAnthropic],
    label: str,
    body: dict[str, Any],
    expected: anthropic.APIStatusError,
    report: Report,
) -> None:
    """Ask for what vLLM's own messages API fails at: passed on it fails as it does there."""
    try:
        await whole(clients["passed on"], body)
        status = 200
    except anthropic.APIStatusError as error:
        status = error.status_code
    report.check(f"{label}, passed on: fails alike", status == expected.status_code, expected)
    got, _ = await whole(clients["translated"], body)
    report.check(f"{label}, translated: says", got.stop_reason is not None, said(got))
    stream = await streamed(clients["translated"], body)
    report.check(f"{label}, translated, stream: says", said(stream) == said(got), said(stream))


async def refusals(
    clients: dict[str, anthropic.AsyncAnthropic], model: str, report: Report
) -> None:
    """Ask for what is refused: the clients raise the same either way."""
    asked: Any = [{"role": "user", "content": "q"}]
    for way in ("passed on", "translated"):
        for name, body in {
            "too long": {"model": model, "messages": asked, "max_tokens": 20_000},
            "no such model": {"model": "nope", "messages": asked, "max_tokens": 1},
        }.items():
            try:
                await clients[way].messages.create(**body)
                raised: object = None
            except anthropic.APIStatusError as error:
                raised = (error.status_code, type(error).__name__, str(error)[:80])
            is_good = raised is not None and raised[0] in (400, 404)  # type: ignore[index]
            report.check(f"messages, {name}, {way}", is_good, raised)


async def responses(options: argparse.Namespace, url: str, report: Report) -> None:
    """Ask everything of the responses API, which is passed on alone."""
    direct, client, apart = (
        openai.AsyncOpenAI(
            base_url=base_url + "/v1", api_key=key, max_retries=0, default_headers=EXPLAIN
        )
        for base_url, key in ((options.vllm, "k"), (url, "plain-key"), (url, "apart-key"))
    )
    system = f"Responses {os.getpid()}. {LONG}"
    turns = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "At noon."},
        {"role": "user", "content": [{"type": "input_text", "text": "Sure?"}]},
    ]
    function = {"type": "function", "name": "look_up", "parameters": TOOL["input_schema"]}
    cases: dict[str, dict[str, Any]] = {
        "text": {"input": "When do parcels leave?", "instructions": system},
        "turns": {"input": turns, "instructions": system},
        "tools offered": {"input": turns, "instructions": system, "tools": [function]},
    }
    for name, fields in cases.items():
        body: dict[str, Any] = {
            "model": options.model_name,
            "max_output_tokens": 12,
            "temperature": 0.0,
            **fields,
        }
        expected = await direct.responses.create(**body)
        for way, who in {"passed on": client, "isolated": apart}.items():
            for turn in ("first", "again"):
                raw = await who.responses.with_raw_response.create(**body)
                await asyncio.sleep(SETTLE_S)
                got, predicted = raw.parse(), int(raw.headers.get("x-warmlane-hit-tokens", -1))
                label = f"responses, {name}, {way}, {turn}"
                report.check(
                    f"{label}: says", got.output_text == expected.output_text, got.output_text
                )
                assert got.usage is not None
                cached = got.usage.input_tokens_details.cached_tokens
                near = is_near(predicted, cached, turn, options.block_size)
                report.check(f"{label}: hit", near, f"predicted {predicted}, {cached}")
            events = [event async for event in await who.responses.create(**body, stream=True)]
            text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
            is_good = text == expected.output_text and events[-1].type in (
                "response.completed",
                "response.incomplete",
            )
            report.check(f"responses, {name}, {way}, stream", is_good, events[-1].type)
    for one in (direct, client, apart):
        await one.close()


@asynccontextmanager
async def gateway(options: argparse.Namespace) -> AsyncIterator[str]:
    """Run a gateway in this process with a plain and an isolated tenant; yield its URL."""
    os.environ.update(KEYS)
    worker = {"id": "v0", "url": options.vllm}
    worker |= {"kv_events": options.kv_events, "kv_replay": options.kv_replay}
    pool = {
        "name": "p",
        "models": [options.model_name],
        "engine": "vllm",
        "tokenizer": options.tokenizer,
        "workers": [worker],
    }
    flags: dict[Any, Any] = {
        ("pools",): [pool],
        ("tenants",): [
            {"name": "plain", "key_env": "PLAIN"},
            {"name": "apart", "key_env": "APART", "isolate_cache": True},
        ],
        ("security",): {"salt_secret_env": "SALT"},
    }
    settings, _ = load(None, flags=flags, environ={})
    running = Gateway(settings)
    await running.start()
    listener = await Listener.start(running.app, "127.0.0.1", 0, front="raw")
    try:
        [served] = running.fleet.pools
        await poll_until(
            lambda: served.reader is not None and served.workers["v0"].health.ready,
            deadline_s=READY_DEADLINE_S,
            what="prompts are read",
        )
        yield f"http://127.0.0.1:{listener.port}"
    finally:
        await listener.stop(0.0)
        await running.close()


async def run(options: argparse.Namespace) -> bool:
    """Ask everything and print; return whether all is as it should be."""
    report = Report()
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(gateway(options))
        await messages(options, url, report)
        await responses(options, url, report)
    print(f"{report.num_checks} checks, {report.num_failed} failed")
    return report.num_failed == 0


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vllm", default="http://127.0.0.1:8100", help="URL of the vLLM")
    parser.add_argument("--model-name", default="smollm2", help="its served model name")
    parser.add_argument("--tokenizer", required=True, help="folder of the model's files")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--kv-events", required=True, help="its events endpoint")
    parser.add_argument("--kv-replay", required=True, help="its replay endpoint")
    sys.exit(not asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
