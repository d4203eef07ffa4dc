"""Warm-up proven on a real vLLM: by the tokens it reports as cached, and by those it computes.

    python -m bench.warmup_vllm --vllm VENV/bin/vllm --model DIR

Starts vLLM with KV events, the gateway in front of it, and types the commands as an operator does:
``verify`` on a cold engine, ``run``, ``run`` again, ``verify``; then the first question about each
document. After that vLLM is killed and started anew, and filled from what was kept. Exit status 1
if anything that must be warm is not, or is computed twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml

from bench import vllm_truth
from bench.fleet_workload import text
from bench.vllm_truth import BLOCK_SIZE, Checks, Vllm, gateway
from tests.support import free_port, poll_until

NAMES = ("ashby", "barton", "cotham", "denham")
WORDS = 1200
SYSTEM = "Answer from the document.\n\n"
# A prompt's last block is computed again for the token that every request takes.
SPARE_TOKENS = 2 * BLOCK_SIZE
# Beside others' work an engine that loads its weights takes a while.
DEADLINE_S = 900.0


class Proof:
    """The documents, the commands, and what was found wrong."""

    def __init__(self, engine: Vllm, url: str, folder: Path) -> None:
        self.failed = 0
        self._engine = engine
        self._url = url
        self._texts = {name: text(Random(name), WORDS) for name in NAMES}
        self._manifest = folder / "warm.yaml"
        for name, content in self._texts.items():
            (folder / f"{name}.txt").write_text(content)
        frame = {
            "system": SYSTEM + "{document}",
            "messages": [{"role": "user", "content": "{question}"}],
        }
        manifest = {"model": "m", "frame": frame, "documents": [{"glob": "*.txt"}]}
        self._manifest.write_text(yaml.safe_dump(manifest))

    async def command(self, name: str, *, exit_code: int, computed: bool) -> dict[str, Any]:
        """Type one command; hold its exit status and what vLLM computed meanwhile."""
        before = await self._computed()
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "warmup", name, str(self._manifest)),
            *("--gateway", self._url, "--json"),
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 26,
        )
        out, _ = await child.communicate()
        # One document of all, or an event a line.
        last = out if name == "verify" else out.splitlines()[-1]
        result: dict[str, Any] = json.loads(last)
        tokens = await self._computed() - before
        is_right = child.returncode == exit_code
        is_right = is_right and (computed or tokens <= len(NAMES) * SPARE_TOKENS)
        self._say(
            is_right,
            f"{name}: exit status {child.returncode}, vLLM computed {tokens:.0f} prompt tokens, "
            f"we count {result.get('computed_tokens', 0)}",
        )
        return result

    async def ask(self, when: str) -> None:
        """Ask a new question about each document, and hold what vLLM says it had cached."""
        for name, content in self._texts.items():
            messages = [
                {"role": "system", "content": SYSTEM + content},
                {"role": "user", "content": f"{when}: what does {name} say?"},
            ]
            body = {"model": "m", "messages": messages, "max_tokens": 2}
            headers = {"x-document-id": name}
            async with httpx.AsyncClient(timeout=600) as client:
                answer = await client.post(
                    f"{self._url}/v1/chat/completions", json=body, headers=headers
                )
            usage = answer.raise_for_status().json()["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self._say(
                usage["prompt_tokens"] - cached <= SPARE_TOKENS,
                f"{when}, first question about {name}: {cached} of {usage['prompt_tokens']} cached",
            )

    async def filled(self) -> dict[str, Any]:
        """Wait until keep-warm has filled the engine; return its run."""

        async def rows() -> bool:
            async with httpx.AsyncClient() as client:
                state = (await client.get(f"{self._url}/admin/v1/warm")).json()
            found.update(state["keep_warm"][0] if state["keep_warm"] else {})
            return found.get("warm", 0) + found.get("failed", 0) >= len(NAMES)

        found: dict[str, Any] = {}
        await poll_until(rows, deadline_s=DEADLINE_S, what="the engine is filled again")
        self._say(found["failed"] == 0, f"after {found['why']}: {found}")
        return found

    async def _computed(self) -> float:
        async with httpx.AsyncClient() as client:
            lines = (await client.get(f"{self._engine.url}/metrics")).text.splitlines()
        total = 0.0
        for line in lines:
            name, _, value = line.rpartition(" ")
            if name.startswith("vllm:prompt_tokens_total"):
                total += float(value)
            elif name.startswith("vllm:prefix_cache_hits_total"):
                total -= float(value)
        return total

    def _say(self, is_right: bool, line: str) -> None:
        self.failed += not is_right
        print("ok " if is_right else "BAD", line, flush=True)


async def prove(options: argparse.Namespace) -> int:
    """Return how much was wrong."""
    vllm_truth.READY_DEADLINE_S = DEADLINE_S
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = Vllm(options, folder, ["--max-model-len", "4096"])
        keep = {"keep_warm": {"enabled": True, "store": True}}
        try:
            await engine.start()
            async with gateway(options, engine, folder, **keep) as url:
                proof = Proof(engine, url, folder)
                await proof.command("verify", exit_code=3, computed=False)
                await proof.command("run", exit_code=0, computed=True)
                await proof.command("run", exit_code=0, computed=False)
                await proof.command("verify", exit_code=0, computed=False)
                await proof.ask("warmed")
                checks = Checks(url)
                epoch = (await checks.worker())["epoch"]
                await engine.kill()
                await engine.start()
                await checks.until_new_epoch(epoch)
                await proof.filled()
                await proof.ask("filled again")
                return proof.failed
        finally:
            await engine.kill()


def main() -> None:
    """Parse the options and prove it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--vllm", required=True, help="the vllm command of its own environment")
    parser.add_argument("--model", required=True, help="model folder")
    options = parser.parse_args()
    options.port, options.gateway_port = free_port(), free_port()
    sys.exit(asyncio.run(prove(options)) > 0)


if __name__ == "__main__":
    main()
