"""One warm-up request to one worker: a true token prefix of what clients will send, and one token.

It is booked like any other request, so that routing sees the load. What it computes counts neither
as a client's traffic nor as reuse.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from gateway.errors import ConnectFailed, FirstByteTimeout, ResetBeforeFirstByte, UpstreamError
from gateway.routing.dispatch import Inbound, Outcome, Usage
from gateway.routing.health import Breaker

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.proxy.limits import Limits
    from gateway.routing.dispatch import Dispatcher, Plan, Ticket
    from gateway.routing.pool import Pool, Worker
    from gateway.warm.shareable import Shareable

# One token's answer, with whatever an engine says around it.
MAX_ANSWER_BYTES = 1 << 20
# For one piece. The longest takes a second or so on a worker of known speed, and 2,048 tokens on
# the slowest ones a minute: who needs longer hangs.
MAX_ANSWER_S = 120.0
# A worker that failed is tried again after a second at first; one that keeps failing is given up.
MAX_EJECTED_S = 5.0
LOOK_S = 0.02
# Of what a worker says when it refuses; it may quote the prompt, so it is cut short.
MAX_REASON_CHARS = 200
# Members of a client's body that would make an answer longer, or another one.
_DROPPED = (
    *("stream_options", "max_completion_tokens", "n", "best_of", "logprobs", "top_logprobs"),
    *("prompt_logprobs", "echo", "warmlane", "ignore_eos", "min_tokens", "priority"),
)


class SendError(Exception):
    """A worker did not take or finish a warm-up request; the text says why.

    Attributes:
        is_hopeless: Whether the worker would not answer the next one either.
    """

    def __init__(self, reason: str, *, is_hopeless: bool = False) -> None:
        super().__init__(reason)
        self.is_hopeless = is_hopeless


@dataclass(frozen=True, slots=True)
class Sent:
    """What a worker made of one request.

    Attributes:
        prompt_tokens: Tokens of the prompt, as the worker counts; as sent if it does not say.
        cached_tokens: Those it had; None if it does not say.
        elapsed_s: From sending to the end of the answer.
    """

    prompt_tokens: int
    cached_tokens: int | None
    elapsed_s: float

    @property
    def computed_tokens(self) -> int:
        """Tokens it had to compute beside the one that any request takes; all if it is silent."""
        return max(0, self.prompt_tokens - 1 - (self.cached_tokens or 0))


class Sender:
    """Sends warm-up requests; event loop only.

    Args:
        dispatcher: Books them.
        limits: Deadlines.
        clock: Monotonic seconds, the dispatcher's.
        on_finish: Told of each attempt once it is over.

    Attributes:
        in_flight: Worker id -> tickets of ours that are under way there.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: Limits,
        clock: Callable[[], float],
        on_finish: Callable[[Plan, Ticket], None] | None = None,
    ) -> None:
        self.in_flight: dict[str, list[Ticket]] = {}
        self._dispatcher = dispatcher
        self._limits = limits
        self._clock = clock
        self._on_finish = on_finish

    def takes_pieces(self, pool: Pool) -> bool:
        """Whether a prompt can be sent to a pool's workers as token ids, and so in pieces."""
        return pool.engine != "openai"

    async def send(self, found: Shareable, worker_id: str, num_tokens: int) -> Sent:
        """Have a worker compute the first ``num_tokens`` of an item.

        Args:
            found: The item.
            worker_id: Where.
            num_tokens: At most ``found.num_tokens``; one more is sent. All of the item where the
                engine takes no token ids.

        Raises:
            SendError: If it did not.
        """
        pool, item = found.pool, found.item
        if self.takes_pieces(pool):
            # Slices copy: what is booked and sent is this piece alone.
            ids = found.token_ids[: num_tokens + 1]
            body: dict[str, Any] = {"model": item.model, "prompt": ids.tolist()}
            if item.salt:
                body["cache_salt"] = item.salt
            inbound = Inbound("completions", body, item.headers, item.model, tenant=item.tenant)
        else:
            inbound = Inbound(
                "chat" if item.is_chat else "completions",
                found.body,
                item.headers,
                item.model,
                tenant=item.tenant,
            )
        plan = await self._dispatcher.plan(pool, inbound, in_full=True)
        ticket, has_waited = await self._admit(plan, worker_id)
        path, sent = request_of(pool, ticket.worker, plan, found)
        ours = self.in_flight.setdefault(worker_id, [])
        ours.append(ticket)
        try:
            return await self._exchange(ticket, path, sent, plan.num_tokens)
        except SendError as error:
            # It had its second chance.
            error.is_hopeless = error.is_hopeless or has_waited
            raise
        finally:
            # Whatever ended it otherwise was on this side.
            ticket.finish(Outcome.CANCELLED)
            ours.remove(ticket)
            if not ours:
                self.in_flight.pop(worker_id, None)

    async def _admit(self, plan: Plan, worker_id: str) -> tuple[Ticket, bool]:
        """Book the request, once a worker that had failed may be tried again.

        While one request tries it, the others wait for what becomes of that.

        Returns:
            The ticket, and whether it had to wait for it.

        Raises:
            SendError: If the worker takes no requests.
        """
        until_s, has_waited = self._clock() + MAX_EJECTED_S, False
        while True:
            ticket = self._dispatcher.admit_own(plan, worker_id, self._on_finish)
            if ticket is not None:
                return ticket, has_waited
            worker, now_s = plan.pool.workers.get(worker_id), self._clock()
            if worker is None or worker.draining or not worker.health.ready:
                raise SendError(f"worker {worker_id} takes no requests: draining, away or gone")
            breaker = worker.health.breaker(now_s)
            if breaker is Breaker.CLOSED:
                raise SendError(f"worker {worker_id} takes no such requests")
            if breaker is Breaker.OPEN and now_s >= until_s:
                raise SendError(
                    f"worker {worker_id} is ejected after failures, and was not let back within "
                    f"{MAX_EJECTED_S:g} s",
                    is_hopeless=True,
                )
            has_waited = True
            await asyncio.sleep(LOOK_S)

    async def _exchange(self, ticket: Ticket, path: str, body: bytes, num_tokens: int) -> Sent:
        worker, limits = ticket.worker, self._limits
        if worker.upstream is None:
            raise SendError(f"worker {worker.id} has no connections")
        began_s = self._clock()
        try:
            response = await worker.upstream.request(
                "POST",
                path,
                headers_of(worker),
                body,
                first_byte_s=min(MAX_ANSWER_S, limits.first_byte_s),
                total_s=min(MAX_ANSWER_S, limits.request_s),
            )
            try:
                status, answer = response.status, await response.read(MAX_ANSWER_BYTES)
            finally:
                response.close()
        except UpstreamError as error:
            ticket.finish(_outcome(error))
            is_hopeless = isinstance(error, FirstByteTimeout)
            raise SendError(f"worker {worker.id}: {error}", is_hopeless=is_hopeless) from error
        except asyncio.CancelledError:
            ticket.finish(Outcome.CANCELLED)
            raise
        if status >= 400:
            ticket.finish(Outcome.UPSTREAM_ERROR if status >= 500 else Outcome.REJECTED)
            raise SendError(f"worker {worker.id} refused with {status}: {_said(answer)}")
        usage = usage_of(answer)
        if usage is None:
            ticket.finish(Outcome.UPSTREAM_ERROR)
            raise SendError(f"worker {worker.id} sent no completion; expected a JSON object")
        ticket.finish(Outcome.OK, usage)
        return Sent(
            num_tokens if usage.prompt_tokens is None else usage.prompt_tokens,
            usage.cached_tokens,
            self._clock() - began_s,
        )


def request_of(pool: Pool, worker: Worker, plan: Plan, found: Shareable) -> tuple[str, bytes]:
    """Return path and body of a warm-up request, in the way of the pool's engine.

    Source: vLLM's and the bundled runner's ``/v1/completions`` with token ids; SGLang's
    ``/generate``, the only one of its answers that always tells the cached tokens.
    """
    inbound = plan.inbound
    model = pool.aliases.get(inbound.model, inbound.model)
    if pool.engine == "sglang":
        native: dict[str, Any] = {
            "input_ids": inbound.body["prompt"],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }
        if plan.adapter:
            native["lora_path"] = plan.adapter
        if found.item.salt:
            native["extra_key"] = found.item.salt
        if worker.rank is not None:
            native["data_parallel_rank"] = worker.rank
        return "/generate", orjson.dumps(native)
    body = {name: value for name, value in inbound.body.items() if name not in _DROPPED}
    body |= {"model": model, "max_tokens": 1, "stream": False}
    if "messages" in body:
        return "/v1/chat/completions", orjson.dumps(body)
    body["temperature"] = 0
    return "/v1/completions", orjson.dumps(body)


def headers_of(worker: Worker) -> bytes:
    """Return the header lines of a warm-up request."""
    lines = b"content-type: application/json\r\n"
    if worker.rank is not None:
        lines += b"x-data-parallel-rank: %d\r\n" % worker.rank
    return lines


def usage_of(answer: bytes) -> Usage | None:
    """Read the token counts of an answer; None if it is no answer at all."""
    try:
        document = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(document, dict):
        return None
    native = document.get("meta_info")
    if isinstance(native, dict):  # SGLang's own
        counts = [_count(native, name) for name in ("prompt_tokens", "completion_tokens")]
        return Usage(counts[0], counts[1], _count(native, "cached_tokens"))
    if not isinstance(document.get("choices"), list):
        return None
    usage = document.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    details = details if isinstance(details, dict) else {}
    return Usage(
        _count(usage, "prompt_tokens"),
        _count(usage, "completion_tokens"),
        _count(details, "cached_tokens"),
    )


def _count(document: dict[str, Any], name: str) -> int | None:
    value = document.get(name)
    return value if type(value) is int and value >= 0 else None


def _outcome(error: UpstreamError) -> Outcome:
    if isinstance(error, ConnectFailed):
        return Outcome.CONNECT_FAILED
    if isinstance(error, ResetBeforeFirstByte):
        return Outcome.UPSTREAM_RESET
    if isinstance(error, FirstByteTimeout):
        return Outcome.FIRST_BYTE_TIMEOUT
    return Outcome.UPSTREAM_ERROR


def _said(answer: bytes) -> str:
    """Return the engine's own words, where they have the usual shape."""
    try:
        document = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return "no reason given"
    error = document.get("error", document) if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message[:MAX_REASON_CHARS] if isinstance(message, str) else "no reason given"
