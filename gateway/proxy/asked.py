"""Requests to all paths but chat and text completions: what is read of them, and their ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from gateway.errors import InvalidRequest
from gateway.protocols.anthropic import check_max_tokens, to_chat
from gateway.protocols.multipart import FORM, model_of, parts_of
from gateway.protocols.responses import ResponseHomes, readable, routing_text
from gateway.proxy.body import parse_body
from gateway.proxy.headers import told_as_json
from gateway.proxy.speech import Speech
from gateway.proxy.transfers import form_without_transfers, without_transfers
from gateway.proxy.ways import MessagesWay, PassedOn, ResponsesWay, Way
from gateway.routing.dispatch import Inbound
from gateway.tenancy.salts import SALT_FIELDS

if TYPE_CHECKING:
    from gateway.front.exchange import Exchange
    from gateway.protocols.surfaces import SurfaceSpec
    from gateway.tenancy import Tenant

# Members that routing reads whatever the API.
_FOR_ROUTING = ("user", "prompt_cache_key", "warmlane", "stream", "model")


class Asked(NamedTuple):
    """A request as it was read.

    Attributes:
        inbound: What routing reads of it.
        body: The bytes that ``inbound.body`` stands for.
        way: How it is said to a worker; None = as a chat or text completion.
    """

    inbound: Inbound
    body: bytes
    way: Way | None = None


class Asking:
    """Reads requests; one per process, one event loop only.

    Attributes:
        speech: Which workers speak an API themselves.
        homes: Which worker keeps which response.
    """

    def __init__(self) -> None:
        self.speech = Speech()
        self.homes = ResponseHomes()

    async def read(
        self, spec: SurfaceSpec, exchange: Exchange, body: bytes, tenant: Tenant, request_id: str
    ) -> Asked:
        """Read a request to a path of ``spec``.

        Raises:
            InvalidRequest: If it names no model, or is not what its API asks for.
        """
        target = f"{exchange.path}?{exchange.query}" if exchange.query else exchange.path
        kind = exchange.headers.get("content-type") or ""
        if spec.way == "pass" and kind.lower().startswith(FORM):
            parts = await parts_of(body, kind)
            if not tenant.may_transfer:
                also = () if tenant.may_salt and not tenant.salt else SALT_FIELDS
                kept = form_without_transfers(body, parts, also)
                if kept is not body:
                    body, parts = kept, await parts_of(kept, kind)
            field = model_of(body, parts)
            document = {"model": field.value}
            inbound = _inbound("none", document, exchange, tenant, request_id)
            return Asked(inbound, body, PassedOn(target, None, field))
        document = parse_body(body, "messages" if spec.way == "messages" else "other")
        if not tenant.may_transfer:
            exchange.head = told_as_json(exchange.head)
            body, document = without_transfers(body, document)
        if spec.way == "messages":
            return self._messages(document, target, body, exchange, tenant, request_id)
        if spec.way == "responses":
            return self._responses(document, target, body, exchange, tenant, request_id)
        inbound = _inbound("none", document, exchange, tenant, request_id)
        return Asked(inbound, body, PassedOn(target, document))

    def _messages(
        self,
        document: dict[str, Any],
        target: str,
        body: bytes,
        exchange: Exchange,
        tenant: Tenant,
        request_id: str,
    ) -> Asked:
        refusal = None
        try:
            check_max_tokens(document)
            read = to_chat(document)
            chat: bytes | None = orjson.dumps(read)
        except InvalidRequest as error:
            chat, refusal = None, error
        if chat is None:
            read = {name: document[name] for name in _FOR_ROUTING if name in document}
        way = MessagesWay(target, document, body, chat, refusal, self.speech)
        surface = "text" if chat is None else "chat"
        inbound = _inbound(surface, read, exchange, tenant, request_id)
        return Asked(inbound, body if chat is None else chat, way)

    def _responses(
        self,
        document: dict[str, Any],
        target: str,
        body: bytes,
        exchange: Exchange,
        tenant: Tenant,
        request_id: str,
    ) -> Asked:
        read, surface = readable(document), "chat"
        if read is None:
            read = {name: document[name] for name in _FOR_ROUTING if name in document}
            read["prompt"], surface = routing_text(document), "text"
        inbound = _inbound(surface, read, exchange, tenant, request_id)
        inbound.is_fixed = True
        inbound.pinned = self.homes.find(tenant.name, document.get("previous_response_id"))
        way = ResponsesWay(target, document, self.speech, self.homes, tenant.name)
        return Asked(inbound, body, way)


def _inbound(
    surface: Any, document: dict[str, Any], exchange: Exchange, tenant: Tenant, request_id: str
) -> Inbound:
    inbound = Inbound(
        surface, document, exchange.headers, document["model"], tenant.name, request_id
    )
    inbound.salt = tenant.salting(document)
    return inbound
