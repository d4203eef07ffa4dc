"""Policies by name, with their settings: ``ours``, ``ours-W``, ``dynamo:prefill_load_scale=8``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.replay import policies, rules
from gateway.replay.oracle import OracleRouter, PooledCache
from gateway.replay.ours import TERMS, OursRouter
from gateway.replay.peers import PeerRouter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.replay.fleet import Fleet, Router
    from gateway.replay.peers import View
    from gateway.replay.shared_load import Hub
    from gateway.replay.traces import Request

    Rule = Callable[[View], list[int]]


class PolicyError(ValueError):
    """A policy or a setting of it is unknown; the message names the known ones."""


class _Peer(NamedTuple):
    """A peer's rule: what makes it, what it sees, and its settings with their defaults."""

    make: Callable[..., Rule]
    sees: str
    settings: Mapping[str, float]
    books_blocks: bool = False


def _sglang(**settings: float) -> Rule:
    return partial(rules.sglang, thresholds=policies.SglangThresholds(**settings))


def _dynamo(**settings: float) -> Rule:
    return partial(rules.dynamo, weights=policies.DynamoWeights(**settings))


def _llmd(**settings: float) -> Rule:
    return partial(rules.llmd, weights=policies.LlmdWeights(**settings))


def _lmetric(**settings: float) -> Rule:
    return partial(rules.lmetric, queue_weight=int(settings["queue_weight"]))


def _defaults(settings: Any) -> dict[str, float]:
    """Return the settings of a NamedTuple with their defaults."""
    return dict(settings._field_defaults)


_SGLANG = _defaults(policies.SglangThresholds)
_PEERS: Mapping[str, _Peer] = {
    "random": _Peer(lambda: rules.any_worker, "", {}),
    "round_robin": _Peer(rules.RoundRobin, "", {}),
    "least_requests": _Peer(lambda: rules.least_requests, "", {}),
    "power_of_two": _Peer(lambda: rules.power_of_two, "", {}),
    "least_queued_tokens": _Peer(lambda: rules.least_queued_tokens, "", {}),
    "session_hash": _Peer(rules.SessionHash, "", {}),
    "chwbl": _Peer(rules.BoundedLoad, "", {"load_factor": 1.25, "plus_one": 0}),
    "sglang": _Peer(_sglang, "history", _SGLANG),
    # The thresholds that SGLang's router has with engine events.
    "sglang_zmq": _Peer(_sglang, "history", {"cache": 0.5, "balance_abs": 32, "balance_rel": 1.1}),
    "aibrix": _Peer(
        lambda **settings: partial(rules.aibrix, **settings),
        "history",
        {"imbalance_abs": 8, "sd_factor": 1.0},
    ),
    "dynamo": _Peer(_dynamo, "events", _defaults(policies.DynamoWeights), books_blocks=True),
    "llmd": _Peer(_llmd, "events", _defaults(policies.LlmdWeights)),
    "lmetric": _Peer(_lmetric, "history", {"queue_weight": 0}),
    "lmetric_events": _Peer(_lmetric, "events", {"queue_weight": 0}),
    "lmetric_events_queue": _Peer(_lmetric, "events", {"queue_weight": 1}),
    "mooncake": _Peer(lambda: rules.mooncake, "events", {}),
}
OURS = ("ours", *(f"ours-{letter}" for letter in TERMS))
ORACLES = ("oracle", "oracle_infinite")
NAMES = (*OURS, *_PEERS, *ORACLES)


def check_policy(policy: str) -> None:
    """Refuse a policy that does not exist or has no such setting.

    Raises:
        PolicyError: Says what exists.
    """
    _parse(policy)


def make_router(
    policy: str,
    fleet: Fleet,
    hub: Hub,
    requests: Sequence[Request],
    *,
    seed: int = 0,
    can_pull: bool = False,
    peers_reach: bool = True,
) -> Router:
    """Make the router of a policy.

    Args:
        policy: A name, and settings as ``:key=value``.
        fleet: Its fleet.
        hub: What its gateways tell each other.
        requests: The trace, for rules that depend on it.
        seed: For ties and draws.
        can_pull: Whether workers can fetch KV from elsewhere; ours alone asks for it.
        peers_reach: Whether they can fetch it from each other.

    Raises:
        PolicyError: If it does not exist.
    """
    name, settings = _parse(policy)
    if name in OURS:
        return OursRouter(
            fleet,
            hub,
            seed=seed,
            without=name.removeprefix("ours").removeprefix("-"),
            learns=bool(settings["learn"]),
            can_pull=can_pull,
            peers_reach=peers_reach,
        )
    rng = Random(seed)
    if name in ORACLES:
        model = fleet.model
        pooled = len(fleet.engines) * (model.gpu_tokens + model.cpu_tokens) // model.block_tokens
        return OracleRouter(fleet, hub, rng, PooledCache(pooled if name == "oracle" else 0))
    peer = _PEERS[name]
    if name == "chwbl":
        settings["key_block"] = rules.common_depth(requests)
    rule = peer.make(**settings)
    return PeerRouter(fleet, rule, hub, rng, sees=peer.sees, books_blocks=peer.books_blocks)


def _parse(policy: str) -> tuple[str, dict[str, Any]]:
    """Split a policy into its name and all its settings."""
    name, *pairs = policy.split(":")
    if name not in NAMES:
        raise PolicyError(f"unknown policy {name!r}: expected one of {', '.join(NAMES)}")
    settings: dict[str, Any] = {}
    if name in _PEERS:
        settings = dict(_PEERS[name].settings)
    elif name in OURS:
        settings = {"learn": 0}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in settings:
            known = ", ".join(settings) or "none"
            raise PolicyError(f"{policy}: {name} has no setting {key!r}; it has: {known}")
        try:
            settings[key] = float(value) if isinstance(settings[key], float) else int(value)
        except ValueError as error:
            raise PolicyError(f"{policy}: {key} must be a number, not {value!r}") from error
    return name, settings
