"""What a client may say of where KV comes from and goes to: how much of it, and nothing else.

Engines that share KV between machines are told in a request's body which host to connect to, whose
blocks to take and which file to write. That is for the gateway and trusted peers to say: a client
could reach hosts that only workers can reach, or take blocks that another tenant computed.

Source: vLLM 0.32 (``kv_transfer_params`` of its connectors, ``ec_transfer_params``; both are read
from ``vllm_xargs`` too), LMCache (``lmcache.*`` in the same object, tags of its keys among them),
SGLang (``bootstrap_*``), TensorRT-LLM (``disaggregated_params``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import orjson

from gateway.protocols.multipart import Part, with_parts
from gateway.proxy.splice import splice
from prefix_index.canonical.spans import members

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

PARAMS = "kv_transfer_params"
# What bounds a request's own KV, and so harms nobody.
CAPS = frozenset({"max_offload_tokens", "max_load_tokens", "lmcache.max_offload_tokens"})
# vLLM's own object of anything, and the names in it that its connectors look for.
_EXTRA = "vllm_xargs"
_EXTRA_PARAMS = frozenset({PARAMS, "ec_transfer_params"})
# Members that speak of nothing but hosts and others' KV.
_REMOVED = (
    "ec_transfer_params",
    "disaggregated_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "disagg_prefill_dp_rank",
)
_ALL = frozenset({PARAMS, _EXTRA, *_REMOVED})
# Frameworks make objects of fields such as ``a[b]`` and ``a.b``.
_ROOT = re.compile(r"[^.\[]*")


def without_transfers(body: bytes, document: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """Return a request without what a client may not say; both as given where there is nothing.

    What should be an object and is not is left to the engine to refuse: none reads anything in it.

    Args:
        body: As the client sent it.
        document: What a parser reads of it; not changed.
    """
    if _ALL.isdisjoint(document):
        return body, document
    inner = {name: _unwanted(name, document[name]) for name in (PARAMS, _EXTRA) if name in document}
    inner = {name: unwanted for name, unwanted in inner.items() if unwanted}
    drop = [name for name in _REMOVED if name in document]
    if not inner and not drop:
        return body, document
    kept = {name: value for name, value in document.items() if name not in drop}
    put = {}
    for name, unwanted in inner.items():
        kept[name] = {key: value for key, value in kept[name].items() if key not in unwanted}
        # As parsers do, the last of that name counts; each gets its value.
        value = [body[m.value_start : m.end] for m in members(body) if m.name == name][-1]
        put[name] = splice(value, drop=unwanted)
    return splice(body, put=put, drop=drop), kept


def form_without_transfers(body: bytes, parts: Iterable[Part], also: Collection[str] = ()) -> bytes:
    """Return a form without what a client may not say; as given where there is nothing.

    What is an object keeps what it may in a body of JSON; what is none, or one spread over several
    fields, is left out whole: how an engine would read it is not known.

    Args:
        body: As the client sent it.
        parts: All of its parts.
        also: More fields to leave out.
    """
    changes: list[tuple[Part, bytes | None]] = []
    for part in parts:
        root = _ROOT.match(part.name.lower())
        if root is not None and (root[0] in _ALL or root[0] in also):
            value = body[part.start : part.end]
            kept = _kept_value(part.name, value)
            if kept != value:
                changes.append((part, kept))
    return with_parts(body, changes) if changes else body


def _kept_value(name: str, value: bytes) -> bytes | None:
    """Return what stays of a form's field; None if nothing does."""
    if name not in (PARAMS, _EXTRA):
        return None
    try:
        given = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(given, dict):
        return None
    before = b'{"%b":' % name.encode()
    kept, _ = without_transfers(before + value + b"}", {name: given})
    return kept[len(before) : -1]


def _unwanted(name: str, given: object) -> frozenset[str]:
    """Return the members of a client's object that must go."""
    if not isinstance(given, dict):
        return frozenset()
    if name == _EXTRA:
        return _EXTRA_PARAMS.intersection(given)
    return frozenset(given) - CAPS
