"""Which identity a request has for consistent hashing: document, session, tenant or its prefix.

Hints fill kinds, the pool's order of kinds picks one. A hint that is absent, empty, blank or the
literal ``null``, ``none`` or ``undefined`` (clients that print a missing value) is no hint. Every
key is scoped by tenant, and a long value is hashed, so that a key is always short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Kind = Literal["cache_key", "document", "knowledge_base", "session", "tenant", "prefix"]

SESSION_HEADERS = (
    "x-session-id",
    "x-session-token",
    "x-session-affinity",
    "x-claude-code-session-id",
)
# Longer values are replaced by their hash: a key is logged and shown.
MAX_VALUE_CHARS = 128
# How much of the first message after the instructions belongs to the prefix: enough to tell two
# documents apart, little enough that two questions about one document agree.
HEAD_CHARS = 256
NO_VALUES = frozenset({"", "null", "none", "undefined", "nil"})


@dataclass(frozen=True, slots=True)
class AffinityKey:
    """The identity that was picked.

    Attributes:
        kind: Which kind of identity.
        source: Header or body field it came from.
        value: Its value, hashed when long.
        ring_key: Key on the ring: tenant, kind and value.
    """

    kind: Kind
    source: str
    value: str
    ring_key: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"


def affinity_key(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    *,
    tenant: str,
    kinds: Sequence[str],
) -> AffinityKey:
    """Pick the key of a request. Never raises on odd bodies; falls back to the prefix.

    Args:
        body: Parsed request body.
        headers: Request headers, names in lower case.
        tenant: The tenant, or empty when there are none.
        kinds: The pool's order of kinds; ``prompt_cache_key`` comes before all of them.
    """
    if value := _value(body.get("prompt_cache_key")):
        return _key("cache_key", "prompt_cache_key", value, tenant)
    for kind in kinds:
        find = _FINDERS.get(kind)
        if find is None:
            continue
        source, value = find(body, headers, tenant)
        if value:
            return _key(kind, source, value, tenant)
    return _key("prefix", *_prefix(body, headers, tenant), tenant)


def _key(kind: Any, source: str, value: str, tenant: str) -> AffinityKey:
    if len(value) > MAX_VALUE_CHARS:
        value = "#" + xxhash.xxh3_128_hexdigest(value.encode("utf-8", "surrogatepass"))
    # The length keeps a tenant's name from running into the value.
    return AffinityKey(kind, source, value, f"{len(tenant)}:{tenant}|{kind}|{value}")


def _value(raw: object) -> str:
    """Return a hint's value, empty when it is none."""
    if isinstance(raw, bool) or not isinstance(raw, str | int):
        return ""
    value = str(raw).strip()
    return "" if value.lower() in NO_VALUES else value


def _document(body: Mapping[str, Any], headers: Mapping[str, str], _: str) -> tuple[str, str]:
    """The first document decides: it is what comes first in the prompt."""
    for part in headers.get("x-document-id", "").split(","):
        if value := _value(part):
            return "x-document-id", value
    ours = body.get("warmlane")
    documents = ours.get("documents") if isinstance(ours, dict) else None
    for document in documents if isinstance(documents, list) else []:
        if isinstance(document, dict) and (value := _value(document.get("id"))):
            version = _value(document.get("version"))
            return "warmlane.documents", f"{value}@{version}" if version else value
    return "", ""


def _knowledge_base(_: Mapping[str, Any], headers: Mapping[str, str], __: str) -> tuple[str, str]:
    return "x-knowledge-base-id", _value(headers.get("x-knowledge-base-id"))


def _session(body: Mapping[str, Any], headers: Mapping[str, str], _: str) -> tuple[str, str]:
    for name in SESSION_HEADERS:
        if value := _value(headers.get(name)):
            return name, value
    ours = body.get("warmlane")
    if isinstance(ours, dict) and (value := _value(ours.get("session"))):
        return "warmlane.session", value
    return "user", _value(body.get("user"))


def _tenant(_: Mapping[str, Any], __: Mapping[str, str], tenant: str) -> tuple[str, str]:
    return "tenant", tenant


def _prefix(body: Mapping[str, Any], _: Mapping[str, str], __: str) -> tuple[str, str]:
    """Hash the leading stable text: all instructions and the head of the first message.

    Siblings of a document and the turns of a conversation agree in it, other documents under the
    same system prompt differ.
    """
    digest = xxhash.xxh3_128()
    messages = body.get("messages")
    if isinstance(messages, list):
        for message in messages:
            if not isinstance(message, dict):
                continue
            text = text_of(message.get("content"))
            if message.get("role") not in ("system", "developer"):
                _feed(digest, text[:HEAD_CHARS])
                break
            _feed(digest, text)
        return "messages", digest.hexdigest()
    prompt = body.get("prompt")
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    head = prompt[:HEAD_CHARS] if isinstance(prompt, str | list) else ""
    _feed(digest, head if isinstance(head, str) else repr(head))
    return "prompt", digest.hexdigest()


def _feed(digest: xxhash.xxh3_128, text: str) -> None:
    digest.update(len(text).to_bytes(8, "little"))
    digest.update(text.encode("utf-8", "surrogatepass"))


def text_of(content: object) -> str:
    """Return the text of a message's content: a string, or its joined text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))


_FINDERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, str], str], tuple[str, str]]] = {
    "document": _document,
    "knowledge_base": _knowledge_base,
    "session": _session,
    "tenant": _tenant,
    "prefix": _prefix,
}
