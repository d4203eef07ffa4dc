"""How requests that are not chat or text completions are said to a worker.

A way stands in for ``outbound``: it says for each attempt where the request goes, in which form,
and how the answer is to be read. One object per request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import orjson

from gateway.errors import InvalidRequest
from gateway.protocols.anthropic import MessageStream, to_message
from gateway.protocols.errors import NotSupported, anthropic_body, message_of
from gateway.protocols.events import parsed
from gateway.protocols.multipart import Field, with_model
from gateway.proxy.hearing import Hearing
from gateway.proxy.outbound import OffloadPut, Outbound, outbound, put_in, with_rank
from gateway.routing.dispatch import Plan, Ticket
from gateway.tenancy.salts import SALT_FIELD, SALT_FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.protocols.responses import ResponseHomes
    from gateway.proxy.speech import Speech

CHAT_PATH = "/v1/chat/completions"
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"


class Sent(NamedTuple):
    """What there is to say.

    Attributes:
        plan: The request.
        ticket: Of this attempt.
        headers: Header lines that came from the client.
        body: The body in the form in which it was planned.
        offload_put: Caps what is offloaded; None = nothing is capped.
    """

    plan: Plan
    ticket: Ticket
    headers: bytes
    body: bytes
    offload_put: OffloadPut | None


class Way(Protocol):
    """Says one request to workers."""

    async def say(self, sent: Sent) -> Outbound:
        """Return the request as the chosen worker gets it.

        Raises:
            GatewayError: If it cannot be said to that worker.
        """


class PassedOn:
    """Passes a request on unread, but for the name of the model.

    Args:
        target: Path and query.
        document: The parsed body; None of a form.
        field: Where a form names the model.
    """

    def __init__(
        self, target: str, document: Mapping[str, Any] | None, field: Field | None = None
    ) -> None:
        self._target = target
        self._document = document
        self._field = field

    async def say(self, sent: Sent) -> Outbound:
        """Return the request as the worker gets it."""
        headers, body = with_rank(sent.headers, sent.ticket), sent.body
        if self._field is not None:
            model = sent.plan.pool.aliases.get(self._field.value)
            body = body if model is None else with_model(body, self._field, model)
        elif self._document is not None:
            body = named_and_salted(sent.plan, body, self._document)
        hearing = Hearing("none", is_ours=False, passes_at_once=True)
        return Outbound(headers, body, None, self._target, hearing)


class ResponsesWay:
    """Passes a request to the responses API on to engines that speak it.

    Args:
        target: Path and query.
        document: The parsed body.
        speech: Knows who speaks it.
        homes: Remembers who made which response.
        tenant: Whose request it is.
    """

    def __init__(
        self,
        target: str,
        document: Mapping[str, Any],
        speech: Speech,
        homes: ResponseHomes,
        tenant: str,
    ) -> None:
        self._target = target
        self._document = document
        self._speech = speech
        self._homes = homes
        self._tenant = tenant

    async def say(self, sent: Sent) -> Outbound:
        """Return the request as the worker gets it.

        Raises:
            NotSupported: If it does not speak this API.
        """
        worker = sent.ticket.worker
        engine = sent.plan.pool.engine
        if not await self._speech.speaks(worker, engine, RESPONSES_PATH, sent.headers):
            raise NotSupported(
                f"The engines of the model {sent.plan.inbound.model!r} do not speak the responses "
                f"API; use {CHAT_PATH}."
            )
        body = named_and_salted(sent.plan, sent.body, self._document)

        def keep(said: dict[str, Any]) -> None:
            response = said.get("response")
            response = response if isinstance(response, dict) else said
            self._homes.keep(self._tenant, response.get("id"), worker.id)

        hearing = Hearing("responses", is_ours=False, kept=keep)
        return Outbound(with_rank(sent.headers, sent.ticket), body, None, self._target, hearing)


class MessagesWay:
    """Passes a request to the messages API on, or translates it to chat and the answer back.

    It is translated for engines that do not speak that API, and wherever the gateway has something
    to say that only the chat API can carry: a cache salt, an offload cap, a rewritten prompt.

    Args:
        target: Path and query.
        document: The parsed body.
        body: Its bytes.
        chat: The bytes of the chat request that stands for it; None if it cannot be translated.
        refusal: Why it cannot be.
        speech: Knows who speaks it.
    """

    def __init__(
        self,
        target: str,
        document: Mapping[str, Any],
        body: bytes,
        chat: bytes | None,
        refusal: InvalidRequest | None,
        speech: Speech,
    ) -> None:
        self._target = target
        self._document = document
        self._body = body
        self._chat = chat
        self._refusal = refusal
        self._speech = speech

    async def say(self, sent: Sent) -> Outbound:
        """Return the request as the worker gets it.

        Raises:
            InvalidRequest: If it must be translated and cannot be.
        """
        plan, worker = sent.plan, sent.ticket.worker
        chat = None
        if self._chat is not None:
            chat = outbound(plan, sent.ticket, sent.headers, sent.body, sent.offload_put)
        headers = sent.headers
        if not self._must_translate(sent, chat) and await self._speech.speaks(
            worker, plan.pool.engine, MESSAGES_PATH, headers
        ):
            body = named_and_salted(plan, self._body, self._document)
            hearing = Hearing("messages", is_ours=False)
            return Outbound(with_rank(headers, sent.ticket), body, None, self._target, hearing)
        if chat is None:
            raise self._refusal or InvalidRequest("The request cannot be translated.")
        chat.path, chat.hearing = CHAT_PATH, Hearing(translation=_ToMessages(plan, self))
        return chat

    def _must_translate(self, sent: Sent, chat: Outbound | None) -> bool:
        """Whether something is to be said that engines know only of a chat."""
        if sent.plan.inbound.salt:
            return True
        is_rewritten = sent.body is not self._chat
        return chat is not None and (is_rewritten or chat.offload_tokens is not None)

    @property
    def stop_sequences(self) -> tuple[str, ...]:
        """Those of the request that are text."""
        given = self._document.get("stop_sequences")
        return tuple(s for s in given or () if isinstance(s, str)) if _is_list(given) else ()


class _ToMessages:
    """Translates the answer to one request back."""

    def __init__(self, plan: Plan, way: MessagesWay) -> None:
        self._plan = plan
        self._way = way

    def body(self, status: int, body: bytes) -> bytes:
        if status >= 400:
            return anthropic_body(status, message_of(body))
        return to_message(
            parsed(body), model=self._plan.inbound.model, stop_sequences=self._way.stop_sequences
        )

    def events(self) -> MessageStream:
        plan = self._plan
        return MessageStream(
            model=plan.inbound.model,
            stop_sequences=self._way.stop_sequences,
            input_tokens=0 if plan.prompt is None else plan.num_tokens,
        )


def named_and_salted(plan: Plan, body: bytes, given: Mapping[str, Any]) -> bytes:
    """Return a body that is passed on with the engine's name of the model, and the tenant's salt.

    Args:
        plan: The request.
        body: As the client sent it.
        given: What a parser reads of it.
    """
    put: dict[str, bytes] = {}
    model, salt = plan.pool.aliases.get(plan.inbound.model), plan.inbound.salt
    if model is not None:
        put["model"] = orjson.dumps(model)
    drop = [name for name in ("warmlane",) if name in given]
    if salt is not None:
        drop += [
            name for name in SALT_FIELDS if name in given and not (salt and name == SALT_FIELD)
        ]
        if salt:
            put[SALT_FIELD] = orjson.dumps(salt)
    return put_in(body, given, put, drop)


def _is_list(value: object) -> bool:
    return isinstance(value, list)
