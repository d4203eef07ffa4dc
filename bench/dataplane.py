"""CPU per proxied request beside other routers, in one interleaved run.

``--peers`` is a folder with the load generator, the mock engines and the request packs (``load``,
``mock``, ``bodies/*.bin``) and, as far as they are to be compared, the peers' virtual environments
(``v-sgl``: sglang-router, ``v-vllmr12``: vllm-router) and a bare relay to one mock (``floor``):
what any process in between costs, whatever it does. Every router runs alone on CPU 0 while the
others are stopped; mocks and load are on CPU 1. What is quoted is the router process's own CPU
clock per request, and its ratio to each peer in the same round: wall time belongs to whoever else
uses the machine.

The first rounds of a scenario are cold for everybody: bodies that no router has seen. They are
listed apart. Streams: CPU per chunk with 300 open streams, and the TTFT that the router adds to the
mock's own at 50 streams a second.

With ``--compiled`` the gateway of a compiled wheel is measured beside that of the sources. With
``--python`` both run on another interpreter, whose environment has what the gateway needs: an
interpreter that was built without optimizations (``--enable-optimizations``), as pyenv builds them,
is slower than those of Debian and of the images.

    python -m bench.dataplane --peers /opt/dataplane --rounds 5
    WARMLANE_COMPILE=1 pip wheel --no-deps --wheel-dir dist .
    python -m bench.dataplane --peers /opt/dataplane --compiled dist/warmlane-*.whl
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MOCK_PORT = 9101
NUM_MOCKS = 4
OURS_PORT = 9500
COMPILED_PORT = 9501
RELAY_PORT = 9502
READY_S = 90.0
# A router that was stopped answers its probes and re-opens connections before it is measured.
RESUME_S = 0.4
# Load before what is counted by the generator; its CPU is divided by all requests all the same.
WARM_S = 0.3
CHUNKS = 101


@dataclass(frozen=True)
class Scenario:
    """A request pack and how it is sent; ``per`` is what the CPU is divided by."""

    bodies: str
    args: str
    interval_us: int = 0
    per: str = "tot"


SCENARIOS = {
    "1 KB": Scenario("ns_1k", "-c 32"),
    "32 KB": Scenario("ns_32k", "-c 32"),
    "128 KB": Scenario("ns_128k", "-c 16"),
    "multi-turn": Scenario("mt", "-c 32"),
    "chunk": Scenario("st_1k_100", f"-c 300 -s -e {CHUNKS}", 10_000, "totev"),
    "ttft": Scenario("st_1k_100", f"-r 50 -s -e {CHUNKS}", 10_000),
}


@dataclass
class Router:
    """One router's process, and what was measured of it: scenario -> rounds."""

    name: str
    port: int
    command: str
    is_ours: bool = False
    process: subprocess.Popen[bytes] | None = None
    rounds: dict[str, list[float]] = field(default_factory=dict)

    def tree(self) -> list[int]:
        """Return the ids of its processes."""
        found = [self.process.pid] if self.process else []
        for pid in found:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        for pid in self.tree():
            os.kill(pid, number)

    def cpu_s(self) -> float:
        """Return the CPU seconds of its processes so far."""
        # Linux: the clock id of another process's CPU time.
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self.tree())


def routers(
    peers: Path, folder: Path, front: str, compiled: Path | None, interpreter: str
) -> list[Router]:
    config = (ROOT / "bench" / "dataplane.yaml").read_text()
    config = config.replace("models/", f"{ROOT}/models/")
    if front:
        config = config.replace("port: 9500", f"port: 9500, front: {front}")
    (folder / "warmlane.yaml").write_text(config)
    serve = f"-m gateway serve --config {folder}/warmlane.yaml --port"
    ours = f"{interpreter} {serve} {OURS_PORT}"
    found = [Router("warmlane", OURS_PORT, ours, is_ours=True)]
    if compiled is not None:
        with zipfile.ZipFile(compiled) as wheel:
            wheel.extractall(folder / "compiled")
        # -P: not the sources of the working directory.
        ours = f"env PYTHONPATH={folder}/compiled {interpreter} -P {serve} {COMPILED_PORT}"
        found.append(Router("compiled", COMPILED_PORT, ours, is_ours=True))
    urls = " ".join(f"http://127.0.0.1:{MOCK_PORT + n}" for n in range(NUM_MOCKS))
    for name, port, where, module, quiet in (
        ("sglang-router", 9302, "v-sgl", "sglang_router", "--log-level warn"),
        ("vllm-router", 9308, "v-vllmr12", "vllm_router", "--log-level warning"),
    ):
        python = peers / where / "bin" / "python"
        if python.exists():
            command = f"{python} -m {module}.launch_router --host 127.0.0.1 --port {port}"
            command += f" --worker-urls {urls} --policy cache_aware"
            command += f" --prometheus-port {port + 20000} {quiet}"
            found.append(Router(name, port, command))
    if (peers / "floor").exists():
        found.append(Router("relay", RELAY_PORT, f"{peers}/floor {RELAY_PORT} {MOCK_PORT}"))
    return found


def get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return bytes(answer.read())


def wait_ready(router: Router) -> None:
    message = {"role": "user", "content": "hi"}
    body = {"model": "mock", "messages": [message], "max_tokens": 2, "stream": False}
    url = f"http://127.0.0.1:{router.port}/v1/chat/completions"
    headers = {"content-type": "application/json", "authorization": "Bearer sk-x"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    deadline_s = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=3) as answer:  # noqa: S310  # our own
                if b"choices" in answer.read():
                    return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(0.3)


def load(peers: Path, port: int, scenario: Scenario, seconds: float) -> dict[str, Any]:
    command = f"taskset -c 1 {peers}/load -p {port} -b {peers}/bodies/{scenario.bodies}.bin"
    command += f" -d {seconds} -w {WARM_S} {scenario.args}"
    done = subprocess.run(shlex.split(command), capture_output=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    if result["bad"] or result["err"]:
        print(f"{result['bad']} bad answers, {result['err']} errors", file=sys.stderr)
    return result


def measure(peers: Path, router: Router, name: str, seconds: float, direct: float) -> None:
    scenario = SCENARIOS[name]
    router.send(signal.SIGCONT)
    time.sleep(RESUME_S)
    begun_s = router.cpu_s()
    result = load(peers, router.port, scenario, seconds)
    cpu_s = router.cpu_s() - begun_s
    router.send(signal.SIGSTOP)
    value = cpu_s / max(1, result[scenario.per]) * 1e6
    if name == "ttft":
        value = result["ttft_p50"] - direct
    router.rounds.setdefault(name, []).append(value)


def report(found: list[Router], names: list[str], num_cold: int) -> None:
    ratios = [
        (mine, other)
        for mine in found
        for other in found
        if mine.is_ours and (not other.is_ours or mine.name == "compiled") and mine is not other
    ]
    print("| CPU us | " + " | ".join(f"{r.name} [min]" for r in found), end=" | ")
    print(" | ".join(f"{mine.name} / {other.name}" for mine, other in ratios), end=" | ")
    print("cold: " + ", ".join(r.name for r in found) + " |")
    print("|---" * (2 + len(found) + len(ratios)) + "|")
    for name in names:
        warm = {r.name: r.rounds[name][num_cold:] for r in found}
        cells = [f"{statistics.median(warm[r.name]):.1f} [{min(warm[r.name]):.1f}]" for r in found]
        for mine, other in ratios:
            pairs = zip(warm[mine.name], warm[other.name], strict=True)
            cells.append(f"{statistics.median(a / b for a, b in pairs if b):.2f}")
        cold = [f"{max(r.rounds[name][:num_cold], default=0.0):.0f}" for r in found]
        print(f"| {name} | " + " | ".join(cells) + " | " + " / ".join(cold) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4, help="warm rounds, the cold ones not")
    parser.add_argument("--cold", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", nargs="*", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--compiled", type=Path, help="a compiled wheel, to be measured too")
    parser.add_argument("--python", default=sys.executable, help="what our gateway runs on")
    parser.add_argument("--front", default="raw", help="server.front; empty = the default")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mock = subprocess.Popen(
            ["taskset", "-c", "1", f"{args.peers}/mock", str(MOCK_PORT), str(NUM_MOCKS)]
        )
        stack.callback(mock.terminate)
        found = routers(args.peers, folder, args.front, args.compiled, args.python)
        for router in found:
            log = stack.enter_context((folder / f"{router.name}.log").open("wb"))
            command = ["taskset", "-c", "0", *shlex.split(router.command)]
            router.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
            stack.callback(router.process.wait)
            stack.callback(router.send, signal.SIGTERM)
            stack.callback(router.send, signal.SIGCONT)
            wait_ready(router)
            router.send(signal.SIGSTOP)
        for name in args.only:
            scenario = SCENARIOS[name]
            get(MOCK_PORT, f"/mock_config?interval_us={scenario.interval_us}&ttft_us=0")
            for _ in range(args.cold + args.rounds):
                direct = 0.0
                if name == "ttft":
                    direct = load(args.peers, MOCK_PORT, scenario, args.seconds)["ttft_p50"]
                for router in random.sample(found, len(found)):
                    measure(args.peers, router, name, args.seconds, direct)
            report(found, [name], args.cold)
        print()
        report(found, args.only, args.cold)


if __name__ == "__main__":
    main()
