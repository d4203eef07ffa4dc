"""The operators' port speaks TLS where it is told to, with one process and with several."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import httpx
import pytest
import trustme

from gateway.serve import Gateway
from gateway.settings import ConfigError, load
from tests.fakes.engine import openai_engine
from tests.gateway.test_supervisor import serving
from tests.support import free_port, poll_until
from tests.valkey import Valkey, valkey

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["valkey"]

POOLS = [{"name": "chat", "models": ["m"], "workers": [{"id": "w0", "url": "http://127.0.0.1:1"}]}]


def issue(ca: trustme.CA, folder: Path) -> dict[str, str]:
    """Write a certificate for this machine and its key."""
    issued = ca.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return {"cert": str(folder / "cert.pem"), "key": str(folder / "key.pem")}


def trusting(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


async def status(url: str, verify: ssl.SSLContext) -> int | None:
    """Return the status of the metrics; None if nobody speaks that language there."""
    async with httpx.AsyncClient(timeout=30, trust_env=False, verify=verify) as client:
        try:
            return (await client.get(url + "/metrics")).status_code
        except httpx.TransportError:
            return None


async def test_one_process_takes_up_a_renewed_certificate_there_too(tmp_path: Path) -> None:
    first, second, port = trustme.CA(), trustme.CA(), free_port()
    server = {"host": "127.0.0.1", "admin_port": port, "admin_tls": True}
    server["tls"] = issue(first, tmp_path)
    flags = {("pools",): POOLS, ("server",): server}
    gateway = Gateway(load(None, flags=flags, environ={})[0])
    await gateway.start()
    try:
        url = f"https://127.0.0.1:{port}"
        before = [await status(url, trusting(ca)) for ca in (first, second)]
        plain = await status(f"http://127.0.0.1:{port}", trusting(first))
        issue(second, tmp_path)
        assert gateway.tls is not None
        gateway.tls.reload()
        after = [await status(url, trusting(ca)) for ca in (first, second)]
    finally:
        await gateway.close()

    assert (before, plain, after) == ([200, None], None, [None, 200])


async def test_several_processes_speak_it_too(tmp_path: Path, valkey: Valkey) -> None:
    ca, port = trustme.CA(), free_port()
    options = {"admin_port": port, "admin_tls": True, "tls": issue(ca, tmp_path)}
    url = f"https://127.0.0.1:{port}"

    async def is_up() -> bool:
        return await status(url, trusting(ca)) == 200

    async with (
        openai_engine() as engine,
        serving(tmp_path, valkey, engine.url, wait=False, **options),
    ):
        await poll_until(is_up, deadline_s=60, what="the admin port answers over TLS")
        assert await status(f"http://127.0.0.1:{port}", trusting(ca)) is None
        assert await status(url, trusting(trustme.CA())) is None


@pytest.mark.parametrize(
    "server", [{"admin_tls": True, "admin_port": 1}, {"admin_tls": True, "tls": {}}]
)
def test_it_needs_a_port_and_a_certificate(server: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected admin_port and tls"):
        load(None, flags={("pools",): POOLS, ("server",): server}, environ={})
