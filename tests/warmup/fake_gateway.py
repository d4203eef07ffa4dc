"""A gateway that can be made to show every fault: real HTTP over real sockets, no workers."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORKERS = ("w0", "w1")


@dataclass
class Fault:
    """What goes wrong with one request.

    Attributes:
        status: Answer with this instead of a stream.
        code: In the error body.
        message: In the error body.
        headers: Of the error.
        after_lines: Lines of the stream that still come.
        then: What happens behind them: ``die`` (connection reset), ``close`` (a clean end),
            ``stall`` (silence until the client leaves), ``garbage``, ``stopped`` (an early end).
    """

    status: int = 200
    code: str | None = None
    message: str = "no"
    headers: dict[str, str] = field(default_factory=dict)
    after_lines: int = 0
    then: str = "die"
    garbage: bytes = b"<html>not a gateway</html>\n"


@dataclass
class FakeGateway:
    """Places documents in turn, holds what it warmed, and follows its script of faults.

    Attributes:
        faults: The next requests' faults, None for a request that goes well.
        held: Documents by worker.
        begun: Documents whose turn came, the last one may wait.
        pause_after: So many are computed until ``gate`` is cleared.
        computed: (document, worker) in the order in which they were computed.
        requests: Bodies of all POSTs.
        refused: Documents it cannot take, with why.
        failing: (document, worker) that fail, with why.
        unproven: (document, worker) whose probe finds too little.
        pushed_out: The document that leaves when one is computed.
        placed: Fixed placements by document.
        gate: While clear, nothing is computed.
        token: Asked for, if set.
    """

    faults: deque[Fault | None] = field(default_factory=deque)
    held: dict[str, set[str]] = field(default_factory=lambda: {worker: set() for worker in WORKERS})
    begun: list[str] = field(default_factory=list)
    pause_after: int | None = None
    computed: list[tuple[str, str]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failing: dict[tuple[str, str], str] = field(default_factory=dict)
    unproven: dict[tuple[str, str], int] = field(default_factory=dict)
    pushed_out: dict[str, str] = field(default_factory=dict)
    placed: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    silent_about: set[str] = field(default_factory=set)
    hot: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    token: str | None = None
    max_items: int | None = None
    authorizations: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()
        fake = self

        class Handler(_Handler):
            gateway = fake

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def ids(self) -> list[list[str]]:
        """Return the documents of each POST."""
        return [[item["id"] for item in request.get("items", [])] for request in self.requests]

    def events(self, request: dict[str, Any]) -> Any:
        """Yield the events of one request, doing what they tell."""
        ids = [item["id"] for item in request.get("items", [])] or self.hot
        known = [i for i in ids if i not in self.refused and i not in self.silent_about]
        placements = [p for number, name in enumerate(known) for p in self._place(number, name)]
        refused = [{"id": i, "reason": self.refused[i]} for i in ids if i in self.refused]
        yield {"event": "plan", "placements": placements, "refused": refused, "totals": {}}
        for refusal in refused:
            yield {"event": "failed", "worker": None, **refusal}
        if not request["dry_run"]:
            for placement in placements:
                if placement["action"] == "warm":
                    yield from self._compute(placement)
        if request["verify"]:
            for placement in placements:
                if placement["action"] in ("warm", "skip_held"):
                    yield self._probe(placement)
        yield {"event": "end", "warm": 0, "partial": 0, "failed": 0, "stopped": False}

    def _place(self, number: int, name: str) -> list[dict[str, Any]]:
        if name in self.placed:
            return self.placed[name]
        holder = next((w for w in WORKERS if name in self.held[w]), None)
        return [
            {
                "id": name,
                "worker": holder or WORKERS[number % len(WORKERS)],
                "tier": "gpu",
                "tokens": 100,
                "bytes": 2048,
                "seconds": 0.5,
                "gain_s": 1.5,
                "action": "skip_held" if holder else "warm",
                "reason": None,
            }
        ]

    def _compute(self, placement: dict[str, Any]) -> Any:
        name, worker = placement["id"], placement["worker"]
        about = {"id": name, "worker": worker}
        yield {"event": "start", **about}
        self.begun.append(name)
        self.gate.wait()
        if reason := self.failing.get((name, worker)):
            yield {"event": "failed", **about, "reason": reason}
            return
        yield {"event": "progress", **about, "tokens": 50}
        self.computed.append((name, worker))
        self.held[worker].add(name)
        self.held[worker].discard(self.pushed_out.get(name, ""))
        if len(self.computed) == self.pause_after:
            self.gate.clear()
        counts = {"tokens": 100, "cached_tokens": 0, "computed_tokens": 100, "elapsed_s": 0.1}
        yield {"event": "done", **about, **counts}

    def _probe(self, placement: dict[str, Any]) -> dict[str, Any]:
        key = (placement["id"], placement["worker"])
        held = 100 if key[0] in self.held[key[1]] else 0
        cached = self.unproven.get(key, held)
        about = {"id": key[0], "worker": key[1], "wanted_tokens": 100}
        return {
            "event": "verified", **about, "cached_tokens": cached, "held_tokens": held,
            "warm": cached >= 100, "proven": True,
        }  # fmt: skip


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: Any) -> None:
        """Clients that were killed are part of the tests."""
        if not isinstance(sys.exception(), OSError):
            raise  # socketserver calls this while it handles the exception


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gateway: FakeGateway

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self._is_let_in():
            self._json(200, {"runs": self.gateway.runs})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if not self._is_let_in():
            return
        request = json.loads(body)
        self.gateway.requests.append(request)
        fault = self.gateway.faults.popleft() if self.gateway.faults else None
        most = self.gateway.max_items
        if most is not None and len(request["items"]) > most:
            fault = Fault(413, "too_many_items", "too many items")
        if fault is not None and fault.status != 200:
            error = {"message": fault.message, "type": "t", "param": None, "code": fault.code}
            self._json(fault.status, {"error": error}, fault.headers)
            return
        self._stream(request, fault)

    def _stream(self, request: dict[str, Any], fault: Fault | None) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/x-ndjson")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        run = {"run_id": request["run_id"], "state": "running", "documents": []}
        self.gateway.runs.insert(0, run)
        try:
            for number, event in enumerate(self.gateway.events(request)):
                if fault is not None and number == fault.after_lines:
                    self._break(fault)
                    return
                if event["event"] == "done":
                    run["documents"].append({**event, "state": "done"})
                self._chunk(json.dumps(event).encode() + b"\n")
            self._chunk(b"")
            run["state"] = "done"
        except OSError:
            self.close_connection = True
        finally:
            if run["state"] == "running":
                run["state"] = "stopped"

    def _break(self, fault: Fault) -> None:
        self.close_connection = True
        if fault.then == "close":
            self._chunk(b"")
        elif fault.then == "garbage":
            self._chunk(fault.garbage)
        elif fault.then == "stopped":
            self._chunk(b'{"event": "end", "stopped": true}\n')
            self._chunk(b"")
        elif fault.then == "stall":
            self.connection.recv(1)  # until the client leaves
        else:
            # A reset, as of a process that was killed.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _is_let_in(self) -> bool:
        given = self.headers["authorization"]
        self.gateway.authorizations.append(given)
        if self.gateway.token is None or given == f"Bearer {self.gateway.token}":
            return True
        # Worse than any gateway: it repeats what it was given.
        self._json(401, {"error": {"message": f"{given} is wrong", "code": None}})
        return False

    def _json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
