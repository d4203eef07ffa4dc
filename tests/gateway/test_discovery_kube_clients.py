"""The fake API server is one that real clients accept, so what we see there is what they see."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.fakes.kube_api import KubeApiServer, endpoint, endpoint_slice, pod
from tests.tools import tool

if TYPE_CHECKING:
    from pathlib import Path


async def test_kubectl_lists_both_kinds(tmp_path: Path) -> None:
    async with KubeApiServer() as server:
        await server.put("pods", pod("vllm-0", "10.0.0.1"))
        await server.put("pods", pod("web", "10.0.0.2", labels={"app": "web"}))
        one = endpoint("10.0.0.1", "vllm-0", ready=True)
        await server.put("endpointslices", endpoint_slice("vllm-abc", [one]))
        for kind, expected in (
            ("pods", "pod/vllm-0"),
            ("endpointslices", "endpointslice.discovery.k8s.io/vllm-abc"),
        ):
            selector = "app=vllm" if kind == "pods" else "kubernetes.io/service-name=vllm"
            command = (str(tool("kubectl")), "--server", server.url, "-n", "llm", "get", kind)
            process = await asyncio.create_subprocess_exec(
                *(*command, "-l", selector, "-o", "name"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"HOME": str(tmp_path), "PATH": "/usr/local/bin:/usr/bin:/bin"},
            )
            out, error = await process.communicate()
            assert (process.returncode, error) == (0, b"")
            assert out.decode().split() == [expected]


async def test_kubernetes_asyncio_lists_and_watches_pods() -> None:
    client = pytest.importorskip("kubernetes_asyncio.client")
    watch = pytest.importorskip("kubernetes_asyncio.watch")
    configuration = client.Configuration(host="")
    async with KubeApiServer() as server:
        configuration.host = server.url
        await server.put("pods", pod("vllm-0", "10.0.0.1"))
        async with client.ApiClient(configuration) as api:
            core = client.CoreV1Api(api)
            found = await core.list_namespaced_pod("llm", label_selector="app=vllm")
            assert [(p.metadata.name, p.status.pod_ip) for p in found.items] == [
                ("vllm-0", "10.0.0.1")
            ]
            await server.put("pods", pod("vllm-1", "10.0.0.2"))
            async with watch.Watch() as watching:
                stream = watching.stream(
                    core.list_namespaced_pod,
                    "llm",
                    resource_version=found.metadata.resource_version,
                    timeout_seconds=10,
                )
                event = await anext(aiter(stream))
            assert (event["type"], event["object"].metadata.name) == ("ADDED", "vllm-1")
            discovery = client.DiscoveryV1Api(api)
            one = endpoint("10.0.0.1", "vllm-0", ready=True)
            await server.put("endpointslices", endpoint_slice("vllm-abc", [one]))
            slices = await discovery.list_namespaced_endpoint_slice("llm")
            assert slices.items[0].endpoints[0].addresses == ["10.0.0.1"]
