"""Workers from Kubernetes: what a cluster's objects mean, and what its API may do to us."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from gateway.config.discovery import KubernetesDiscovery
from gateway.discovery.from_kubernetes import KubernetesSource
from gateway.discovery.kube_access import Access
from tests.fakes.kube_api import KubeApiServer, endpoint, endpoint_slice, pod
from tests.gateway.discovery_parts import Told
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def config_of(**more: Any) -> KubernetesDiscovery:
    more = more if "service" in more else {"selector": "app=vllm", **more}
    return KubernetesDiscovery.model_validate({"type": "kubernetes", **more})


@asynccontextmanager
async def following(
    server: KubeApiServer, access: Access | None = None, *, watch_s: int = 60, **more: Any
) -> AsyncIterator[Told]:
    told = Told()
    source = KubernetesSource(
        config_of(**more),
        access=access or Access(server.url, server.namespace),
        sleep=lambda _s: asyncio.sleep(0.01),
        watch_s=watch_s,
    )
    task = asyncio.create_task(source.run(told.listing))
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_pods_come_and_go_as_the_watch_tells() -> None:
    async with KubeApiServer() as server:
        await server.put("pods", pod("vllm-0", "10.0.0.1"))
        await server.put("pods", pod("other", "10.0.0.9", labels={"app": "web"}))
        async with following(server, kv_events="tcp://{ip}:5557") as told:
            await poll_until(lambda: told.ids == ["vllm-0"])
            found = (told.listing.found or ())[0].worker
            assert found.url == "http://10.0.0.1:8000"
            assert found.kv_events == "tcp://10.0.0.1:5557"
            await poll_until(lambda: server.num_watching == 1)
            await server.put("pods", pod("vllm-1", "fd00::1"))
            await poll_until(lambda: told.ids == ["vllm-0", "vllm-1"])
            assert (told.listing.found or ())[1].worker.url == "http://[fd00::1]:8000"
            await server.delete("pods", "vllm-0")
            await poll_until(lambda: told.ids == ["vllm-1"])


async def test_a_terminating_or_unready_pod_stays_known_but_is_not_ready() -> None:
    async with KubeApiServer() as server:
        for number in range(3):
            await server.put("pods", pod(f"vllm-{number}", f"10.0.0.{number}"))
        async with following(server) as told:
            await poll_until(lambda: len(told.ready_ids) == 3)
            await poll_until(lambda: server.num_watching == 1)
            await server.put("pods", pod("vllm-0", "10.0.0.0", terminating=True))
            await server.put("pods", pod("vllm-1", "10.0.0.1", ready=False))
            await poll_until(lambda: told.ready_ids == ["vllm-2"])
            assert told.ids == ["vllm-0", "vllm-1", "vllm-2"]
            await server.put("pods", pod("vllm-1", "10.0.0.1"))
            await poll_until(lambda: told.ready_ids == ["vllm-1", "vllm-2"])


@pytest.mark.parametrize("state", [{"ip": None}, {"phase": "Succeeded"}, {"phase": "Failed"}])
async def test_pods_that_are_not_running_are_no_workers(state: dict[str, Any]) -> None:
    async with KubeApiServer() as server:
        await server.put("pods", pod("vllm-0", **{"ip": "10.0.0.1", **state}))
        async with following(server) as told:
            await poll_until(lambda: told.listing.found == ())
            assert told.listing.bad == {}


async def test_labels_and_annotations_say_more_of_a_pod() -> None:
    async with KubeApiServer() as server:
        notes = {
            "warmlane.io/port": "api",
            "warmlane.io/kv-events": "tcp://{ip}:7777",
            "warmlane.io/kv-replay": "tcp://{ip}:7778",
        }
        labels = {"warmlane.io/pool": "chat", "llm/model": "llama"}
        await server.put(
            "pods", pod("a", "10.0.0.1", labels=labels, annotations=notes, ports={"api": 9000})
        )
        async with following(server, model_label="llm/model") as told:
            await poll_until(lambda: told.ids == ["a"])
            found = (told.listing.found or ())[0]
            assert (found.pool, found.model) == ("chat", "llama")
            assert found.worker.url == "http://10.0.0.1:9000"
            assert found.worker.kv_events == "tcp://10.0.0.1:7777"
            assert found.worker.kv_replay == "tcp://10.0.0.1:7778"


@pytest.mark.parametrize(
    ("notes", "reason"),
    [
        ({"warmlane.io/port": "grpc"}, "there is no port 'grpc'; named ports: http"),
        ({"warmlane.io/port": "70000"}, "expected a port from 1 to 65535, got 70000"),
        ({"warmlane.io/kv-events": "udp://{ip}:1"}, "expected tcp://HOST:PORT"),
        ({"warmlane.io/scheme": "ftp"}, "expected http://HOST"),
    ],
)
async def test_a_pod_that_says_nonsense_is_left_out_and_told(
    notes: dict[str, str], reason: str
) -> None:
    async with KubeApiServer() as server:
        bad = pod("bad", "10.0.0.1", annotations=notes, ports={"http": 8000})
        await server.put("pods", bad)
        await server.put("pods", pod("good", "10.0.0.2"))
        async with following(server) as told:
            await poll_until(lambda: told.ids == ["good"])
            assert reason in told.listing.bad["bad"]


async def test_endpoints_of_a_service_are_workers_named_after_their_pods() -> None:
    async with KubeApiServer() as server:
        await server.put(
            "endpointslices",
            endpoint_slice(
                "vllm-abc",
                [
                    endpoint("10.0.0.1", "vllm-0", ready=True),
                    endpoint("10.0.0.2", "vllm-1", ready=None),
                    endpoint("10.0.0.3", "vllm-2", ready=False, serving=True, terminating=True),
                    endpoint("10.0.0.4", "vllm-3", ready=True, terminating=True),
                    endpoint("10.0.0.5"),
                ],
                port=8100,
            ),
        )
        await server.put(
            "endpointslices", endpoint_slice("web", [endpoint("1.1.1.1")], service="w")
        )
        async with following(server, service="vllm", port="http") as told:
            ids = ["10.0.0.5:8100", "vllm-0", "vllm-1", "vllm-2", "vllm-3"]
            await poll_until(lambda: told.ids == ids)
            assert told.ready_ids == ["10.0.0.5:8100", "vllm-0", "vllm-1"]
            assert (told.listing.found or ())[1].worker.url == "http://10.0.0.1:8100"


@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
async def test_an_endpoint_in_two_slices_is_one_worker_and_the_ready_one_counts(
    order: tuple[str, str],
) -> None:
    async with KubeApiServer() as server:
        for name in order:
            one = endpoint("10.0.0.1", "vllm-0", ready=name == "new", terminating=name == "old")
            await server.put("endpointslices", endpoint_slice(name, [one]))
        async with following(server, service="vllm") as told:
            await poll_until(lambda: told.ids == ["vllm-0"])
            assert told.ready_ids == ["vllm-0"]


async def test_long_lists_come_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.discovery.kube_api.PAGE", 3)
    async with KubeApiServer() as server:
        for number in range(8):
            await server.put("pods", pod(f"vllm-{number}", f"10.0.0.{number}"))
        async with following(server) as told:
            await poll_until(lambda: len(told.ids) == 8)
    assert sum("continue" in query for query, _ in server.seen) == 2


async def test_a_version_that_is_gone_leads_to_a_new_list() -> None:
    async with KubeApiServer() as server:
        await server.put("pods", pod("vllm-0", "10.0.0.1"))
        async with following(server) as told:
            await poll_until(lambda: server.num_watching == 1)
            await server.put("pods", pod("vllm-1", "10.0.0.2"))
            await poll_until(lambda: len(told.ids) == 2)
            await server.lose("pods", "vllm-0")
            await server.compact()
            await poll_until(lambda: told.ids == ["vllm-1"])
            assert told.listing.num_failures == 0


async def test_bookmarks_keep_a_quiet_watch_from_becoming_too_old() -> None:
    async with KubeApiServer() as server:
        server.bookmark_every_s = 0.02
        await server.put("pods", pod("vllm-0", "10.0.0.1"))
        async with following(server) as told:
            await poll_until(lambda: server.num_watching == 1)
            await server.put("pods", pod("web", "10.0.0.9", labels={"app": "web"}))
            version = str(server._version)
            await asyncio.sleep(0.1)
            await server.end_watches()
            watches = lambda: [q for q, _ in server.seen if "watch" in q]  # noqa: E731
            await poll_until(lambda: len(watches()) >= 2)
            assert watches()[1]["resourceVersion"] == version
            assert told.ids == ["vllm-0"]
            assert sum("watch" not in query for query, _ in server.seen) == 1


async def test_what_a_watch_missed_is_found_by_the_next_list() -> None:
    async with KubeApiServer() as server:
        await server.put("pods", pod("vllm-0", "10.0.0.1"))
        await server.put("pods", pod("vllm-1", "10.0.0.2"))
        async with following(server, watch_s=1, relist_s=0.05) as told:
            await poll_until(lambda: len(told.ids) == 2)
            await server.lose("pods", "vllm-0")
            await server.end_watches()
            await poll_until(lambda: told.ids == ["vllm-1"])


async def test_a_watch_that_falls_silent_ends_and_the_next_one_catches_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.discovery.kube_api.WATCH_SLACK_S", 0.0)
    async with KubeApiServer() as server:
        await server.put("pods", pod("vllm-0", "10.0.0.1"))
        async with following(server, watch_s=1) as told:
            await poll_until(lambda: server.num_watching == 1)
            server.fall_silent()
            await server.put("pods", pod("vllm-1", "10.0.0.2"))
            await asyncio.sleep(0.05)
            assert told.ids == ["vllm-0"]
            server.fall_silent(silent=False)
            await poll_until(lambda: told.ids == ["vllm-0", "vllm-1"])


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
async def test_refusals_keep_the_workers_and_are_told(status: int) -> None:
    async with KubeApiServer() as server:
        await server.put("pods", pod("vllm-0", "10.0.0.1"))
        async with following(server) as told:
            await poll_until(lambda: told.ids == ["vllm-0"])
            server.failures += [status] * 3
            await server.compact()
            await poll_until(lambda: not server.failures)
            await server.put("pods", pod("vllm-1", "10.0.0.2"))
            await poll_until(lambda: told.ids == ["vllm-0", "vllm-1"])
            assert told.listing.num_failures >= 3


async def test_an_api_that_is_away_keeps_the_workers() -> None:
    server = KubeApiServer()
    async with server:
        await server.put("pods", pod("vllm-0", "10.0.0.1"))
        access = Access(server.url, server.namespace)
        told = Told()
        source = KubernetesSource(config_of(), access=access, sleep=lambda _s: asyncio.sleep(0.01))
        task = asyncio.create_task(source.run(told.listing))
        await poll_until(lambda: server.num_watching == 1)
    await poll_until(lambda: told.listing.num_failures >= 2)
    assert told.ids == ["vllm-0"]
    async with server:
        await server.put("pods", pod("vllm-1", "10.0.0.2"))
        await poll_until(lambda: told.ids == ["vllm-0", "vllm-1"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


GARBAGE = {
    "no JSON": b"<html>",
    "no list": b"[]",
    "no metadata": b'{"items": []}',
    "items that are none": b'{"metadata": {"resourceVersion": "1"}, "items": [{"spec": 1}]}',
    "items of another shape": b'{"metadata": {"resourceVersion": "1"}, "items": 5}',
}


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_is_a_failure_and_no_crash(body: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    told = Told()
    access = Access(f"http://127.0.0.1:{port}", "llm")
    source = KubernetesSource(config_of(), access=access, sleep=lambda _s: asyncio.sleep(0.01))
    task = asyncio.create_task(source.run(told.listing))
    await poll_until(lambda: told.listing.num_failures >= 2)
    assert not task.done()
    assert told.listing.found is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    server.close()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "either selector"),
        ({"selector": "a=b", "service": "s"}, "either selector"),
        ({"selector": "a=b", "context": "c"}, "context needs kubeconfig"),
        ({"selector": "a=b", "resource": "pods"}, "Extra inputs"),
    ],
)
def test_what_does_not_go_together_is_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        KubernetesDiscovery.model_validate({"type": "kubernetes", **more})
