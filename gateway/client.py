"""How the commands talk to a running gateway's admin endpoints, and print what it says."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gateway.columns import aligned

if TYPE_CHECKING:
    import httpx

# An operator waits; a gateway that needs longer than this for an admin answer is in trouble.
TIMEOUT_S = 10.0
PARITY = {1: "equal", 0: "diverged", -1: "unknown"}
# Headings of the table of workers.
COLUMNS = (
    *("id", "pool", "mode", "tokens", "state", "in flight", "lag", "gaps"),
    *("gpu", "cpu", "disk", "remote", "since", "pull", "url"),
)


class NotThereError(ConnectionError):
    """The gateway answers, and has nothing under that path."""


def get_json(base: str, path: str, token: str | None) -> dict[str, Any]:
    """GET ``path`` and return the JSON object.

    Raises:
        ConnectionError: If the gateway is away or answers with an error; the message says which.
            ``NotThereError`` if it has no such path.
    """
    return _call("GET", base, path, None, token)


def get_text(base: str, path: str, token: str | None) -> str:
    """GET ``path`` and return the text; errors as in :func:`get_json`."""
    answer = _answer("GET", base, path, None, token)
    if answer.status_code >= 400:
        raise _refusal(answer.status_code, f"{base}{path}", answer.text[:200])
    return answer.text


def post_json(base: str, path: str, body: object, token: str | None) -> dict[str, Any]:
    """POST ``body`` to ``path`` and return the JSON object; errors as in :func:`get_json`."""
    return _call("POST", base, path, body, token)


def delete_json(base: str, path: str, token: str | None) -> dict[str, Any]:
    """DELETE ``path`` and return the JSON object; errors as in :func:`get_json`."""
    return _call("DELETE", base, path, None, token)


def may_use_proxy(base: str) -> bool:
    """Whether an operator's HTTP proxy may stand before a server: not between local processes."""
    return not ("127.0.0.1" in base or "localhost" in base)


def workers_table(workers: list[dict[str, Any]]) -> str:
    """Return the workers as an aligned table."""
    rows = [COLUMNS, *(_worker_row(worker) for worker in workers)]
    return "\n".join(aligned(rows, "l" * len(COLUMNS)))


def _worker_row(worker: dict[str, Any]) -> tuple[str, ...]:
    blocks, lag_s, epoch = worker["blocks"], worker.get("lag_s"), worker["epoch"]
    apart = " (apart)" if worker.get("is_apart") else ""
    return (
        worker["id"],
        worker["pool"],
        worker["mode"],
        PARITY[worker["parity"]],
        worker["state"] + apart,
        str(worker["in_flight"]),
        "-" if lag_s is None else f"{lag_s:.1f}s",
        "-" if worker["gaps"] is None else str(worker["gaps"]),
        *(str(blocks.get(tier, 0)) for tier in ("gpu", "cpu", "disk", "remote")),
        "-" if epoch is None else _time(epoch),
        worker.get("pull_style") or "-",
        worker["url"],
    )


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _call(method: str, base: str, path: str, body: object, token: str | None) -> dict[str, Any]:
    answer = _answer(method, base, path, body, token)
    try:
        data = answer.json()
    except ValueError:
        data = {}
    if answer.status_code >= 400 or not isinstance(data, dict):
        error = data.get("error") if isinstance(data, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        raise _refusal(answer.status_code, f"{base}{path}", message or answer.text[:200])
    return data


def _refusal(status: int, where: str, message: str) -> ConnectionError:
    kind = NotThereError if status == 404 else ConnectionError
    if status == 404 and message.startswith("No such path"):
        message += " Admin paths are on server.admin_port, where one is set."
    return kind(f"{where}: {status}: {message}")


def _answer(method: str, base: str, path: str, body: object, token: str | None) -> httpx.Response:
    import httpx  # 0.4 s to import: only when a command talks to a gateway

    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=may_use_proxy(base)) as client:
            content = None if body is None else json.dumps(body).encode()
            return client.request(method, base.rstrip("/") + path, content=content, headers=headers)
    except httpx.HTTPError as error:
        raise ConnectionError(f"{base}: no answer from the gateway: {error}") from error
