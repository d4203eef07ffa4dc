"""Which identity a request has for consistent hashing: document, session, tenant or its prefix.

Hints fill kinds, the pool's order of kinds picks one. A hint that is absent, empty, blank or the
literal ``null``, ``none`` or ``undefined`` (clients that print a missing value) is no hint. Every
key is scoped by tenant, and a long value is hashed, so that a key is always short.

The prefix kind skips what changes (clocks, ids) and the order of documents, so that a request finds
its home although its prefix is new. It is a key for the ring and never an estimate of a hit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from prefix_index.regions import INSTRUCTION_ROLES, documents_in
from prefix_index.spans import text_parts
from prefix_index.volatile import skip_volatile

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
# A message this long carries the conversation's document, wherever it stands in it.
LARGE_CHARS = 1000
# Instructions so many times longer than what is asked are the document themselves.
DOCUMENT_SHARE = 4
# Of a large message, its first line this long is where the document starts: a question or a
# "use this context" above it may differ.
MIN_LINE_CHARS = 200
# Messages and lines looked at; a document stands near the start or not at all.
_MAX_LOOKED_AT = 16
# Instructions are searched for clocks and ids so far; the rest counts as it is. Bounds the time for
# new text to about 0.6 ms, 4 ms if it is a hostile MB.
_MAX_SEARCHED_CHARS = 32_768
_MAX_LOOK_CHARS = 3072
# Known texts -> their digest: 2 MB when full. Texts with a clock come once each and leave first.
_MAX_KNOWN = 8192
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
    """Hash the leading stable text: all instructions and the head of the document or question.

    Siblings of a document and the turns of a conversation agree in it, other documents under the
    same system prompt differ. Instructions that are most of the prompt are the document: then the
    question has no say, or siblings that come through several gateways at once had several homes.
    """
    digest = xxhash.xxh3_128()
    messages = body.get("messages")
    if isinstance(messages, list):
        first = num_chars = 0
        for first, message in enumerate(messages):  # noqa: B007  # where the instructions end
            if not isinstance(message, dict):
                continue
            if message.get("role") not in INSTRUCTION_ROLES:
                break
            text = text_of(message.get("content"))
            num_chars += len(text)
            digest.update(_known_digest(text))
        else:
            return "messages", digest.hexdigest()
        anchor = _anchor(messages[first : first + _MAX_LOOKED_AT])
        if num_chars < max(LARGE_CHARS, DOCUMENT_SHARE * len(anchor)):
            _feed_head(digest, anchor)
        return "messages", digest.hexdigest()
    prompt = body.get("prompt")
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    head = prompt[:HEAD_CHARS] if isinstance(prompt, str | list) else ""
    _feed(digest, head if isinstance(head, str) else repr(head))
    return "prompt", digest.hexdigest()


def _anchor(messages: Sequence[Any]) -> str:
    """Return the text that tells a conversation from others: its first message, or its document.

    That is the first large user message that is longer than all before it.
    """
    first = text_of(messages[0].get("content"))
    num_chars = len(first)
    if num_chars >= LARGE_CHARS:
        return first
    for message in messages[1:]:
        if not isinstance(message, dict):
            continue
        text = text_of(message.get("content"))
        if message.get("role") == "user" and len(text) >= max(LARGE_CHARS, num_chars):
            return text
        num_chars += len(text)
    return first


def _feed_head(digest: xxhash.xxh3_128, text: str) -> None:
    if len(text) < LARGE_CHARS:
        _feed(digest, text[:HEAD_CHARS])
    elif documents := documents_in(text):
        digest.update(_set_digest(text, documents))
    else:
        start = _document_start(text)
        _feed(digest, text[start : start + HEAD_CHARS])


def _document_start(text: str) -> int:
    """Return where the first long line starts; 0 if the text has only short ones."""
    start = 0
    for _ in range(_MAX_LOOKED_AT):
        end = text.find("\n", start)
        if (len(text) if end < 0 else end) - start >= MIN_LINE_CHARS:
            return start
        if end < 0:
            break
        start = end + 1
    return 0


class _Known(dict[bytes, bytes]):
    """Digest of a text -> digest of what in it is stable; the oldest leave."""

    def add(self, key: bytes, value: bytes) -> bytes:
        while len(self) >= _MAX_KNOWN:
            del self[next(iter(self))]
        self[key] = value
        return value


_known = _Known()


def _known_digest(text: str) -> bytes:
    """Return the digest of instructions without what changes; 1 us for a known KB."""
    key = xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))
    found = _known.get(key)
    return found if found is not None else _known.add(key, _stable_digest(text))


def _stable_digest(text: str) -> bytes:
    head = skip_volatile(text[:_MAX_SEARCHED_CHARS], max_look_chars=_MAX_LOOK_CHARS)
    stable = head + text[_MAX_SEARCHED_CHARS:]
    digest = xxhash.xxh3_128()
    documents = documents_in(stable)
    _feed(digest, _around(stable, documents))
    if documents:
        digest.update(_set_digest(stable, documents))
    return digest.digest()


def _set_digest(text: str, documents: Sequence[tuple[int, int]]) -> bytes:
    """Return the digest of documents whatever their order."""
    digests = sorted(
        xxhash.xxh3_128_digest(text[start:end].encode("utf-8", "surrogatepass"))
        for start, end in documents
    )
    return xxhash.xxh3_128_digest(b"".join(digests))


def _around(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Return a text with each span replaced by a mark."""
    pieces = []
    done = 0
    for start, end in spans:
        pieces.append(text[done:start])
        done = end
    return "\0document\0".join([*pieces, text[done:]])


def _feed(digest: xxhash.xxh3_128, text: str) -> None:
    digest.update(len(text).to_bytes(8, "little"))
    digest.update(text.encode("utf-8", "surrogatepass"))


def text_of(content: object) -> str:
    """Return the text of a message's content: a string, or its joined text parts."""
    return content if isinstance(content, str) else "\n".join(text_parts(content))


_FINDERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, str], str], tuple[str, str]]] = {
    "document": _document,
    "knowledge_base": _knowledge_base,
    "session": _session,
    "tenant": _tenant,
    "prefix": _prefix,
}
