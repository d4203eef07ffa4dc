"""Who may reach, read and do what in a release: network policies, roles, secrets, names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.deploy.chart_parts import (
    CHART,
    CI_VALUES,
    Object,
    Values,
    component,
    containers,
    gateway_config,
    gateway_of,
    load_values,
    of_kind,
    pod_of,
    render,
)

MONITORING = {"kubernetes.io/metadata.name": "monitoring"}
OWN = {"kubernetes.io/metadata.name": "llm"}
STRANGER = ({"app": "stranger"}, {"kubernetes.io/metadata.name": "elsewhere"})


def _labels(objects: list[Object], part: str) -> dict[str, str]:
    for one in objects:
        if (
            one["kind"] in ("Deployment", "StatefulSet", "CronJob", "Pod")
            and component(one) == part
        ):
            labels: dict[str, str] = pod_of(one)["metadata"]["labels"]
            return labels
    raise AssertionError(part)


def _is_peer(peers: list[Object] | None, pod: dict[str, str], space: dict[str, str]) -> bool:
    """Whether a policy's list of peers has a pod with these labels, in such a namespace."""
    if not peers:
        return True
    for peer in peers:
        inside = peer.get("namespaceSelector", {}).get("matchLabels")
        # A peer without a namespace is in the policy's own.
        wanted_space = inside if inside is not None else OWN
        wanted_pod = peer.get("podSelector", {}).get("matchLabels", {})
        if "ipBlock" in peer:
            continue
        if wanted_space.items() <= space.items() and wanted_pod.items() <= pod.items():
            return True
    return False


def _may_enter(objects: list[Object], source: Any, part: str, port: int) -> bool:
    """Whether connections of ``source`` (labels of pod and namespace) to a part's port get in."""
    target = _labels(objects, part)
    policies = [
        one["spec"]
        for one in of_kind(objects, "NetworkPolicy")
        if one["spec"]["podSelector"]["matchLabels"].items() <= target.items()
    ]
    rules = [rule for policy in policies for rule in policy["ingress"]]
    return not policies or any(
        port in [p["port"] for p in rule["ports"]] and _is_peer(rule.get("from"), *source)
        for rule in rules
    )


def _may_leave(objects: list[Object], part: str, target: Any, port: int) -> bool:
    source = _labels(objects, part)
    policies = [
        one["spec"]
        for one in of_kind(objects, "NetworkPolicy")
        if one["spec"]["podSelector"]["matchLabels"].items() <= source.items()
        and "Egress" in one["spec"]["policyTypes"]
    ]
    rules = [rule for policy in policies for rule in policy["egress"]]
    return not policies or any(
        ("ports" not in rule or port in [p["port"] for p in rule["ports"]])
        and _is_peer(rule.get("to"), *target)
        for rule in rules
    )


def test_only_those_who_need_it_reach_a_port() -> None:
    objects = render(load_values(CHART / "ci" / "everything.yaml"))
    parts = {
        part: (_labels(objects, part), OWN)
        for part in ("gateway", "worker-runner", "worker-llama", "valkey", "warmup", "test")
    }
    sources = parts | {
        "stranger": STRANGER,
        "neighbour": ({"app": "stranger"}, OWN),
        "prometheus": ({}, MONITORING),
        "client": ({}, {"access": "llm"}),
        "operator": ({"role": "operator"}, OWN),
    }
    expected = {
        ("gateway", 8080): {"client", "test"},
        ("gateway", 9090): {"prometheus", "warmup", "operator"},
        ("worker-runner", 8000): {"gateway", "worker-runner", "prometheus"},
        ("worker-runner", 5557): {"gateway"},
        ("worker-runner", 5558): {"gateway"},
        ("worker-llama", 8000): {"gateway", "worker-llama", "prometheus"},
        ("worker-llama", 5557): {"gateway"},
        ("valkey", 6379): {"gateway"},
    }
    for (part, port), who in expected.items():
        found = {name for name, at in sources.items() if _may_enter(objects, at, part, port)}
        assert found == who, (part, port)


def test_the_gateway_reaches_what_it_is_configured_to_use_and_nothing_else() -> None:
    objects = render(load_values(CHART / "ci" / "everything.yaml"))
    for part, port in (("worker-runner", 8000), ("worker-llama", 5557), ("valkey", 6379)):
        assert _may_leave(objects, "gateway", (_labels(objects, part), OWN), port), part
    assert _may_leave(objects, "gateway", STRANGER, 53)
    assert _may_leave(objects, "gateway", STRANGER, 4318)  # the collector's, from the URL
    assert _may_leave(objects, "gateway", STRANGER, 6443)  # the Kubernetes API
    assert _may_leave(objects, "gateway", STRANGER, 8443)  # as the values say
    for port in (80, 8000, 5557, 6379):
        assert not _may_leave(objects, "gateway", STRANGER, port), port
    assert not _may_leave(objects, "valkey", STRANGER, 443)
    assert not _may_leave(render(), "gateway", STRANGER, 6443)


def test_workers_elsewhere_are_reached_where_they_may_be() -> None:
    anywhere = render(load_values(CHART / "ci" / "external-workers.yaml"))
    assert _may_leave(anywhere, "gateway", STRANGER, 8000)
    named = render(load_values(CHART / "ci" / "sglang-external.yaml"))
    engines: Any = ({}, {"kubernetes.io/metadata.name": "engines"})
    assert _may_leave(named, "gateway", engines, 30000)
    assert not _may_leave(named, "gateway", STRANGER, 30000)


@pytest.mark.parametrize(
    ("config", "port"),
    [
        ({"index": {"backend": "redis", "url": "redis://redis:7000/1"}}, 7000),
        ({"index": {"backend": "redis", "url": "redis://redis"}}, 6379),
        ({"telemetry": {"otlp_endpoint": "https://traces.example.com/v1/traces"}}, 443),
        ({"telemetry": {"otlp_endpoint": "http://otel:4318"}}, 4318),
    ],
)
def test_ports_of_configured_addresses_are_open(config: Values, port: int) -> None:
    assert not _may_leave(render(), "gateway", STRANGER, port)
    assert _may_leave(render({"config": config}), "gateway", STRANGER, port)


def _rights(values: Values) -> dict[str, list[str]]:
    objects = render(values)
    assert not of_kind(objects, "ClusterRole")
    roles = {one["metadata"]["namespace"]: one["rules"] for one in of_kind(objects, "Role")}
    bindings = {one["metadata"]["namespace"] for one in of_kind(objects, "RoleBinding")}
    assert bindings == set(roles)
    spec = pod_of(gateway_of(objects))["spec"]
    assert spec["automountServiceAccountToken"] is bool(roles)
    for rules in roles.values():
        assert all(rule["verbs"] == ["get", "list", "watch"] for rule in rules)
    return {
        space: [kind for r in rules for kind in r["resources"]] for space, rules in roles.items()
    }


def _pools(*discovery: Values) -> Values:
    pools = [
        {"name": f"p{i}", "models": [f"m{i}"], "discovery": one} for i, one in enumerate(discovery)
    ]
    return {"workers": [], "config": {"pools": pools}}


def test_roles_are_there_only_to_watch_and_only_what_is_watched() -> None:
    assert _rights({}) == {}
    assert _rights({"discovery": {"type": "dns"}}) == {}
    assert _rights({"discovery": {"type": "kubernetes"}}) == {"llm": ["pods"]}
    service = {"type": "kubernetes", "service": "vllm"}
    pods = {"type": "kubernetes", "selector": "app=vllm"}
    away = {**pods, "namespace": "engines"}
    assert _rights(_pools(service)) == {"llm": ["endpointslices"]}
    assert _rights(_pools(service, pods)) == {"llm": ["pods", "endpointslices"]}
    assert _rights(_pools(service, away)) == {"llm": ["endpointslices"], "engines": ["pods"]}
    assert _rights(_pools({**pods, "kubeconfig": "/etc/kube/config"})) == {}


@pytest.mark.parametrize("kind", ["static", "dns", "kubernetes"])
def test_the_gateway_is_told_of_every_set_where_it_listens(kind: str) -> None:
    values = load_values(CHART / "ci" / "two-runners.yaml") | {"discovery": {"type": kind}}
    if kind != "static":
        values["workers"][0]["runner"]["servePeers"] = False
    values["workers"][0] |= {"port": 9000, "kvEvents": {"port": 9001, "replayPort": 9002}}
    objects = render(values)
    pools = {pool["name"]: pool for pool in gateway_config(objects)["pools"]}
    assert [pool["models"] for pool in pools.values()] == [["smollm2"], ["qwen"]]
    for workers in of_kind(objects, "StatefulSet"):
        name = component(workers).removeprefix("worker-")
        args = containers(workers, init=False)[0]["args"]
        port = args[args.index("--port") + 1]
        events = args[args.index("--kv-events") + 1].rpartition(":")[2]
        replay = args[args.index("--kv-replay") + 1].rpartition(":")[2]
        assert args[args.index("--served-model-name") + 1] in pools[name]["models"]
        if kind == "static":
            service, base = workers["spec"]["serviceName"], workers["metadata"]["name"]
            hosts = [f"{base}-{i}.{service}" for i in range(workers["spec"]["replicas"])]
            assert pools[name]["workers"] == [
                {
                    "id": f"{base}-{i}",
                    "url": f"http://{host}:{port}",
                    "kv_events": f"tcp://{host}:{events}",
                    "kv_replay": f"tcp://{host}:{replay}",
                }
                for i, host in enumerate(hosts)
            ]
            continue
        discovery = pools[name]["discovery"]
        assert str(discovery["port"]) == port
        assert discovery["kv_events"] == f"tcp://{{ip}}:{events}"
        assert discovery["kv_replay"] == f"tcp://{{ip}}:{replay}"
        if kind == "kubernetes":
            wanted = dict(pair.split("=") for pair in discovery["selector"].split(","))
            found = [
                component(one)
                for one in objects
                if one["kind"] in ("StatefulSet", "Deployment", "Pod")
                and wanted.items() <= pod_of(one)["metadata"]["labels"].items()
            ]
            assert found == [component(workers)]
        else:
            assert discovery["name"] == f"{workers['spec']['serviceName']}.llm.svc"


def test_secrets_lie_in_secrets_alone() -> None:
    secrets: Values = {
        name: {"value": f"canary-{name}-0123456789"}
        for name in ("adminToken", "salt", "hfToken", "valkeyPassword")
    }
    secrets["env"] = {"ACME": {"value": "canary-env"}}
    secrets["keyFiles"] = {"acme": {"value": "canary-keys"}}
    values: Values = {
        "secrets": secrets,
        "valkey": {"enabled": True},
        "helmTest": {"apiKey": {"value": "canary-test"}},
    }
    objects = render(values)
    (secret,) = of_kind(objects, "Secret")
    rest = [one for one in objects if one is not secret]
    assert "canary" not in json.dumps(rest)
    assert len(secret["stringData"]) == 7
    asked = json.dumps(rest)
    for key in secret["stringData"]:
        assert f'"{key}"' in asked, key


@pytest.mark.parametrize("path", CI_VALUES, ids=lambda path: path.stem)
def test_the_chart_makes_a_secret_only_of_what_it_was_given(path: Any) -> None:
    given = json.dumps(load_values(path).get("secrets", {}))
    assert bool(of_kind(render(load_values(path)), "Secret")) is ('"value"' in given)
