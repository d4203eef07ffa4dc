"""Handlers of ``/v1/chat/completions`` and ``/v1/completions``.

A stream's headers leave with its first token: an engine error before that is an ordinary JSON
error. After that an error is an event in the stream, which then ends without ``[DONE]``.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
import structlog
from aiohttp import web

from runner.answers import AnswerShape, ChatShape, Choice, CompletionShape, Json
from runner.deadline import HEADER, Deadline
from runner.errors import ApiError, DeadlineExceededError
from runner.fields import parse_object
from runner.kv_transfer import check_source
from runner.openai import GenerationRequest, Surface, parse_generation
from runner.responses import REQUEST_ID, json_response, service_of
from runner.streams import Generation, Piece, Plan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runner.service import Service
    from runner.types import HitSource

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies of the nginx family would otherwise collect the stream before they pass it on.
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"

log = structlog.get_logger(__name__)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer ``POST /v1/chat/completions``."""
    return await _answer(request, "chat")


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer ``POST /v1/completions``."""
    return await _answer(request, "completions")


async def _answer(request: web.Request, surface: Surface) -> web.StreamResponse:
    service = service_of(request)
    arrived_s = service.clock()
    with service.in_flight():
        deadline = Deadline.of(request.headers.get(HEADER), service.clock)
        async with deadline.limit():
            wanted = parse_generation(surface, parse_object(await request.read()))
            service.check_model(wanted.model)
            allowed = service.puller.figures() if service.puller is not None else ()
            check_source(wanted.offload.source, allowed)
            prompts = await service.prompts.of(wanted)
        job = _Job(service, wanted, prompts, deadline, request[REQUEST_ID], arrived_s)
        return await job.run(request)


@dataclass(slots=True)
class _Job:
    """One request from parsed body to finished answer."""

    service: Service
    wanted: GenerationRequest
    prompts: list[list[int]]
    deadline: Deadline
    request_id: str
    arrived_s: float
    ttft_s: float | None = None
    error: ApiError | None = None

    async def run(self, request: web.Request) -> web.StreamResponse:
        generation = self._generation()
        try:
            async with generation:
                if self.wanted.stream:
                    return await self._stream(request, generation)
                return await self._whole(generation)
        except ApiError as error:
            self.error = error
            raise
        finally:
            # Every sample is counted once, those that a vanished client left too.
            is_error = self._outcome(generation) == "error"
            for _ in range(generation.num_unfinished):
                self.service.metrics.finished("error" if is_error else "abort")
            self._log(generation)

    def _generation(self) -> Generation:
        facts = self.service.facts
        plan = Plan(
            id=self.service.next_id(),
            prompts=[
                (ids, self.wanted.sampling(len(ids), facts.max_model_len)) for ids in self.prompts
            ],
            salt=self.wanted.cache_salt,
            adapter=self.service.adapter_of(self.wanted.model),
            caps=self.wanted.offload,
            stop=self.wanted.stop,
        )
        return Generation(
            self.service.engine,
            self.service.detokenizer,
            plan,
            self._note_first_token,
            self.deadline,
        )

    def _note_first_token(
        self, prompt_tokens: int, cached_tokens: int, source: HitSource | None
    ) -> None:
        ttft_s = self.service.clock() - self.arrived_s
        self.service.metrics.first_token(ttft_s, prompt_tokens, cached_tokens, source or "cold")
        if self.ttft_s is None:
            self.ttft_s = ttft_s

    def _shape(self) -> AnswerShape:
        is_chat = self.wanted.surface == "chat"
        return (ChatShape if is_chat else CompletionShape)(
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{self.request_id}",
            created=int(self.service.wall_clock()),
            model=self.wanted.model or self.service.facts.name,
            texts=self.service.texts,
            wants_logprobs=self.wanted.logprobs is not None,
            prompt_ids=self.prompts if self.wanted.return_token_ids else None,
            n=self.wanted.n,
        )

    def _count_finished(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.finish_reason is not None:
                self.service.metrics.finished(piece.finish_reason)

    async def _whole(self, generation: Generation) -> web.Response:
        choices = [Choice() for _ in range(generation.num_choices)]
        async with aclosing(generation.bursts()) as bursts:
            async for pieces in bursts:
                self._count_finished(pieces)
                for piece in pieces:
                    choices[piece.index].add(piece)
        return json_response(self._shape().full(choices, generation.usage))

    async def _stream(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        response = web.StreamResponse(headers=STREAM_HEADERS)
        try:
            await self._send(request, response, generation)
            await response.write_eof()
        except ConnectionError:
            # The client is gone; what still runs for it is aborted on the way out.
            pass
        return response

    async def _send(
        self, request: web.Request, response: web.StreamResponse, generation: Generation
    ) -> None:
        shape = self._shape()
        async with aclosing(generation.bursts()) as bursts:
            pieces = await anext(bursts)
            await response.prepare(request)
            try:
                opening = _events(shape.opening(generation.num_choices))
                await response.write(opening + self._chunks(shape, pieces))
                async for pieces in bursts:
                    await response.write(self._chunks(shape, pieces))
                ending = [shape.usage_chunk(generation.usage)] if self.wanted.include_usage else []
                await response.write(_events(ending) + DONE)
            except ApiError as error:
                # In-band, and no `[DONE]`: the text so far is all there will be.
                self.error = error
                response.force_close()
                await response.write(_events([error.body()]))

    def _chunks(self, shape: AnswerShape, pieces: list[Piece]) -> bytes:
        self._count_finished(pieces)
        needs_all = self.wanted.logprobs is not None or self.wanted.return_token_ids
        return _events(
            shape.chunk(piece)
            for piece in pieces
            if needs_all or piece.text or piece.finish_reason is not None
        )

    def _outcome(self, generation: Generation) -> str:
        if isinstance(self.error, DeadlineExceededError):
            return "deadline"
        if self.error is not None:
            return "error"
        return "client_closed" if generation.num_unfinished else "ok"

    def _log(self, generation: Generation) -> None:
        usage = generation.usage
        log.info(
            "request_finished",
            request_id=self.request_id,
            surface=self.wanted.surface,
            stream=self.wanted.stream,
            outcome=self._outcome(generation),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ttft_s=self.ttft_s,
            duration_s=self.service.clock() - self.arrived_s,
        )


def _events(chunks: Iterable[Json]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
