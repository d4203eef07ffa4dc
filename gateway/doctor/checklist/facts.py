"""What the checklist judges: everything that a running gateway tells, asked for once.

What cannot be had is None or absent, and ``missing`` says why; the lines that need it are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gateway.client import get_json, get_text, post_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Document = dict[str, Any]

# Admin documents that are there or not; ``workers`` alone is needed.
DOCUMENTS: Mapping[str, str] = {
    "index": "/admin/v1/index",
    "misses": "/admin/v1/misses",
    "worth": "/admin/v1/worth",
    "documents": "/admin/v1/documents?limit=2048",
    "config": "/admin/v1/config",
}
# Self-tests at once: each takes seconds, and runners on one machine share its disk.
MAX_AT_ONCE = 8
# Long enough for several blocks of any usual size, and the same for every name.
PROBE_TEXT = "Warmlane asks where this text would be kept, and under which name. " * 12


@dataclass(slots=True)
class Facts:
    """Everything that was told.

    Attributes:
        workers: Rows of ``GET /admin/v1/workers``.
        documents: Name in ``DOCUMENTS`` -> document.
        metrics: Exposition text of the gateway; None if it could not be had.
        caches: Worker id -> what the runner says of its cache.
        selftests: Worker id -> what its self-test found; ``disk`` is None without a disk tier.
        hashes: Pool -> name that clients ask for -> block hashes of one same prompt.
        rules: Alert name -> health, of Prometheus; None if it was not asked.
        missing: What could not be had -> why.
    """

    workers: Sequence[Document]
    documents: dict[str, Document] = field(default_factory=dict)
    metrics: str | None = None
    caches: dict[str, Document] = field(default_factory=dict)
    selftests: dict[str, Document] = field(default_factory=dict)
    hashes: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    rules: dict[str, str] | None = None
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def pools(self) -> list[str]:
        """Names of the pools that have workers."""
        return list(dict.fromkeys(worker["pool"] for worker in self.workers))

    def of_pool(self, pool: str) -> list[Document]:
        """Return the workers of a pool."""
        return [worker for worker in self.workers if worker["pool"] == pool]

    def row(self, document: str, rows: str, pool: str) -> Document | None:
        """Return a pool's row of a document; None if there is none."""
        found = self.documents.get(document, {}).get(rows, ())
        return next((row for row in found if row["pool"] == pool), None)

    def why(self, name: str) -> str:
        """Say why something could not be had."""
        return self.missing.get(name, "the gateway does not tell")


def gather(
    gateway: str, token: str | None, prometheus: str | None, say: Callable[[str], None]
) -> Facts:
    """Ask a running gateway, its runners through it, and Prometheus if its address is given.

    Args:
        gateway: Base URL.
        token: The admin token.
        prometheus: Base URL.
        say: Told what takes a while.

    Raises:
        ConnectionError: If the gateway does not say which workers there are.
    """
    facts = Facts(get_json(gateway, "/admin/v1/workers", token)["workers"])
    ask = _Asking(facts)
    for name, path in DOCUMENTS.items():
        ask.into(facts.documents, name, lambda path=path: get_json(gateway, path, token))  # type: ignore[misc]
    facts.metrics = ask.value("metrics", lambda: get_text(gateway, "/metrics", token))
    say(f"self-tests of {len(facts.workers)} workers (disk tiers only; some seconds)")
    with ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        list(threads.map(lambda worker: _ask_worker(ask, gateway, token, worker), _hosts(facts)))
    _ask_hashes(ask, gateway, token)
    if prometheus is not None:
        facts.rules = ask.value("rules", lambda: rules_of(prometheus))
    return facts


def rules_of(prometheus: str) -> dict[str, str]:
    """Return the alerting rules that Prometheus evaluates, with the health of each.

    Source: https://prometheus.io/docs/prometheus/latest/querying/api/#rules

    Raises:
        ConnectionError: If it does not answer as Prometheus does.
    """
    answer = get_json(prometheus, "/api/v1/rules?type=alert", None)
    try:
        rules = [rule for group in answer["data"]["groups"] for rule in group["rules"]]
        found = {rule["name"]: rule["health"] for rule in rules}
        # Of several rules of one name the one that does not work is told.
        return found | {r["name"]: r["health"] for r in rules if r["health"] == "err"}
    except (KeyError, TypeError) as error:
        raise ConnectionError(f"{prometheus}: its answer is not that of Prometheus") from error


class _Asking:
    """Asks, and notes what was not answered."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def value(self, name: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except (ConnectionError, KeyError, TypeError) as error:
            self.facts.missing[name] = str(error)
            return None

    def into(self, target: dict[str, Any], name: str, ask: Callable[[], Any]) -> None:
        value = self.value(name, ask)
        if value is not None:
            target[name] = value


def _hosts(facts: Facts) -> list[Document]:
    """Return one worker for each address: ranks share one."""
    by_url = {worker["url"]: worker for worker in reversed(facts.workers)}
    return list(by_url.values())


def _ask_worker(ask: _Asking, gateway: str, token: str | None, worker: Document) -> None:
    facts, name = ask.facts, worker["id"]
    path = f"/admin/v1/workers/{quote(name, safe='')}"
    ask.into(facts.caches, name, lambda: get_json(gateway, f"{path}/cache", token))
    if "disk" in facts.caches.get(name, {}).get("tiers", {}):
        selftest = f"{path}/selftest"
        ask.into(facts.selftests, name, lambda: post_json(gateway, selftest, {}, token))
        if name not in facts.selftests:
            facts.missing[f"selftest of {name}"] = facts.missing[name]


def _ask_hashes(ask: _Asking, gateway: str, token: str | None) -> None:
    """Have the same prompt explained for the model and for each adapter of each pool."""
    facts = ask.facts
    for pool in facts.documents.get("index", {}).get("pools", ()):
        adapters = sorted({name for w in facts.of_pool(pool["pool"]) for name in w["adapters"]})
        if not adapters or not pool["models"]:
            continue
        for model in (pool["models"][0], *adapters):
            body = {"model": model, "messages": [{"role": "user", "content": PROBE_TEXT}]}
            found = ask.value(
                f"explanation for {model}",
                lambda body=body: post_json(gateway, "/admin/v1/explain", body, token),  # type: ignore[misc]
            )
            if found is not None and found.get("pool") == pool["pool"]:
                facts.hashes.setdefault(pool["pool"], {})[model] = found["block_hashes"]
