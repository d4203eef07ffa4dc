"""A purge of every gateway that shares the index, each of which forgets for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from gateway.errors import GatewayError
from gateway.warm.merge import merge_purges
from gateway.warm.purge import read_purge

if TYPE_CHECKING:
    from gateway.misses.report import MissReport
    from gateway.replicas.orders import Orders
    from gateway.warm.purge import Purge
    from gateway.warm.warmer import Warmer

KIND = "purge"
_ENGINES = "Engines drop KV as they evict it, and all of it with POST /admin/v1/workers/ID/reset."


class _Held(msgspec.Struct):
    pool: str
    worker: str
    prefixes: int
    tokens: int


class _Told(msgspec.Struct):
    """What another process says; it came through Redis, so that nothing is taken for granted."""

    removed: dict[str, int]
    still_held: list[_Held]


class Purging:
    """Purges here and elsewhere; event loop only.

    Args:
        warmer: Forgets.
        misses: Forgets likewise; None = there is no miss report.
        orders: Reaches the other processes; None = there is no Redis to reach them through.
    """

    def __init__(self, warmer: Warmer, misses: MissReport | None, orders: Orders | None) -> None:
        self._warmer = warmer
        self._misses = misses
        self._orders = orders
        if orders is not None:
            orders.handlers[KIND] = self._ordered

    async def everywhere(self, body: object) -> dict[str, Any]:
        """Return ``POST /admin/v1/purge``: what all that answer have removed.

        Args:
            body: Of the request.

        Raises:
            InvalidRequest: If it names neither a tenant nor a document.
        """
        told = [self._forget(read_purge(body))]
        missing: int | None = 0
        if self._orders is not None:
            # ``read_purge`` has checked that it is a mapping of two words.
            answers = await self._orders.ask(KIND, dict(body))  # type: ignore[call-overload]
            good = [found for found in map(_checked, answers.documents.values()) if found]
            missing = answers.num_missing
            if missing is not None:
                missing += len(answers.documents) - len(good)
            told += good
        whole = merge_purges(told)
        whole["replicas"] = {"purged": len(told), "missing": missing}
        whole["note"] = f"{self._reach(missing)} {_ENGINES}"
        return whole

    def _forget(self, order: Purge) -> dict[str, Any]:
        answer = self._warmer.purge(order)
        if self._misses is not None:
            answer["removed"]["miss_prompts"] = self._misses.forget(order.tenant, order.document)
        return answer

    def _ordered(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._forget(read_purge(body))
        except GatewayError:
            return {}  # counts as no answer

    def _reach(self, missing: int | None) -> str:
        if self._orders is None:
            return (
                "This gateway has forgotten it; without index.backend: redis it knows of no other "
                "one: ask each of them."
            )
        if missing is None:
            return (
                "This gateway has forgotten it; Redis is away, so no other one was reached: purge "
                "again when it is back."
            )
        if missing:
            return (
                f"{missing} gateway processes did not answer in time; they forget it when they "
                "read the order, unless they are gone. Purge again to be sure."
            )
        return "All gateway processes that share the index have forgotten it."


def _checked(document: dict[str, Any]) -> dict[str, Any] | None:
    try:
        told: dict[str, Any] = msgspec.to_builtins(msgspec.convert(document, _Told))
    except msgspec.ValidationError:
        return None
    return told
