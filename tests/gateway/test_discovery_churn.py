"""Workers that come and go for ever: nothing of them stays."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from gateway.proxy.server import Listener
from gateway.serve import Gateway
from gateway.settings import load
from tests.fakes.engine import openai_engine
from tests.fakes.gateway import chat
from tests.support import poll_until

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.fleet.fleet import Fleet

NUM_PODS = 30


def sizes(fleet: Fleet) -> dict[str, int]:
    """Return the size of everything that a fleet keeps by worker or address."""
    return {
        name: len(value)
        for name, value in vars(fleet).items()
        if isinstance(value, dict | set | list)
    }


async def test_pods_that_came_and_went_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.fleet.fleet.LEFT_CHECK_S", 0.01)
    monkeypatch.setattr("gateway.discovery.from_file.LOOK_EVERY_S", 0.01)
    path = tmp_path / "workers.json"
    path.write_text("[]")
    pool = {"name": "chat", "models": ["m"], "discovery": {"type": "file", "path": str(path)}}
    settings, _ = load(None, flags={("pools",): [pool]}, environ={})
    async with openai_engine() as engine, httpx.AsyncClient(timeout=10) as client:
        gateway = Gateway(settings)
        await gateway.start()
        listener = await Listener.start(gateway.app, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.port}"
        workers = gateway.fleet.pools[0].workers
        before = sizes(gateway.fleet)
        await client.get(url + "/health")  # from here on, its connection is one of them
        tasks = len(asyncio.all_tasks())
        for number in range(NUM_PODS):
            row: dict[str, Any] = {"id": f"pod-{number}", "url": engine.url}
            path.write_text(json.dumps([row]))
            await poll_until(lambda: list(workers) == [row["id"]])  # noqa: B023
            answer = await client.post(url + "/v1/chat/completions", json=chat())
            assert answer.status_code == 200
        assert 'worker="pod-29"' in (await client.get(url + "/metrics")).text
        path.write_text("[]")
        await poll_until(lambda: not workers)
        await poll_until(lambda: sizes(gateway.fleet) == before)
        assert "pod-" not in (await client.get(url + "/metrics")).text
        await poll_until(lambda: len(asyncio.all_tasks()) <= tasks)
        await poll_until(lambda: gateway.discovery._told == {} == gateway.discovery._origins)
        await listener.stop(1.0)
        await gateway.close()
