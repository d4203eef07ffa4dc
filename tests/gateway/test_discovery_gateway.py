"""The assembled gateway behind a Kubernetes API: pods serve, drain, end, and nobody is cut off."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from gateway.proxy.server import Listener
from gateway.serve import Gateway
from gateway.settings import load
from tests.fakes.engine import RawEngine, answer, content, openai_engine, stream
from tests.fakes.gateway import chat
from tests.fakes.kube_api import KubeApiServer, pod
from tests.gateway.test_discovery_kube_access import kubeconfig
from tests.support import poll_until

if TYPE_CHECKING:
    from pathlib import Path


def at(name: str, engine: RawEngine, **more: Any) -> dict[str, Any]:
    return pod(name, "127.0.0.1", annotations={"warmlane.io/port": str(engine.port)}, **more)


@pytest.mark.parametrize("front", ["aiohttp", "raw"])
async def test_a_stream_outlives_its_pods_place_in_the_cluster(tmp_path: Path, front: str) -> None:
    go_on = asyncio.Event()

    def respond(seen: Any) -> Any:
        if seen.method == "POST":
            return stream(content("a"), go_on, content("b", "stop"), b"data: [DONE]\n\n")
        return answer(b"{}")

    async with KubeApiServer() as cluster, RawEngine(respond) as old, openai_engine() as new:
        await cluster.put("pods", at("old", old))
        path = kubeconfig(tmp_path, cluster.url, {"token": "t"})
        found = {"type": "kubernetes", "selector": "app=vllm", "kubeconfig": path}
        pools = [{"name": "chat", "models": ["m"], "discovery": found}]
        server = {"host": "127.0.0.1", "front": front}
        settings, _ = load(None, flags={("pools",): pools, ("server",): server}, environ={})
        gateway = Gateway(settings)
        await gateway.start()
        listener = await Listener.start(gateway.app, "127.0.0.1", 0, front=settings.server.front)
        url = f"http://127.0.0.1:{listener.port}/v1/chat/completions"
        workers = gateway.fleet.pools[0].workers
        # The first answer was waited for.
        assert list(workers) == ["old"]
        async with (
            httpx.AsyncClient(timeout=10, trust_env=False) as client,
            client.stream("POST", url, json=chat(stream=True)) as streaming,
        ):
            lines = streaming.aiter_lines()
            assert '"a"' in await anext(lines)
            await cluster.put("pods", at("old", old, terminating=True))
            await poll_until(lambda: workers["old"].draining)
            refused = await client.post(url, json=chat())
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            await cluster.put("pods", at("new", new))
            await poll_until(lambda: "new" in workers)
            assert (await client.post(url, json=chat())).status_code == 200
            await cluster.delete("pods", "old")
            await poll_until(lambda: list(workers) == ["new"])
            go_on.set()
            rest = [line async for line in lines if line]
        assert '"b"' in rest[0]
        assert rest[-1] == "data: [DONE]"
        await listener.stop(1.0)
        await gateway.close()
