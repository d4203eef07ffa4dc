"""Two real runners that hand each other KV: named by the client, chosen by the gateway, killed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.e2e.fleet import Fleet, Process, Runner, make_runner, wait_for
from tests.support import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
DEADLINE_S = 180.0
BLOCK = 16


class Proxy:
    """Forwards TCP to a peer and calls ``on_bytes`` once so many have come back.

    Attributes:
        url: Where it listens.
    """

    def __init__(self, port: int, num_bytes: int, on_bytes: Callable[[], object]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._port = port
        self._left = num_bytes
        self._on_bytes = on_bytes
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        far_end = "127.0.0.1", self._port
        with near, suppress(OSError), socket.create_connection(far_end) as far:
            pump = threading.Thread(target=self._pump, args=(near, far), daemon=True)
            pump.start()
            self._back(far, near)
            near.shutdown(socket.SHUT_RDWR)
            pump.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def _back(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._left -= len(data)
                if self._left < 0:
                    self._on_bytes()
                target.sendall(data)


def make_pair(folder: Path, model: Path) -> list[Runner]:
    """Return two runners that may pull from each other; the second also through a proxy."""
    pair = [make_runner(folder, f"peer-{k}", model) for k in range(2)]
    for one, other in (pair, pair[::-1]):
        one.args[one.args.index("--dtype") + 1] = "float32"
        one.args += ["--serve-peers", "--peer", other.url]
    return pair


@pytest.fixture(scope="module")
def fleet_of_peers(
    smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fleet, Proxy]]:
    folder = tmp_path_factory.mktemp("peers")
    pair = make_pair(folder, smollm2_dir)
    proxy = Proxy(pair[0].port, 20_000_000, pair[0].kill)
    pair[1].args += ["--peer", proxy.url]
    fleet = Fleet(folder, pair)
    try:
        for runner in pair:
            runner.start()
        for runner in pair:
            runner.wait_ready()
        yield fleet, proxy
    finally:
        proxy.close()
        for process in (*fleet.gateways, *pair):
            process.stop()


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(100, 20_000) for _ in range(num_tokens)]


def complete(base: str, prompt: list[int], **more: Any) -> httpx.Response:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 6, "temperature": 0, **more}
    headers = {"x-warmlane-explain": "1"}
    answer = httpx.post(f"{base}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    return answer


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


def cached_of(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def cache_of(runner: Process) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{runner.url}/cache", timeout=30).json()
    return answer


def pulled_blocks(runner: Process, url: str) -> int:
    return int(cache_of(runner)["peers"]["pulls"][url]["blocks"])


def is_at_rest(runner: Process) -> bool:
    blocks = cache_of(runner)["tiers"]["gpu"]["blocks"]
    return not (blocks["active"] or blocks["loading"] or blocks["pinned"])


def test_a_prefix_is_pulled_from_the_peer_that_the_request_names(
    fleet_of_peers: tuple[Fleet, Proxy],
) -> None:
    one, other = fleet_of_peers[0].runners
    prompt = prompt_of(1, 1040)
    expected = text_of(complete(one.url, prompt))
    source = {"url": one.url, "tokens": 1024}
    pulled = complete(other.url, prompt, kv_transfer_params={"source": source})

    assert (text_of(pulled), cached_of(pulled)) == (expected, 1024)
    figures = cache_of(other)["peers"]["pulls"][one.url]
    # One block more may have been fetched to see how quick the peer is.
    assert 64 <= figures["blocks"] <= 66
    assert figures["tokens"] == figures["blocks"] * BLOCK
    assert (figures["failed"], figures["seconds"] > 0) == (0, True)
    for runner in (one, other):
        wait_for(lambda runner=runner: is_at_rest(runner), "blocks are at rest")


def test_a_peer_that_is_not_allowed_is_refused(fleet_of_peers: tuple[Fleet, Proxy]) -> None:
    other = fleet_of_peers[0].runners[1]
    body = {
        "model": "smollm2",
        "prompt": [5, 6],
        "kv_transfer_params": {"source": {"url": f"http://127.0.0.1:{free_port()}", "tokens": 1}},
    }
    answer = httpx.post(f"{other.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "peer_not_allowed")


def test_the_gateway_sends_an_idle_worker_to_pull_what_a_busy_one_holds(
    fleet_of_peers: tuple[Fleet, Proxy],
) -> None:
    fleet, _ = fleet_of_peers
    gateway = fleet.gateway("pulling")
    one, other = fleet.runners
    # What a token costs is learned from requests that find nothing queued and end with the first.
    for seed in range(6):
        complete(gateway.url, prompt_of(100 + seed, 160 + 32 * seed), max_tokens=1)
    prefix = prompt_of(2, 2064)
    first = complete(gateway.url, prefix)
    holder = first.headers["x-warmlane-worker"]
    idle = "w1" if holder == "w0" else "w0"
    by_id = {"w0": one, "w1": other}
    holder_url = by_id[holder].url
    before = pulled_blocks(by_id[idle], holder_url)

    prompts = [prefix[:2048] + prompt_of(200 + k, 320) for k in range(8)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: complete(gateway.url, prompt), prompts))
    workers = [answer.headers["x-warmlane-worker"] for answer in answers]
    assert set(workers) == {holder, idle}
    # The idle one is priced with what it is sent to fetch, and fetches it from a busy source.
    sent = [a for a, worker in zip(answers, workers, strict=True) if worker == idle]
    assert max(int(answer.headers["x-warmlane-hit-tokens"]) for answer in sent) >= 2048
    assert pulled_blocks(by_id[idle], holder_url) - before >= 2048 // BLOCK

    for prompt, answer in zip(prompts[-3:], answers[-3:], strict=True):
        again = complete(by_id[holder].url, prompt)
        assert text_of(again) == text_of(answer)
    # The index hears of the pulled blocks, and the next request is priced as a hit there.
    body = {"model": "smollm2", "prompt": prompts[0]}

    hits: dict[str, int] = {}

    def is_indexed() -> bool:
        told = httpx.post(f"{gateway.url}/admin/v1/explain", json=body, timeout=30).json()
        hits.update({c["worker"]: c["hit_tokens"]["gpu"] for c in told["candidates"]})
        return min(hits.values()) >= 2048

    wait_for(is_indexed, "both hold the prefix")


def test_a_source_that_is_killed_in_mid_pull_costs_time_and_no_text(
    fleet_of_peers: tuple[Fleet, Proxy],
) -> None:
    fleet, proxy = fleet_of_peers
    one, other = fleet.runners
    for gateway in fleet.gateways:
        gateway.stop()
    prompt = prompt_of(3, 1040)
    expected = text_of(complete(one.url, prompt))
    source = {"url": proxy.url, "tokens": 1024}
    answer = complete(other.url, prompt, kv_transfer_params={"source": source})

    assert one.child is None  # it was killed meanwhile
    assert text_of(answer) == expected
    assert 0 < cached_of(answer) < 1024
    # A probe of the dead peer may have failed since.
    assert cache_of(other)["peers"]["pulls"][proxy.url]["failed"] >= 1
    wait_for(lambda: is_at_rest(other), "blocks are at rest")
    assert text_of(complete(other.url, prompt)) == expected
