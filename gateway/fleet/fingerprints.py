"""Which workers of a pool are not what the others are: other weights, tokenizer or KV format.

Their answers differ, their KV cannot be exchanged, and one prompt has other tokens on them. So the
largest group that agrees serves, and the others only if nobody of it can.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import orjson

from gateway.errors import UpstreamError
from gateway.fleet.adapters import cards, fetch_models, take_adapters
from gateway.fleet.peers import PeerWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.routing.pool import Pool, Worker
    from gateway.upstream.client import Upstream

# A tokenizer is a few megabytes of JSON.
TOKENIZER_DEADLINE_S = 30.0


class Fingerprint(NamedTuple):
    """What a worker says it is; an empty part is not known and agrees with everything.

    Attributes:
        weights: Name of the model it loaded, without the place it was loaded from.
        tokenizer: Hex identity of tokenizer and template.
        kv_dtype: Type of its KV.
    """

    weights: str = ""
    tokenizer: str = ""
    kv_dtype: str = ""

    def to_text(self) -> str:
        """Return it as one text that no other fingerprint has; empty if nothing is known."""
        return orjson.dumps(list(self)).decode() if any(self) else ""

    @staticmethod
    def from_text(text: str) -> Fingerprint:
        """Read what ``to_text`` wrote."""
        return Fingerprint(*orjson.loads(text)) if text else Fingerprint()


class Difference(NamedTuple):
    """One part in which a worker differs from most of its pool, for ``doctor``."""

    worker: str
    part: str
    value: str
    usual: str

    def __str__(self) -> str:
        return f"{self.worker}: {self.part} is {self.value!r}, most of its pool has {self.usual!r}"


class Identity:
    """Keeps asking one engine what it is; used from the event loop only.

    Args:
        pool: Its pool.
        workers: Its workers, one for each rank; get adapters, fingerprint and peers. May change.
        upstream: Its connections.
        on_models: Told of each list of models that it gives.
    """

    def __init__(
        self,
        pool: Pool,
        workers: Sequence[Worker],
        upstream: Upstream,
        *,
        on_models: Callable[[object], object] = lambda _document: None,
    ) -> None:
        self._pool = pool
        self._workers = workers
        self._upstream = upstream
        self._on_models = on_models
        self._tokenizer: str | None = None
        self._peers = PeerWatch(pool, workers, upstream)

    def restarted(self) -> None:
        """Ask everything anew: the engine's process is another one."""
        self._tokenizer = None

    async def check(self, kv_dtype: str = "") -> None:
        """Ask, and write down the answers; what is not answered stays as it was.

        Args:
            kv_dtype: Type of its KV as its metrics tell it; empty if they do not.
        """
        document = await fetch_models(self._upstream)
        if document is None:
            return
        self._on_models(document)
        if self._tokenizer is None and self._pool.engine == "runner":
            self._tokenizer = await _fetch_tokenizer(self._upstream)
        fingerprint = Fingerprint(weights_of(document), self._tokenizer or "", kv_dtype)
        for worker in self._workers:
            take_adapters(self._pool, worker, document)
            tell(self._pool, worker, fingerprint)
        if self._pool.engine == "runner":
            await self._peers.check()


def weights_of(document: object) -> str:
    """Return which weights a list of models names: its first base model's root, without its place.

    Two hosts may keep one model in different folders, so only the last part of a path counts. A
    folder of Hugging Face's cache is named after a revision, so the model's name is taken there.
    """
    for card in cards(document):
        root = card.get("root")
        if card.get("parent") is None and isinstance(root, str):
            parts = [part for part in root.replace("\\", "/").split("/") if part]
            if len(parts) >= 3 and parts[-2] == "snapshots":
                return parts[-3].rpartition("--")[2].lower()
            return parts[-1].lower() if parts else ""
    return ""


def tell(pool: Pool, worker: Worker, fingerprint: Fingerprint) -> None:
    """Write down what a worker is, and part the pool anew if that changed."""
    text = fingerprint.to_text()
    if text != worker.fingerprint:
        worker.fingerprint = text
        regroup(pool)


def regroup(pool: Pool) -> None:
    """Set ``is_apart`` of all workers of a pool; call it also when workers came or went.

    The largest group serves; of two equally large ones that of the worker configured first.
    """
    workers = list(pool.workers.values())
    prints = _filled(workers)
    sizes = Counter(prints)
    # Of equal counts, the one seen first comes first.
    main = sizes.most_common(1)[0][0] if sizes else None
    for worker, fingerprint in zip(workers, prints, strict=True):
        worker.is_apart = fingerprint != main


def differences(pool: Pool) -> list[Difference]:
    """Return in what the workers that are apart differ from the group that serves."""
    workers = list(pool.workers.values())
    prints = _filled(workers)
    main = next((print_ for w, print_ in zip(workers, prints, strict=True) if not w.is_apart), None)
    if main is None:
        return []
    return [
        Difference(worker.id, part, value, usual)
        for worker, fingerprint in zip(workers, prints, strict=True)
        for part, value, usual in zip(Fingerprint._fields, fingerprint, main, strict=True)
        if worker.is_apart and value != usual
    ]


def _filled(workers: Sequence[Worker]) -> list[Fingerprint]:
    """Return all fingerprints, with what is not known taken from most of the others."""
    prints = [Fingerprint.from_text(worker.fingerprint) for worker in workers]
    usual = [_most_common(column) for column in zip(*prints, strict=True)]
    return [
        Fingerprint(*(part or common for part, common in zip(print_, usual, strict=True)))
        for print_ in prints
    ]


def _most_common(values: Sequence[str]) -> str:
    counts = Counter(value for value in values if value)
    return counts.most_common(1)[0][0] if counts else ""


async def _fetch_tokenizer(upstream: Upstream) -> str | None:
    """Ask a bundled runner for the identity of its tokenizer; None if it does not tell now."""
    try:
        response = await upstream.request(
            "GET",
            "/tokenizer",
            [],
            first_byte_s=TOKENIZER_DEADLINE_S,
            total_s=TOKENIZER_DEADLINE_S,
        )
        try:
            body = await response.read()
        finally:
            response.close()
        found = orjson.loads(body) if response.status == 200 else None
    except (UpstreamError, orjson.JSONDecodeError):
        return None
    value = found.get("fingerprint") if isinstance(found, dict) else None
    return value if isinstance(value, str) else None
