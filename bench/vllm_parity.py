"""Hold our prompts and predictions against a real vLLM: ``python -m bench.vllm_parity --help``.

Needs a vLLM that is up, with prompt token details, KV events and a tool parser:

    vllm serve MODEL --served-model-name m --block-size 32 --enable-prefix-caching \
        --enable-prompt-tokens-details --enable-auto-tool-choice --tool-call-parser hermes \
        --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq",
                             "endpoint": "ipc:///tmp/kv", "replay_endpoint": "ipc:///tmp/replay"}'

For each body it compares our token ids with the ones vLLM answers with and with ``/tokenize``; then
it sends the bodies, marked so that nothing is cached yet, through a gateway in front of that vLLM
and compares the predicted hit tokens with ``cached_tokens``. Exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import yaml

from bench.vllm_bodies import Bodies, as_json, comparable_by_tokenize
from prefix_index import ChatTemplate, PromptReader, PromptTokenizer, TemplateRefusedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# The share of requests whose prediction must be within one block of what vLLM reports.
WANTED_SHARE = 0.99
# Long conversations repeat what short ones have; reference data is to stay small.
STORED_BYTES = 1_500
READY_DEADLINE_S = 60.0
_JSON = {"content-type": "application/json"}
# Events of the last answer are on their way for a few milliseconds.
SETTLE_S = 0.05


async def compare_tokens(
    options: argparse.Namespace, reader: PromptReader, bodies: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return one record per body: what vLLM made of it and whether ours is equal."""
    records = []
    async with httpx.AsyncClient(base_url=options.vllm, timeout=120, headers=_JSON) as client:
        for body in bodies:
            asked = {"model": options.model_name, **body}
            answer = await client.post(
                "/v1/chat/completions",
                content=as_json({**asked, "max_tokens": 1, "return_token_ids": True}),
            )
            theirs = answer.json()["prompt_token_ids"] if answer.status_code == 200 else None
            if comparable_by_tokenize(body):
                tokenized = await client.post("/tokenize", content=as_json(asked))
                listed = tokenized.json()["tokens"] if tokenized.status_code == 200 else None
                assert listed == theirs, f"/tokenize and the answer differ: {asked}"
            try:
                ours = list(reader.chat(body).complete().token_ids)
            except TemplateRefusedError:
                ours = None
            records.append(
                {"body": body, "status": answer.status_code, "ids": theirs, "ours": ours}
            )
    return records


def report_tokens(reader: PromptReader, records: list[dict[str, Any]]) -> bool:
    """Print how many prompts are equal and the first that is not; return whether all are."""
    equal = [record for record in records if record["ids"] == record["ours"]]
    refused = sum(record["ids"] is None for record in equal)
    print(f"token ids equal: {len(equal)} of {len(records)} (both refuse: {refused})")
    for record in records:
        if record["ids"] != record["ours"]:
            print("  differs:", json.dumps(record["body"], ensure_ascii=False)[:2000])
            print("  status:", record["status"], "ids:", record["ids"], "ours:", record["ours"])
            if record["ours"]:
                print("  rendered:", repr(reader.render(record["body"])))
            break
    return len(equal) == len(records)


@asynccontextmanager
async def gateway(options: argparse.Namespace) -> AsyncIterator[str]:
    """Run ``warmlane serve`` in front of the vLLM and yield its URL."""
    worker = {"id": "v0", "url": options.vllm}
    worker |= {"kv_events": options.kv_events, "kv_replay": options.kv_replay}
    pool: dict[str, Any] = {
        "name": "p",
        "models": [options.model_name],
        "engine": "vllm",
        "tokenizer": str(options.tokenizer),
        "workers": [worker],
    }
    if options.template:
        pool["template"] = str(options.template)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "warmlane.yaml"
        server = {"host": "127.0.0.1", "port": options.gateway_port}
        config.write_text(yaml.safe_dump({"server": server, "pools": [pool]}))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "serve", "--config", str(config)),
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            url = f"http://127.0.0.1:{options.gateway_port}"
            await _ready(url)
            yield url
        finally:
            process.terminate()
            await process.wait()


async def _ready(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(READY_DEADLINE_S):
        while True:
            try:
                if (await client.get("/health/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)


async def compare_hits(
    options: argparse.Namespace, url: str, bodies: list[dict[str, Any]]
) -> list[tuple[int, int, int]]:
    """Return (prompt tokens, predicted hit tokens, vLLM's cached tokens) of each answer."""
    seen = []
    async with httpx.AsyncClient(base_url=url, timeout=120, headers=_JSON) as client:
        for body in bodies:
            answer = await client.post(
                "/v1/chat/completions",
                content=as_json({"model": options.model_name, **body, "max_tokens": 4}),
                headers={"x-warmlane-explain": "1"},
            )
            if answer.status_code != 200:
                continue
            usage = answer.json()["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            predicted = int(answer.headers["x-warmlane-hit-tokens"])
            seen.append((usage["prompt_tokens"], predicted, cached))
            await asyncio.sleep(SETTLE_S)
    return seen


def report_hits(seen: list[tuple[int, int, int]], block_size: int) -> bool:
    """Print how predictions compare; return whether enough are within a block."""
    near = sum(abs(predicted - cached) <= block_size for _, predicted, cached in seen)
    exact = sum(predicted == cached for _, predicted, cached in seen)
    warm = sum(cached > 0 for _, _, cached in seen)
    total = sum(tokens for tokens, _, _ in seen)
    print(
        f"predicted within {block_size} tokens of cached_tokens: {near} of {len(seen)} "
        f"({exact} equal; {warm} answers had a hit; {total:,} prompt tokens, "
        f"{sum(s[1] for s in seen):,} predicted, {sum(s[2] for s in seen):,} cached)"
    )
    for tokens, predicted, cached in seen:
        if abs(predicted - cached) > block_size:
            print(f"  prompt {tokens}: predicted {predicted}, cached {cached}")
    return near >= WANTED_SHARE * len(seen)


def store(path: Path, records: list[dict[str, Any]], template: str) -> None:
    """Keep short bodies and what vLLM made of them as reference data for the tests."""
    lines = []
    for record in records:
        if len(as_json(record["body"])) > STORED_BYTES:
            continue
        ids = record["ids"]
        kept = {"template": template, "body": record["body"]}
        kept |= {"num_tokens": len(ids), "ids_sha256": digest(ids)} if ids else {"refused": True}
        lines.append(json.dumps(kept, ensure_ascii=False, separators=(",", ":")))
    path.write_text("\n".join(lines) + "\n")
    print(f"stored {len(lines)} prompts in {path}")


def digest(ids: list[int]) -> str:
    """Return the identity of token ids: sha256 of them in decimal, joined by commas."""
    return sha256(",".join(map(str, ids)).encode()).hexdigest()


async def run(options: argparse.Namespace) -> bool:
    """Compare and print; return whether everything holds."""
    tokenizer = PromptTokenizer.from_dir(options.tokenizer)
    source = options.template.read_text() if options.template else tokenizer.template_source
    assert source is not None, "the model has no chat template"
    reader = PromptReader(
        tokenizer,
        ChatTemplate(source, special_tokens=tokenizer.special_tokens),
        model="m",
        block_size=options.block_size,
        engine="vllm",
    )
    bodies = Bodies(options.seed).make(options.bodies)
    records = await compare_tokens(options, reader, bodies)
    is_equal = report_tokens(reader, records)
    if options.store:
        store(options.store, records, options.template.stem if options.template else "smollm2")
    if not options.kv_events:
        return is_equal
    # Other text in front, or everything would be cached by now.
    marked = [
        {
            **body,
            "messages": [{"role": "system", "content": f"Run {os.getpid()}."}, *body["messages"]],
        }
        for body in bodies
    ]
    async with gateway(options) as url:
        seen = await compare_hits(options, url, marked)
    return report_hits(seen, options.block_size) and is_equal


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", maxsplit=1)[0])
    parser.add_argument("--vllm", default="http://127.0.0.1:8100", help="URL of the vLLM")
    parser.add_argument("--model-name", default="smollm2", help="its served model name")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the model's files")
    parser.add_argument("--template", type=Path, help="file given to vLLM as --chat-template")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--bodies", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kv-events", help="its events endpoint; without one, tokens only")
    parser.add_argument("--kv-replay", help="its replay endpoint")
    parser.add_argument("--gateway-port", type=int, default=8190)
    parser.add_argument("--store", type=Path, help="file for the reference data of the tests")
    sys.exit(not asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
