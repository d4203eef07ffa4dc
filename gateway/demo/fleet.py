"""The demo's processes: two engines and a gateway, started as a user would start them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = "smollm2"
WORKERS = ("w0", "w1")
# The first health answer waits for the weights; two engines load at once on two cores.
START_DEADLINE_S = 180.0


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@contextlib.contextmanager
def fleet(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start engines and gateway, yield the gateway's process once all are ready, stop all.

    Raises:
        DemoError: If the port is taken, or a process stops or is not ready in time; its last words
            are in the message.
    """
    _require_free(port)
    ports = _free_ports(3 * len(WORKERS))
    config = folder / "gateway.json"
    config.write_text(json.dumps(_gateway_config(port, ports)))
    with contextlib.ExitStack() as stack:
        commands = {worker: _runner_command(ports, i) for i, worker in enumerate(WORKERS)}
        commands["gateway"] = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
        processes = {
            name: stack.enter_context(_process(folder / f"{name}.log", command))
            for name, command in commands.items()
        }
        _wait_ready(f"http://127.0.0.1:{port}", processes, folder)
        yield processes["gateway"]


def _require_free(port: int) -> None:
    """Refuse a port that is taken: a gateway there would answer in place of ours."""
    with socket.socket() as probe:
        # As the gateway listens: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise DemoError(f"port {port}: {error.strerror}; --port N picks another one") from error


def _gateway_config(port: int, ports: list[int]) -> dict[str, Any]:
    workers = [
        {
            "id": worker,
            "url": f"http://127.0.0.1:{ports[3 * index]}",
            "kv_events": f"tcp://127.0.0.1:{ports[3 * index + 1]}",
            "kv_replay": f"tcp://127.0.0.1:{ports[3 * index + 2]}",
        }
        for index, worker in enumerate(WORKERS)
    ]
    pool = {"name": "demo", "models": [MODEL], "engine": "runner", "workers": workers}
    return {"server": {"host": "127.0.0.1", "port": port}, "pools": [pool]}


def _runner_command(ports: list[int], index: int) -> list[str]:
    http, events, replay = ports[3 * index : 3 * index + 3]
    return [
        *(sys.executable, "-m", "runner", "--model", MODEL, "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(http), "--dtype", "bfloat16"),
        *("--kv-events", f"tcp://127.0.0.1:{events}", "--kv-replay", f"tcp://127.0.0.1:{replay}"),
    ]


@contextlib.contextmanager
def _process(log_path: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` with its talk in a file; stop it politely, then firmly, on the way out."""
    with log_path.open("wb") as log:
        # A session of its own: Ctrl-C reaches the demo alone, which then stops its children.
        process = subprocess.Popen(  # noqa: S603  # our own commands
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(base: str, processes: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
    import httpx  # 0.4 s to import: only when the demo runs

    end = time.monotonic() + START_DEADLINE_S
    with httpx.Client(base_url=base, timeout=2) as client:
        while time.monotonic() < end:
            if stopped := [name for name, p in processes.items() if p.poll() is not None]:
                raise DemoError(f"{', '.join(stopped)} stopped:\n{_talk(folder)}")
            with contextlib.suppress(httpx.TransportError):
                workers = client.get("/admin/v1/workers")
                if workers.status_code == 200 and _all_ready(workers.json()):
                    return
            time.sleep(0.1)
    raise DemoError(f"not ready after {START_DEADLINE_S:.0f} s:\n{_talk(folder)}")


def _all_ready(answer: dict[str, Any]) -> bool:
    return all(worker["ready"] and worker["mode"] == "exact" for worker in answer["workers"])


def _talk(folder: Path) -> str:
    """Return the last lines of every child's log."""
    return "\n".join(
        f"--- {path.stem}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-8:])
        for path in sorted(folder.glob("*.log"))
    )


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
