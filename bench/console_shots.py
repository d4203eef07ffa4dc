"""Pictures of the console over a gateway with traffic: wide and narrow, light and dark.

    python -m bench.console_shots OUT [--workers N | --gateway URL]

Engines are scripted, cache as real ones do, and the last one of them leaves before the first
picture. Needs Debian's chromium. Also says when the page first painted, whether anything is wider
than its place at any width, and what its data weighs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from tests.chromium import Page, chromium
from tests.fakes.engine import (
    DONE,
    FINISH,
    ROLE,
    RawEngine,
    Script,
    Seen,
    answer,
    content,
    event,
    stream,
)
from tests.gateway.warm_parts import Caching, Warming, asking, text_of, warming
from tests.tools import tool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SIZES = {"wide": 1440, "narrow": 360}
DOCUMENTS = ("returns-policy", "fleet-handbook", "warranty", "pricing-2026", "onboarding")
OVERFLOWS = (
    "[document.documentElement, ...document.querySelectorAll('section, .scroll, td, th')]"
    ".filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1)"
    ".map(e => [e.id || e.closest('section')?.id || e.tagName, e.scrollWidth - e.clientWidth])"
    ".join(', ')"
)
PAINT = (
    "new Promise(done => { const look = () => { const found = "
    "performance.getEntriesByName('first-contentful-paint')[0];"
    "found ? done(found.startTime) : setTimeout(look, 20); }; look(); })"
)


class Streaming(Caching):
    """An engine that caches and streams, and tells of its queue and KV as vLLM does."""

    def respond(self, seen: Seen) -> Script:
        if seen.method == "GET" and seen.target == "/metrics":
            return answer(self._metrics().encode(), 200, "content-type: text/plain")
        script = super().respond(seen)
        if seen.method == "GET" or not seen.json().get("stream"):
            return script
        pause, last = script[0], script[-1]
        assert isinstance(last, bytes)
        counts = json.loads(last.partition(b"\r\n\r\n")[2])["usage"]
        words = (content("word ") for _ in range(8))
        steps: list[bytes | float] = [pause, ROLE]
        for word in words:
            steps += [word, 0.01]
        return stream(*steps, FINISH, event(choices=[], usage=counts), DONE)

    def _metrics(self) -> str:
        held, blocks = len(self.held), self.capacity_tokens // 16
        config = f'block_size="16",num_gpu_blocks="{blocks}"'
        used = min(0.97, held * 16 / max(1, self.capacity_tokens))
        return "\n".join(
            (
                f"process_start_time_seconds {self.epoch}",
                f"vllm:cache_config_info{{{config}}} 1.0",
                "vllm:num_requests_running 2",
                "vllm:num_requests_waiting 0",
                f"vllm:kv_cache_usage_perc {used:.3f}",
                f"kv_cache_gpu_usage_bytes {held * 16 * 24_576}",
                f"kv_cache_cpu_usage_bytes {held * 8 * 24_576}",
                f"kv_cache_eviction_count {held // 7}",
                "",
            )
        )


@contextlib.asynccontextmanager
async def demo(folder: Path, num_workers: int) -> AsyncIterator[tuple[Warming, list[RawEngine]]]:
    """A gateway over engines of which the last one is away."""
    engines = [
        Streaming(prefill_token_s=2e-4 * (1 + k % 2), capacity_tokens=16_384)
        for k in range(num_workers)
    ]
    raws = [RawEngine(engine.respond) for engine in engines]
    for raw in raws:
        await raw.__aenter__()
    try:
        async with warming(folder, *(raw.url for raw in raws)) as running:
            yield running, raws
    finally:
        for raw in raws:
            await raw.stop()


async def traffic(running: Warming, rng: random.Random) -> None:
    """Ask about documents for ever, some asked for much more often than others."""
    number = 0
    while True:
        number += 1
        name = DOCUMENTS[min(int(rng.expovariate(0.7)), len(DOCUMENTS) - 1)]
        body = asking(text_of(name, 1600), f"Question {number}?") | {"stream": True}
        if number % 9 == 0:
            body["messages"][0]["content"] = f"Now: 2026-11-30T12:{number % 60:02}:07Z\n" + text_of(
                name, 1600
            )
        headers = {"x-document-id": name, "x-request-id": f"demo-{number:05}"}
        url = running.url + "/v1/chat/completions"
        with contextlib.suppress(aiohttp.ClientError):
            async with running.session.post(url, json=body, headers=headers) as response:
                await response.read()
        await asyncio.sleep(rng.uniform(0.0, 0.1))


async def shoot(page: Page, url: str, out: Path) -> None:
    """Take the pictures and say what was measured."""
    await page.open(url + "/console", width=SIZES["wide"])
    painted_ms = await page.run(PAINT)
    await page.until("document.querySelectorAll('#decisions tbody tr').length > 3")
    await page.until("document.querySelectorAll('#documents tbody tr').length > 0")
    for name, width in SIZES.items():
        await page.resize(width)
        for is_dark in (False, True):
            await page.dark(is_dark)
            await asyncio.sleep(0.6)  # bars move to their place
            height = int(await page.run("document.documentElement.scrollHeight"))
            # A phone's page is long: in pieces, as it is scrolled.
            piece = height if width > 500 else 1300
            for number, top in enumerate(range(0, height, piece), 1):
                path = out / f"console-{name}-{'dark' if is_dark else 'light'}-{number}.png"
                size = (width, min(piece, height - top))
                await asyncio.to_thread(path.write_bytes, await page.shot(top=top, size=size))
                print(path)
        over = await page.run("document.documentElement.scrollWidth - innerWidth")
        print(f"{name}: {width} px, {over} px beyond the window")
    for width in (768, 900, 1024, 1180, 1280, 1920):
        await page.resize(width)
        await asyncio.sleep(0.3)
        found = await page.run(OVERFLOWS)
        if found:
            print(f"{width} px: too wide: {found}")
    print(f"first paint {painted_ms:.0f} ms; complaints: {page.errors or 'none'}")


async def main(out: Path, num_workers: int) -> None:
    rng = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        async with demo(Path(folder), num_workers) as (running, raws):
            clients = [asyncio.create_task(traffic(running, rng)) for _ in range(4)]
            await asyncio.sleep(8)
            if num_workers > 2:
                await raws[-1].stop()
            try:
                await shoot_running(out, running.url)
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)
            async with running.session.get(running.url + "/console/data") as response:
                print(f"data {len(await response.read()) / 1024:.1f} KiB")


async def shoot_running(out: Path, url: str) -> None:
    """Take the pictures of a gateway that has traffic already."""
    async with chromium(tool("chromium")) as browser, browser.page() as page:
        await shoot(page, url, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gateway", help="take pictures of this one instead")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.gateway:
        sys.exit(asyncio.run(shoot_running(given.out, given.gateway)))
    sys.exit(asyncio.run(main(given.out, given.workers)))
