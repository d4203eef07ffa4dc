"""Two verbs of the Kubernetes API on one kind of object: list and watch.

Source: Kubernetes API concepts, "Efficient detection of changes" (resource versions, bookmarks,
410 Gone, chunked lists).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import orjson

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from gateway.discovery.kube_access import Access

# Objects per answer: a few megabytes of pods.
PAGE = 500
LIST_DEADLINE_S = 30.0
CONNECT_S = 10.0
# The server ends a watch after this long; one that is silent for longer than it is dead.
WATCH_S = 240
WATCH_SLACK_S = 30.0
# The largest object that etcd takes is 1.5 MiB.
MAX_LINE_BYTES = 4 << 20


class KubeError(Exception):
    """The API did not answer, or refused; the message is for the operator."""


class Gone(Exception):
    """What happened since a resource version is not known any more: list anew."""


class Event(NamedTuple):
    """One line of a watch: ``ADDED``, ``MODIFIED``, ``DELETED`` or ``BOOKMARK``, and the object."""

    type: str
    object: dict[str, Any]


class KubeApi:
    """The objects of one path; one event loop only.

    Args:
        access: Where and as whom.
        path: Such as ``/api/v1/namespaces/llm/pods``.
        selector: Label selector.
        watch_s: How long a watch lasts.
    """

    def __init__(self, access: Access, path: str, selector: str, *, watch_s: int = WATCH_S) -> None:
        self._access = access
        self._path = path
        self._selector = selector
        self._watch_s = watch_s
        self._session: aiohttp.ClientSession | None = None

    async def list(self) -> tuple[list[dict[str, Any]], str]:
        """Return all objects, and the resource version that they are as of.

        Raises:
            KubeError: If they cannot be had.
        """
        objects: list[dict[str, Any]] = []
        query: dict[str, str | int] = {"limit": PAGE}
        while True:
            try:
                async with asyncio.timeout(LIST_DEADLINE_S):
                    document = await self._get(query)
                objects += [_checked(item) for item in document.get("items") or []]
                meta = document["metadata"]
                if not meta.get("continue"):
                    return objects, meta["resourceVersion"]
                query["continue"] = meta["continue"]
            except Gone:
                # The list took so long that its version is not kept any more.
                if "continue" not in query:
                    raise KubeError(f"{self._path}: the list is gone at once") from None
                objects, query = [], {"limit": PAGE}
            except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                raise self._failed(error) from error

    async def watch(self, version: str) -> AsyncIterator[Event]:
        """Yield what happens from a resource version on, until the server ends the watch.

        Raises:
            Gone: If the version is too old.
            KubeError: If the watch cannot be had, or breaks off.
        """
        query: dict[str, str | int] = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": self._watch_s,
        }
        timeout = aiohttp.ClientTimeout(total=self._watch_s + WATCH_SLACK_S, sock_connect=CONNECT_S)
        try:
            async with self._request(query, timeout) as response:
                await self._check(response)
                async for line in _lines(response.content):
                    yield self._event(orjson.loads(line))
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            raise self._failed(error) from error

    async def close(self) -> None:
        """Drop the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _event(self, document: Mapping[str, Any]) -> Event:
        what, item = document["type"], document["object"]
        if what == "ERROR":
            if item["code"] == 410:
                raise Gone
            raise KubeError(f"{self._path}: {item.get('message') or item}")
        if what != "BOOKMARK":
            _checked(item)
        if not isinstance(item["metadata"]["resourceVersion"], str):
            raise ValueError("expected a resourceVersion")
        return Event(what, item)

    async def _get(self, query: Mapping[str, str | int]) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=LIST_DEADLINE_S, sock_connect=CONNECT_S)
        async with self._request(query, timeout) as response:
            await self._check(response)
            document = orjson.loads(await response.read())
            if not isinstance(document, dict):
                raise ValueError("expected a list of objects")
            return document

    def _request(
        self, query: Mapping[str, str | int], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.client._RequestContextManager:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session.get(
            self._access.url + self._path,
            params={"labelSelector": self._selector, **query},
            # Read each time: the kubelet renews the token long before the old one ends.
            headers={"accept": "application/json", **self._access.headers()},
            ssl=self._access.ssl or True,
            timeout=timeout,
            allow_redirects=False,
        )

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 410:
            raise Gone
        if response.status != 200:
            text = (await response.content.read(2000)).decode("utf-8", "replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = orjson.loads(text)["message"]
            raise KubeError(f"{self._path}: HTTP {response.status}: {text[:300]}")

    def _failed(self, error: Exception) -> KubeError:
        detail = str(error) or type(error).__name__
        return KubeError(f"{self._access.url}{self._path}: {detail}")


def _checked(item: Any) -> dict[str, Any]:
    """Return an object if it has a name.

    Raises:
        ValueError: If it is none.
    """
    meta = item.get("metadata") if isinstance(item, dict) else None
    if not isinstance(meta, dict) or not isinstance(meta.get("name"), str):
        raise ValueError("expected objects with metadata and a name")
    checked: dict[str, Any] = item
    return checked


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream, of any length up to the bound.

    Raises:
        ValueError: If one is longer.
    """
    rest = bytearray()
    async for piece in content.iter_any():
        rest += piece
        while (end := rest.find(b"\n")) >= 0:
            line = bytes(rest[:end])
            del rest[: end + 1]
            if line:
                yield line
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"expected events of at most {MAX_LINE_BYTES >> 20} MiB")
