"""Ask a publisher's buffer for the batches from some sequence on.

Source: vLLM 0.32 ``distributed/kv_events.py`` (captured): answers of four parts, before #45177 and
in older SGLang of three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import zmq
import zmq.asyncio

from prefix_index.receiver import configure

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_END_OF_REPLAY: Final = 0xFFFF_FFFF_FFFF_FFFF
_SEQUENCE_BYTES: Final = 8
# A publisher answers between two batches, within 0.1 s when idle.
_TIMEOUT_S: Final = 2.0


class Replay:
    """One question; iterate over it for the answer, batch by batch, as it comes.

    A fresh socket each time, so that late answers to an earlier question are never taken for
    answers to this one. Nothing is gathered: an answer may be as long as it likes.

    Args:
        context: Where the socket is opened.
        endpoint: Where the buffer answers.
        first: Sequence to begin with.

    Attributes:
        is_complete: The end of the answer was heard: the publisher is there and has no more.
    """

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, first: int) -> None:
        self.is_complete = False
        self._context = context
        self._endpoint = endpoint
        self._first = first

    async def batches(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield (sequence, payload) up to where the publisher stops answering.

        Raises:
            zmq.ZMQError: If the endpoint is none.
        """
        socket = self._context.socket(zmq.DEALER)
        try:
            configure(socket)
            socket.connect(self._endpoint)
            await socket.send_multipart([b"", self._first.to_bytes(_SEQUENCE_BYTES, "big")])
            while await socket.poll(_TIMEOUT_S * 1000):
                frame = parse_frame(await socket.recv_multipart())
                if frame is None:
                    continue
                if frame[0] == _END_OF_REPLAY:
                    self.is_complete = True
                    return
                yield frame
        finally:
            socket.close()


def parse_frame(parts: list[bytes]) -> tuple[int, bytes] | None:
    """Return sequence and payload, the last two of three or four parts; None for other shapes."""
    if len(parts) not in (3, 4) or len(parts[-2]) != _SEQUENCE_BYTES:
        return None
    return int.from_bytes(parts[-2], "big"), parts[-1]
