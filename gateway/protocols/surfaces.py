"""Every path that clients may post to, and what the gateway does with it: one table.

What is not in it does not exist here: an engine's administration paths are never proxied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gateway.pass_through import ADMINISTRATION, is_plain_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Family = Literal["openai", "anthropic"]
Way = Literal["chat", "messages", "count_tokens", "responses", "pass"]
Markers = Literal["choices", "messages", "responses", "none"]


@dataclass(frozen=True, slots=True)
class SurfaceSpec:
    """What is done with the requests to a path.

    Attributes:
        name: Of the surface, in records and metrics.
        way: How its requests are served: read and passed on (``chat``, which completions are too),
            passed on or translated (``messages``), counted here (``count_tokens``), passed on and
            read where that can be (``responses``), passed on unread (``pass``).
        family: Whose shape its errors have.
        markers: What ends its event streams; without any, the end of the connection does.
    """

    name: str
    way: Way
    family: Family = "openai"
    markers: Markers = "none"


SURFACES: dict[str, SurfaceSpec] = {
    "/v1/chat/completions": SurfaceSpec("chat", "chat", markers="choices"),
    "/v1/completions": SurfaceSpec("completions", "chat", markers="choices"),
    "/v1/messages": SurfaceSpec("messages", "messages", "anthropic", "messages"),
    "/v1/messages/count_tokens": SurfaceSpec("count_tokens", "count_tokens", "anthropic"),
    "/v1/responses": SurfaceSpec("responses", "responses", markers="responses"),
    "/v1/embeddings": SurfaceSpec("embeddings", "pass"),
    "/v1/rerank": SurfaceSpec("rerank", "pass"),
    "/v1/score": SurfaceSpec("score", "pass"),
    "/v1/classify": SurfaceSpec("classify", "pass"),
}
# Ends with a slash: all paths below it.
_BELOW = {"/v1/audio/": SurfaceSpec("audio", "pass")}
_CONFIGURED = SurfaceSpec("other", "pass")


class Surfaces:
    """The paths of one gateway.

    Args:
        configured: More paths that are passed on; one that ends with ``/*`` stands for all below.
    """

    def __init__(self, configured: Iterable[str] = ()) -> None:
        self._exact = dict(SURFACES)
        self._below = dict(_BELOW)
        for path in configured:
            if path.endswith("/*"):
                self._below[path[:-1]] = _CONFIGURED
            else:
                self._exact.setdefault(path, _CONFIGURED)

    def find(self, path: str) -> SurfaceSpec | None:
        """Return what is done with a path; None if it is none of ours. A look-up for most."""
        spec = self._exact.get(path)
        if spec is not None or ADMINISTRATION.search(path) or not is_plain_path(path):
            return spec
        return next((spec for below, spec in self._below.items() if path.startswith(below)), None)

    @property
    def exact(self) -> tuple[str, ...]:
        """The paths that are named in full."""
        return tuple(self._exact)

    def route(self, path: str) -> str | None:
        """Return the pattern that a path was found by; None if it is none of ours."""
        if path in self._exact:
            return path
        if self.find(path) is None:
            return None
        return next(below + "{rest}" for below in self._below if path.startswith(below))

    def patterns(self) -> Iterator[str]:
        """Yield the paths as aiohttp's router takes them."""
        yield from self._exact
        for below in self._below:
            yield below + "{rest:.+}"


def family_of(path: str) -> Family:
    """Return whose shape errors have under a path, whether it exists or not."""
    return "anthropic" if path.startswith("/v1/messages") else "openai"


def hint(path: str) -> str:
    """Return what to say of an unknown path where a base URL has ``/v1`` wrong; empty elsewhere."""
    for meant in (f"/v1{path}", path.removeprefix("/v1")):
        if meant in SURFACES:
            return (
                f"; did you mean {meant}? The base URL of OpenAI's clients ends in /v1, "
                "that of Anthropic's does not"
            )
    return ""
