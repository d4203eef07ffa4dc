"""A streamed chat completion as the events of the messages API, piece by piece.

The messages API has one block open at a time, in order. Engines may mix the arguments of parallel
tool calls; then those of the call that is open go out at once and the others wait, within a bound,
until it is complete. Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from gateway.errors import MalformedAnswer
from gateway.protocols.anthropic.answer import message_id, reasoning_of, stop_of, usage_of_chat
from gateway.protocols.errors import message_of
from gateway.protocols.events import documents

if TYPE_CHECKING:
    from collections.abc import Collection

# Arguments of tool calls that are kept: of those that wait, and of the open one, to see whether it
# is complete. Calls are a few KB; a file that is written by one may be some hundred.
MAX_KEPT_CHARS = 4 << 20
# Around arguments that are no object.
_SPACE = " \t\r\n"
_TEXT_BEGINS, _TEXT_ENDS = '{"arguments":"', '"}'


@dataclass(slots=True)
class _Call:
    """A tool call; ``pieces`` are its arguments so far, ``num_sent`` of them are out.

    ``is_text`` are arguments that begin as no JSON object does; None while they have not begun.
    """

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)
    num_sent: int = 0
    is_text: bool | None = None

    def is_complete(self) -> bool:
        try:
            return isinstance(orjson.loads("".join(self.pieces)), dict)
        except orjson.JSONDecodeError:
            return False


class MessageStream:
    """Translates one stream; fed whole events in order.

    Args:
        model: Name that the client asked for.
        stop_sequences: Those of the request.
        input_tokens: Of the prompt, as far as they are known before the engine tells.
    """

    def __init__(
        self, *, model: str, stop_sequences: Collection[str] = (), input_tokens: int = 0
    ) -> None:
        self._model = model
        self._stop_sequences = stop_sequences
        self._input_tokens = input_tokens
        self._out = bytearray()
        self._is_begun = False
        self._index = -1
        self._open: str = ""  # type of the block that is open
        self._calls: dict[int, _Call] = {}
        self._open_call: int | None = None
        self._kept_chars = 0
        self._stop: tuple[str, str | None] = ("end_turn", None)
        self._usage: Any = None
        self._has_failed = False

    def feed(self, data: bytes) -> bytes:
        """Take whole events of the engine; return those for the client.

        Raises:
            MalformedAnswer: If the calls that wait become too long.
        """
        for document in documents(data):
            self._take(document)
        return self._taken()

    def end(self) -> bytes:
        """Return the last events of a stream that ended; none after an error."""
        if self._has_failed:
            return b""
        self._begin({})
        self._close_calls()
        self._close()
        reason, sequence = self._stop
        if self._calls and reason == "end_turn":
            reason = "tool_use"  # some engines finish with "stop" all the same
        self._say(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=usage_of_chat(self._usage),
        )
        self._say("message_stop")
        return self._taken()

    def _take(self, document: dict[str, Any]) -> None:
        if document.get("error"):
            self._has_failed = True
            told = {"type": "api_error", "message": message_of(orjson.dumps(document))}
            self._say("error", error=told)
            return
        self._usage = document.get("usage") or self._usage
        choices = document.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return
        self._begin(document)
        delta = choice.get("delta")
        if isinstance(delta, dict):
            self._take_delta(delta)
        if choice.get("finish_reason"):
            self._stop = stop_of(choice, self._stop_sequences)

    def _take_delta(self, delta: dict[str, Any]) -> None:
        if thought := reasoning_of(delta):
            self._open_plain("thinking", {"thinking": "", "signature": ""})
            self._delta({"type": "thinking_delta", "thinking": thought})
        text = delta.get("content")
        if isinstance(text, str) and text:
            self._open_plain("text", {"text": ""})
            self._delta({"type": "text_delta", "text": text})
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                self._take_call(call)

    def _take_call(self, delta: dict[str, Any]) -> None:
        function = delta.get("function")
        function = function if isinstance(function, dict) else {}
        number = delta.get("index")
        number = number if isinstance(number, int) else len(self._calls)
        call = self._calls.get(number)
        if call is None:
            identity = str(delta.get("id") or f"call_{number}")
            call = self._calls[number] = _Call(identity, str(function.get("name") or ""))
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments:
            if self._is_out(number):
                raise MalformedAnswer("a tool call goes on behind its end")
            call.pieces.append(arguments)
            self._kept_chars += len(arguments)
            if self._kept_chars > MAX_KEPT_CHARS:
                raise MalformedAnswer(f"tool calls are longer than {MAX_KEPT_CHARS} characters")
        if not self._is_out(number):
            self._go_on(number)

    def _go_on(self, number: int) -> None:
        """Send what may be sent now that the call ``number`` has grown."""
        current = self._open_call
        if current is None:
            self._open_tool(number)
        elif current != number and self._calls[current].is_complete():
            self._close()
            self._open_tool(min(n for n in self._calls if not self._is_out(n)))
        if self._open_call is not None:
            self._send_call(self._calls[self._open_call])

    def _is_out(self, number: int) -> bool:
        return self._calls[number].num_sent < 0

    def _open_tool(self, number: int) -> None:
        call = self._calls[number]
        self._start("tool_use", {"id": call.id, "name": call.name, "input": {}})
        self._open_call = number

    def _send_call(self, call: _Call) -> None:
        rest = "".join(call.pieces[call.num_sent :])
        begins = call.is_text is None
        if begins and (seen := rest.lstrip(_SPACE)):
            call.is_text = not seen.startswith("{")
        if call.is_text is None:
            return
        call.num_sent = len(call.pieces)
        if call.is_text:
            # Clients read an object: it stands where ``input_of`` puts it in a whole answer.
            rest = _TEXT_BEGINS * begins + orjson.dumps(rest).decode()[1:-1]
        if rest:
            self._delta({"type": "input_json_delta", "partial_json": rest})

    def _close_calls(self) -> None:
        """Send the calls that wait, one after the other."""
        if self._open_call is not None:
            self._close()
        for number in sorted(self._calls):
            if not self._is_out(number):
                self._open_tool(number)
                self._send_call(self._calls[number])
                self._close()

    # Events.

    def _begin(self, document: dict[str, Any]) -> None:
        if self._is_begun:
            return
        self._is_begun = True
        message: dict[str, Any] = {
            "id": message_id(document),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of_chat({"prompt_tokens": self._input_tokens}),
        }
        self._say("message_start", message=message)
        self._say("ping")

    def _open_plain(self, kind: str, empty: dict[str, Any]) -> None:
        """Open a block of text or thought, unless one is open."""
        if self._open == kind:
            return
        if any(not self._is_out(number) for number in self._calls):
            self._close_calls()
        self._start(kind, empty)

    def _start(self, kind: str, empty: dict[str, Any]) -> None:
        self._close()
        self._index += 1
        self._open = kind
        self._say("content_block_start", index=self._index, content_block={"type": kind, **empty})

    def _delta(self, delta: dict[str, Any]) -> None:
        self._say("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> None:
        if not self._open:
            return
        if self._open_call is not None and self._calls[self._open_call].is_text:
            self._delta({"type": "input_json_delta", "partial_json": _TEXT_ENDS})
        self._say("content_block_stop", index=self._index)
        self._open = ""
        if self._open_call is not None:
            call = self._calls[self._open_call]
            self._kept_chars -= sum(map(len, call.pieces))
            call.pieces.clear()
            call.num_sent = -1  # all of it is out
            self._open_call = None

    def _say(self, kind: str, **members: Any) -> None:
        self._out += b"event: %b\ndata: " % kind.encode()
        self._out += orjson.dumps({"type": kind, **members}) + b"\n\n"

    def _taken(self) -> bytes:
        out = bytes(self._out)
        self._out.clear()
        return out
