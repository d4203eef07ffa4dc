"""Forms under fuzzing: what goes on to an engine names no host, whichever parser the engine has."""

from __future__ import annotations

import asyncio
import email
import email.policy
from typing import TYPE_CHECKING

from python_multipart import FormParser
from python_multipart.exceptions import FormParserError

from gateway.errors import InvalidRequest
from gateway.protocols.multipart import Part, model_of, parts_of
from gateway.proxy.transfers import form_without_transfers

if TYPE_CHECKING:
    from collections.abc import Iterator

KIND = "multipart/form-data; boundary=b7"
# What no engine may find as a field of what goes on.
FORBIDDEN = ("ec_transfer_params", "bootstrap_host")


def field(name: str, value: bytes, *lines: str) -> bytes:
    """Return a part of a form."""
    head = [f'content-disposition: form-data; name="{name}"', *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + value


def form(*parts: bytes) -> bytes:
    """Return a form of these parts."""
    return b"".join(b"--b7\r\n" + part + b"\r\n" for part in parts) + b"--b7--\r\n"


def check(data: bytes) -> None:
    """Refuse a form, or pass on one in which no parser finds what was to be left out.

    Raises:
        AssertionError: If one does.
    """
    try:
        kept, parts = asyncio.run(_kept(data))
        model_of(kept, parts)
    except InvalidRequest:
        return
    ours = [part.name for part in parts]
    for read in (_as_engines, _as_mail):
        theirs = list(read(kept))
        assert theirs in ([], ours), f"{read.__name__}: {theirs} instead of {ours}"
    assert not {name.lower() for name in ours}.intersection(FORBIDDEN)


async def _kept(data: bytes) -> tuple[bytes, list[Part]]:
    """Return what goes on of a form, and its parts."""
    kept = form_without_transfers(data, await parts_of(data, KIND))
    return kept, await parts_of(kept, KIND)


def _as_engines(body: bytes) -> Iterator[str]:
    """Yield names as vLLM, SGLang and TensorRT-LLM read them; none of what is refused there."""
    names: list[str] = []

    def add(part: object) -> None:
        names.append((getattr(part, "field_name", b"") or b"").decode("latin-1"))

    parser = FormParser("multipart/form-data", add, add, boundary=b"b7")
    try:
        parser.write(body)
        parser.finalize()
    except FormParserError:
        return
    yield from names


def _as_mail(body: bytes) -> Iterator[str]:
    """Yield names as the standard library reads them."""
    head = f"content-type: {KIND}\r\nmime-version: 1.0\r\n\r\n".encode()
    message = email.message_from_bytes(head + body, policy=email.policy.HTTP)
    for part in message.get_payload() if message.is_multipart() else ():
        yield str(part.get_param("name", header="content-disposition"))


SEEDS = [
    form(field("model", b"m"), field("file", b"\x00--b7 \xff\r\n--b8\r\n")),
    form(field("ec_transfer_params", b"{}"), field("model", b"m")),
    form(field("a", b""), field("model", b"m", "content-type: x"), field("bootstrap_host", b"h")),
]
WORDS = [
    *(b"\r\n", b"\n", b"\r", b"--b7", b"--b7\r\n", b"--b7--", b"\r\n--b7\r\n", b"\r\n\r\n"),
    *(b"name=", b'name="', b"name*=", b"; ", b'"', b"\\", b"model", b"filename=", b" ", b"\t"),
    *(b"ec_transfer_params", b"bootstrap_host", b"content-disposition: form-data; name="),
    b'content-disposition: form-data; name="ec_transfer_params"\r\n\r\n',
]
