"""How the Kubernetes API is reached: service accounts, certificates, tokens, kubeconfigs."""

from __future__ import annotations

import base64
import ssl
from typing import TYPE_CHECKING, Any

import pytest
import trustme
import yaml

from gateway.discovery.kube_access import Access, AccessError, from_kubeconfig, in_cluster
from tests.fakes.kube_api import KubeApiServer, pod
from tests.gateway.test_discovery_kube import following
from tests.support import free_port, poll_until

if TYPE_CHECKING:
    from pathlib import Path


async def test_the_token_is_read_again_when_the_kubelet_renews_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    async with KubeApiServer() as server:
        server.token = "old"  # noqa: S105
        await server.put("pods", pod("vllm-0", "10.0.0.1"))
        async with following(server, Access(server.url, "llm", token_file=token)) as told:
            await poll_until(lambda: told.ids == ["vllm-0"])
            server.token = "new"  # noqa: S105
            await server.compact()
            await poll_until(lambda: told.listing.num_failures >= 1)
            token.write_text("new\n")
            await server.put("pods", pod("vllm-1", "10.0.0.2"))
            await poll_until(lambda: told.ids == ["vllm-0", "vllm-1"])


async def test_in_a_cluster_the_service_account_is_used(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "namespace").write_text("llm\n")
    (tmp_path / "token").write_text("secret")
    async with KubeApiServer(ssl=context) as server:
        server.token = "secret"  # noqa: S105
        await server.put("pods", pod("vllm-0", "10.0.0.1"))
        environ = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(server.port),
        }
        access = in_cluster(environ, tmp_path)
        assert access.namespace == "llm"
        async with following(server, access) as told:
            await poll_until(lambda: told.ids == ["vllm-0"])


@pytest.mark.parametrize("missing", ["environment", "ca.crt", "namespace", "token"])
def test_a_pod_without_a_service_account_is_told_what_is_missing(
    tmp_path: Path, missing: str
) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "namespace").write_text("llm")
    (tmp_path / "token").write_text("secret")
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    if missing == "environment":
        environ = {}
    else:
        (tmp_path / missing).unlink()
    with pytest.raises(AccessError) as error:
        in_cluster(environ, tmp_path)
    assert (missing if environ else "KUBERNETES_SERVICE_HOST") in str(error.value)


def kubeconfig(folder: Path, server: str, user: dict[str, Any], **cluster: Any) -> str:
    path = folder / "config"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "llm"}},
            {"name": "there", "context": {"cluster": "c", "user": "u"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(document))
    return str(path)


@pytest.mark.parametrize("is_inline", [True, False])
async def test_a_kubeconfig_with_a_client_certificate_logs_in(
    tmp_path: Path, *, is_inline: bool
) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    client = authority.issue_cert("gateway@example.org")
    parts = {
        "certificate-authority": authority.cert_pem.bytes(),
        "client-certificate": b"".join(blob.bytes() for blob in client.cert_chain_pems),
        "client-key": client.private_key_pem.bytes(),
    }
    said: dict[str, Any] = {}
    for name, data in parts.items():
        if is_inline:
            said[f"{name}-data"] = base64.b64encode(data).decode()
        else:
            (tmp_path / name).write_bytes(data)
            said[name] = name
    user = {name: value for name, value in said.items() if name.startswith("client")}
    cluster = {name: value for name, value in said.items() if not name.startswith("client")}
    async with KubeApiServer(ssl=context) as server:
        await server.put("pods", pod("vllm-0", "10.0.0.1"))
        access = from_kubeconfig(kubeconfig(tmp_path, server.url, user, **cluster))
        async with following(server, access) as told:
            await poll_until(lambda: told.ids == ["vllm-0"])


async def test_a_kubeconfig_with_a_token_logs_in_by_the_chosen_context(tmp_path: Path) -> None:
    async with KubeApiServer(namespace="default") as server:
        server.token = "secret"  # noqa: S105
        await server.put("pods", pod("vllm-0", "10.0.0.1"))
        path = kubeconfig(tmp_path, server.url, {"token": "secret"})
        assert from_kubeconfig(path).namespace == "llm"
        async with following(server, from_kubeconfig(path, "there")) as told:
            await poll_until(lambda: told.ids == ["vllm-0"])


@pytest.mark.parametrize(
    ("user", "context", "reason"),
    [
        ({"exec": {"command": "aws"}}, None, "exec is not supported: expected a token"),
        ({"auth-provider": {"name": "gcp"}}, None, "auth-provider is not supported"),
        ({"username": "a", "password": "b"}, None, "not supported by Kubernetes any more"),
        ({}, "nowhere", "there is no context 'nowhere'"),
        ({"client-certificate-data": "%"}, None, "expected base64"),
        ({"client-certificate": "none", "client-key": "none"}, None, "No such file"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_says_why(
    tmp_path: Path, user: dict[str, Any], context: str | None, reason: str
) -> None:
    path = kubeconfig(tmp_path, f"https://127.0.0.1:{free_port()}", user)
    with pytest.raises(AccessError) as error:
        from_kubeconfig(path, context)
    assert reason in str(error.value)
    assert path in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "current-context: x", "a: [", "contexts: 7"])
def test_what_is_no_kubeconfig_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(AccessError, match="expected a kubeconfig"):
        from_kubeconfig(str(path))
