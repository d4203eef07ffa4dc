"""The usage of all gateways that share an index: each is asked when somebody wants to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from gateway.usage.document import merge_usage, with_replicas

if TYPE_CHECKING:
    from gateway.replicas.orders import Orders
    from gateway.usage.usage import Usage

KIND = "usage"


class _Row(msgspec.Struct):
    tenant: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    saved_s: float


class _Told(msgspec.Struct):
    """What another process says; it came through Redis, so that nothing is taken for granted."""

    since_unix_s: float
    now_unix_s: float
    tenants: list[_Row]


class FleetUsage:
    """What this process and the others used; event loop only.

    Args:
        usage: This process's.
        orders: Reaches the others; None = there is no Redis to reach them through.
    """

    def __init__(self, usage: Usage, orders: Orders | None) -> None:
        self._usage = usage
        self._orders = orders
        if orders is not None:
            orders.handlers[KIND] = lambda _body: self.own()

    def own(self) -> dict[str, Any]:
        """Return the usage of this process, with its id as ``replica``; None where it has none."""
        replica = None if self._orders is None else self._orders.gateway
        return {**self._usage.document(), "replica": replica}

    async def others(self) -> dict[str, Any]:
        """Return ``replicas``, what the others told by id, how many did not, and ``is_shared``."""
        if self._orders is None:
            return {"replicas": {}, "num_missing": 0, "is_shared": False}
        answers = await self._orders.ask(KIND, {})
        told = {name: _checked(document) for name, document in answers.documents.items()}
        good = {name: document for name, document in told.items() if document is not None}
        missing = answers.num_missing
        if missing is not None:
            missing += len(told) - len(good)
        return {"replicas": good, "num_missing": missing, "is_shared": True}

    async def document(self) -> dict[str, Any]:
        """Return ``GET /admin/v1/usage``: all that answer, added up."""
        others = await self.others()
        documents = [self.own(), *others["replicas"].values()]
        return with_replicas(
            merge_usage(documents),
            len(documents),
            others["num_missing"],
            is_shared=others["is_shared"],
        )


def _checked(document: dict[str, Any]) -> dict[str, Any] | None:
    try:
        told: dict[str, Any] = msgspec.to_builtins(msgspec.convert(document, _Told))
    except msgspec.ValidationError:
        return None
    return told
