"""Hold the index against a real vLLM that dies, is reset and runs out of cache.

    python -m bench.vllm_truth --vllm VENV/bin/vllm --model DIR

Starts vLLM itself (KV events on, a second time with a tiny cache) and the gateway in front of it.
After each event the same prompts are asked again; the hit tokens predicted from the index must be
within one block of the ``cached_tokens`` that vLLM reports. Exit status 1 if they are not.

What is known to be late: vLLM tells of a reset only with its next request, so the first answer
after a reset may differ and is printed apart.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import httpx
import yaml

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

BLOCK_SIZE = 32
NUM_PROMPTS = 12
# Long enough for some twenty blocks, short enough for a CPU.
PROMPT_WORDS = 600
# A tiny cache: room for one request of the longest allowed length, and a few prompts beside it.
TINY_BLOCKS = 80
TINY_MAX_MODEL_LEN = 2048
READY_DEADLINE_S = 300.0
# Events of the last answer are on their way for a few milliseconds.
SETTLE_S = 0.2
WORDS = ("lane", "warm", "block", "prefix", "cache", "token", "route", "worker", "queue", "shelf")


def prompts(count: int, seed: int) -> list[str]:
    """Return texts that share their first third pairwise."""
    rng = Random(seed)
    heads = [" ".join(rng.choices(WORDS, k=PROMPT_WORDS // 3)) for _ in range(count // 2)]
    rest = [" ".join(rng.choices(WORDS, k=PROMPT_WORDS * 2 // 3)) for _ in range(count)]
    return [f"{heads[i % len(heads)]} {rest[i]}" for i in range(count)]


class Vllm:
    """A vLLM process that can be killed and started again on the same addresses."""

    def __init__(self, options: argparse.Namespace, folder: Path, extra: Sequence[str]) -> None:
        self.url = f"http://127.0.0.1:{options.port}"
        self.events = f"ipc://{folder}/events"
        self.replay = f"ipc://{folder}/replay"
        self._log = folder / "vllm.log"
        self._command = [
            *(options.vllm, "serve", options.model, "--host", "127.0.0.1"),
            *("--port", str(options.port), "--served-model-name", "m", "--enforce-eager"),
            *("--dtype", "bfloat16", "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "8"),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            "--kv-events-config",
            '{"enable_kv_cache_events":true,"publisher":"zmq",'
            f'"endpoint":"{self.events}","replay_endpoint":"{self.replay}"}}',
            *extra,
        ]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start and wait until it answers."""
        environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        await ready(f"{self.url}/health")

    async def kill(self) -> None:
        """Kill it with all its children, as a crash would."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            self._process = None


async def ready(url: str) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(READY_DEADLINE_S):
        while True:
            try:
                if (await client.get(url)).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.5)


@asynccontextmanager
async def gateway(
    options: argparse.Namespace, engine: Vllm, folder: Path, **more: Any
) -> AsyncIterator[str]:
    """Run ``warmlane serve`` in front of the engine, with ``more`` in its pool; yield its URL."""
    worker = {"id": "v0", "url": engine.url}
    worker |= {"kv_events": engine.events, "kv_replay": engine.replay}
    pool: dict[str, Any] = {"name": "p", "models": ["m"], "engine": "vllm", "workers": [worker]}
    pool |= {"tokenizer": options.model, **more}
    server = {"host": "127.0.0.1", "port": options.gateway_port}
    config = folder / "warmlane.yaml"
    config.write_text(yaml.safe_dump({"server": server, "pools": [pool]}))
    with (folder / "gateway.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "serve", "--config", str(config)), stderr=log
        )
    try:
        url = f"http://127.0.0.1:{options.gateway_port}"
        await ready(f"{url}/health/ready")
        yield url
    finally:
        process.terminate()
        await process.wait()


class Checks:
    """Asks prompts through the gateway and compares prediction and observation."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.failed = 0

    async def ask(self, text: str) -> tuple[int, int, int]:
        """Return (prompt tokens, predicted hit tokens, cached tokens)."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        async with httpx.AsyncClient(base_url=self._url, timeout=300) as client:
            answer = await client.post(
                "/v1/chat/completions", json=body, headers={"x-warmlane-explain": "1"}
            )
        answer.raise_for_status()
        usage = answer.json()["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        await asyncio.sleep(SETTLE_S)
        return usage["prompt_tokens"], int(answer.headers["x-warmlane-hit-tokens"]), cached

    async def stage(self, name: str, texts: Sequence[str], *, excused: int = 0) -> None:
        """Ask all texts in turn; the first ``excused`` answers are printed, not judged."""
        seen = [await self.ask(text) for text in texts]
        judged = seen[excused:]
        off = [s for s in judged if abs(s[1] - s[2]) > BLOCK_SIZE]
        self.failed += len(off)
        warm = sum(cached > 0 for _, _, cached in judged)
        print(
            f"{name}: {len(judged) - len(off)} of {len(judged)} within one block "
            f"({sum(p == c for _, p, c in judged)} equal, {warm} with a hit)",
            flush=True,
        )
        for tokens, predicted, cached in seen[:excused]:
            print(
                f"  before it could know: prompt {tokens}, predicted {predicted}, {cached} cached"
            )
        for tokens, predicted, cached in off:
            print(f"  OFF: prompt {tokens}, predicted {predicted}, cached {cached}")

    async def worker(self) -> dict[str, object]:
        """Return the worker's row of the admin API."""
        async with httpx.AsyncClient(base_url=self._url) as client:
            rows = (await client.get("/admin/v1/workers")).json()["workers"]
        return dict(rows[0])

    async def until_new_epoch(self, before: object) -> None:
        """Wait until the gateway has seen that the engine is a new process."""
        async with asyncio.timeout(READY_DEADLINE_S):
            while True:
                row = await self.worker()
                if row["ready"] and row["epoch"] not in (None, before):
                    return
                await asyncio.sleep(0.2)


async def crash_and_reset(options: argparse.Namespace) -> int:
    """Warm, kill -9 and restart, reset: return how many answers were off."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = Vllm(options, folder, ["--max-model-len", "4096"])
        try:
            await engine.start()
            async with gateway(options, engine, folder) as url:
                checks = Checks(url)
                texts = prompts(NUM_PROMPTS, 1)
                await checks.stage("cold", texts)
                await checks.stage("asked again", texts)
                epoch = (await checks.worker())["epoch"]
                await engine.kill()
                await engine.start()
                await checks.until_new_epoch(epoch)
                await checks.stage("after kill -9 and restart", texts)
                await checks.stage("asked again", texts)
                async with httpx.AsyncClient() as client:
                    (await client.post(f"{engine.url}/reset_prefix_cache")).raise_for_status()
                await checks.stage("after a reset", texts, excused=1)
                await checks.stage("asked again", texts)
                return checks.failed
        finally:
            await engine.kill()


async def tiny_cache(options: argparse.Namespace) -> int:
    """Ask more than the cache holds, in random order: return how many answers were off."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        extra = ["--num-gpu-blocks-override", str(TINY_BLOCKS)]
        engine = Vllm(options, folder, [*extra, "--max-model-len", str(TINY_MAX_MODEL_LEN)])
        try:
            await engine.start()
            async with gateway(options, engine, folder) as url:
                checks = Checks(url)
                texts = prompts(NUM_PROMPTS, 2)
                rng = Random(3)
                await checks.stage("tiny cache", [rng.choice(texts) for _ in range(60)])
                row = await checks.worker()
                print(f"  blocks {row['blocks']}, gaps {row['gaps']}", flush=True)
                return checks.failed
        finally:
            await engine.kill()


def main() -> None:
    """Parse the options and run both parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--vllm", required=True, help="the vllm command of its own environment")
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--port", type=int, default=8150)
    parser.add_argument("--gateway-port", type=int, default=8151)
    options = parser.parse_args()
    failed = asyncio.run(crash_and_reset(options)) + asyncio.run(tiny_cache(options))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
