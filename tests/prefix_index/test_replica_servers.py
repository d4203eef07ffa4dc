"""The same on every kind of server: Valkey, Redis 7, a cluster node, behind Sentinels, over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from prefix_index.replica.link import Link
from prefix_index.replica.shared_map import SharedMap
from tests.prefix_index.replica_parts import Engine, Gateway, converge, running
from tests.support import free_port, poll_until
from tests.valkey import Valkey, binary_of, server_binaries

REDIS = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(REDIS is None, reason="needs Debian's redis-server")


@contextlib.contextmanager
def server(*options: str, binary: str | None = None) -> Iterator[Valkey]:
    with tempfile.TemporaryDirectory(prefix="wl-valkey-") as folder:
        found = Valkey(Path(folder), *options, binary=binary)
        found.start()
        try:
            yield found
        finally:
            found.stop()


async def share(url: str, *, namespace: str = "t") -> None:
    """Let two gateways share an index there: all scripts, a stream, a scan, a hand-over."""
    engines = [Engine("w"), Engine("host:8000")]
    one = Gateway(url, engines, name="one", namespace=namespace)
    two = Gateway(url, engines, name="two", namespace=namespace)
    async with running(one):
        await poll_until(lambda: all(one.holds_lease(engine.worker) for engine in engines))
        for engine in engines:
            engine.store([10, 20, 30])
        async with running(two):
            await converge([one, two], engines)
            for engine in engines:
                engine.remove([30])
                engine.store([10, 20, 40], medium="CPU")
            await converge([one, two], engines)
            await one.stop()
            await poll_until(lambda: all(two.holds_lease(engine.worker) for engine in engines))
            for engine in engines:
                engine.store([50])
            await converge([two], engines)
            two.replica.remove("w")
            gone = two.replica.leases.keys("w")
            await poll_until(lambda: _is_gone(two, gone))


async def _is_gone(gateway: Gateway, keys: list[str]) -> bool:
    return not await gateway.link.client.exists(*keys)


@pytest.mark.parametrize("kind", server_binaries())
async def test_an_index_is_shared_on(kind: str) -> None:
    with server(binary=binary_of(kind)) as found:
        await share(found.url)


@pytest.mark.parametrize("kind", server_binaries())
async def test_no_command_crosses_slots_on_a_cluster_node(kind: str) -> None:
    """A node of a cluster refuses commands whose keys are in different slots."""
    # By itself the bus takes the port 10,000 above, which there need not be.
    options = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
    options += ("--cluster-port", str(free_port()))
    with server(*options, binary=binary_of(kind)) as found:
        with found.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

            def is_ready() -> bool:
                return b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO")

            await poll_until(is_ready)
            with pytest.raises(redis.ResponseError, match="slot"):
                client.mget("a", "b")
        await share(found.url, namespace="{odd}:name")
        link = Link(found.url, namespace="t", timeout_s=1.0)
        heard: list[bytes] = []
        shared = SharedMap(
            link, "orders", max_entries=9, first_wins=True, on_entry=lambda k, v: heard.append(v)
        )
        gateway = Gateway(found.url, [], name="one")
        gateway.link = link
        async with running(gateway):
            task = asyncio.create_task(shared.run())
            shared.put(b"k", b"v")
            await poll_until(lambda: heard == [b"v"])
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("kind", server_binaries())
async def test_a_password_opens_the_server_and_a_wrong_one_is_an_outage(kind: str) -> None:
    with server("--requirepass", "s3cret", binary=binary_of(kind)) as found:
        address = found.url.removeprefix("redis://")
        wrong = Gateway(f"redis://:wrong@{address}", [Engine("w")], name="wrong")
        async with running(wrong):
            await poll_until(lambda: wrong.link.errors.total() >= 2)
            assert not wrong.link.is_up
        await share(f"redis://:s3cret@{address}")


@needs_redis
async def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path)
    port = free_port()
    options = (
        *("--tls-port", str(port), "--tls-cert-file", str(certificate)),
        *("--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate)),
        *("--tls-auth-clients", "no"),
    )
    with server(*options, binary=REDIS):
        await share(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}")
        stranger = Link(f"rediss://127.0.0.1:{port}/0", namespace="t", timeout_s=1.0)
        gateway = Gateway("redis://h", [], name="stranger")
        gateway.link = stranger
        async with running(gateway):
            await poll_until(lambda: stranger.errors.total() >= 1)
            assert not stranger.is_up


@needs_redis
async def test_a_service_behind_sentinels_is_found_and_followed_to_its_new_master() -> None:
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(server(binary=REDIS))
        follower = stack.enter_context(
            server("--replicaof", f"127.0.0.1 {master.port}", binary=REDIS)
        )
        port = stack.enter_context(sentinel(master.port))
        url = f"redis+sentinel://127.0.0.1:{port}/fleet/0"
        with follower.client() as client:
            await poll_until(lambda: client.info("replication")["master_link_status"] == "up")
        with redis.Redis(port=port, protocol=2) as watcher:
            await poll_until(lambda: len(watcher.sentinel_slaves("fleet")) == 1, deadline_s=30)
        engine = Engine("w")
        one, two = (Gateway(url, [engine], name=name) for name in ("one", "two"))
        async with running(one, two):
            engine.store([10, 20])
            await converge([one, two], [engine])
            master.stop()
            with follower.client() as client:
                await poll_until(
                    lambda: client.info("replication")["role"] == "master", deadline_s=40
                )
            await poll_until(
                lambda: {one.role("w"), two.role("w")} == {"hold", "tail"}, deadline_s=30
            )
            engine.store([10, 30])
            await converge([one, two], [engine])


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Return a key and a certificate for loopback that it signs itself."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return key, certificate


@contextlib.contextmanager
def sentinel(master_port: int) -> Iterator[int]:
    """Start one Sentinel that watches a master under the name ``fleet``."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="wl-sentinel-") as folder:
        config = Path(folder) / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
            f"sentinel monitor fleet 127.0.0.1 {master_port} 1\n"
            "sentinel down-after-milliseconds fleet 1000\n"
            "sentinel failover-timeout fleet 5000\n"
        )
        process = subprocess.Popen(
            [str(REDIS), str(config), "--sentinel"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            yield port
        finally:
            process.kill()
            process.wait()
