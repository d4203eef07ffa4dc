"""Faults that other charts had, each as a class: arguments, budgets, probes, restarts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from tests.deploy.chart_parts import (
    CHART,
    CI_VALUES,
    Object,
    Values,
    component,
    containers,
    environment,
    find,
    gateway_config,
    gateway_of,
    load_values,
    of_kind,
    pod_of,
    render,
)

# What YAML, Go's templates, a shell or the kubelet could take for something else.
TRICKY = [
    "--kv-events-config",
    '{"enable_kv_cache_events": true, "publisher": "zmq"}',
    "--override=a \"b\" 'c' $d {{ x }}",
    "{{ .Values.secret }}",
    "true",
    "no",
    "~",
    "null",
    "007",
    "1e3",
    "0x1F",
    "1_000",
    "12:30",
    "2026-11-30",
    ".inf",
    "=",
    "",
    " ",
    " leading and trailing ",
    "- item",
    "key: value # no comment",
    "&anchor *alias !tag %directive @at `tick`",
    "two\nlines\n\nand a gap\n",
    "tab\tand\\backslash \\n",
    "umlaut ü, 漢字, 🦊",
    "a\u2028b\u0085c\u00a0d",
    "$$(NAME) ${NAME} $NAME",
    "x" * 5000,
]


def engine_of(objects: list[Object]) -> Object:
    """The main container of the only worker set."""
    (workers,) = of_kind(objects, "StatefulSet")
    return containers(workers, init=False)[0]


def test_d01_arguments_arrive_one_to_one() -> None:
    vllm: Values = {"name": "a", "type": "vllm", "model": "m", "extraArgs": TRICKY}
    for sets in ({"engine": {"extraArgs": TRICKY}}, {"workers": [vllm]}):
        args = engine_of(render(sets))["args"]
        assert args[-len(TRICKY) :] == TRICKY
    gateway = containers(gateway_of(render({"gateway": {"extraArgs": TRICKY}})))[0]
    assert gateway["args"] == ["serve", "--config", "/etc/warmlane/config.yaml", *TRICKY]
    values = load_values(CHART / "ci" / "everything.yaml")
    values["warmup"]["extraArgs"] = TRICKY
    job = containers(find(render(values), "CronJob"))[0]
    assert job["args"][-len(TRICKY) :] == TRICKY


def test_d01_variables_stay_strings() -> None:
    tricky = {f"V{i}": text for i, text in enumerate(TRICKY)}
    values: Values = {
        "engine": {"env": {"A": "true", "B": "007", "C": "1e3", **tricky}},
        "gateway": {"env": tricky},
    }
    objects = render(values)
    engine = environment(engine_of(objects))
    assert (engine["A"], engine["B"], engine["C"]) == ("true", "007", "1e3")
    gateway = environment(containers(gateway_of(objects))[0])
    for name, text in tricky.items():
        assert engine[name] == gateway[name] == text


def test_d01_the_engine_s_own_json_argument_is_one_argument() -> None:
    args = engine_of(render({"workers": [{"name": "a", "type": "vllm", "model": "m"}]}))["args"]
    config = yaml.safe_load(args[args.index("--kv-events-config") + 1])
    assert config["endpoint"] == "tcp://*:5557"
    assert config["replay_endpoint"] == "tcp://*:5558"
    again = engine_of(
        render({"workers": [{"name": "a", "type": "vllm", "model": "m", "extraArgs": TRICKY[:2]}]})
    )["args"]
    assert again.count("--kv-events-config") == 1


def test_d01_the_configuration_is_what_was_written() -> None:
    # Only shapes are checked by the schema; any text may stand where a text is asked for.
    pool = {
        "name": "a",
        "models": TRICKY,
        "aliases": dict.fromkeys(TRICKY[:-1], "m"),
        "workers": [{"id": "w", "url": "http://w:1"}],
        "capacity_tokens": 123456789012,
        "weight": 5_000_000,
    }
    config = {
        "index": {"max_blocks": 5_000_000, "timeout_ms": 50},
        "pools": [pool],
        "routes": [{"match": {"header": {"x-a": text}}, "pool": "a"} for text in TRICKY],
        "telemetry": {"trace_sample": 0.000001},
    }
    written = gateway_config(render({"workers": [], "config": config}))
    server = written.pop("server")
    assert server == {"port": 8080, "admin_port": 9090, "drain_s": 600}
    assert written == config
    assert type(written["pools"][0]["weight"]) is int


def _budgets(values: Values) -> dict[str, tuple[Any, int]]:
    """Part of the release -> (spec of its budget or None, the fewest pods it has)."""
    objects = render(values)
    fewest = {}
    for one in objects:
        if one["kind"] in ("Deployment", "StatefulSet") and "replicas" in one["spec"]:
            fewest[component(one)] = one["spec"]["replicas"]
        elif one["kind"] == "HorizontalPodAutoscaler":
            fewest[component(one)] = one["spec"]["minReplicas"]
        elif one["kind"] == "ScaledObject":
            fewest[component(one)] = one["spec"]["minReplicaCount"]
    budgets = {component(one): one["spec"] for one in of_kind(objects, "PodDisruptionBudget")}
    return {part: (budgets.get(part), least) for part, least in fewest.items()}


@pytest.mark.parametrize("path", CI_VALUES, ids=lambda path: path.stem)
def test_d03_no_budget_ever_blocks_a_drain(path: Any) -> None:
    for part, (budget, fewest) in _budgets(load_values(path)).items():
        if fewest == 1:
            assert budget is None, part
        else:
            assert budget is not None, part
            assert budget["maxUnavailable"] == 1
            assert "minAvailable" not in budget


def test_d03_one_replica_has_none_and_two_lose_one_at_a_time() -> None:
    assert _budgets({"gateway": {"replicas": 1}})["gateway"] == (None, 1)
    two = _budgets({"gateway": {"replicas": 2}, "valkey": {"enabled": True}})
    assert two["gateway"][0]["maxUnavailable"] == 1
    # The shared index has one pod, whatever happens.
    assert two["valkey"] == (None, 1)


@pytest.mark.parametrize("seconds", [1, 7, 60, 900, 901, 86_400])
@pytest.mark.parametrize("engine", ["runner", "vllm"])
def test_d05_a_model_may_load_as_long_as_it_was_said(engine: str, seconds: int) -> None:
    model = {"type": engine, "model": "smollm2"}
    for values in (
        {"engine": {**model, "modelLoadSeconds": seconds}},
        {"workers": [{"name": "a", **model, "modelLoadSeconds": seconds}]},
    ):
        container = engine_of(render(values))
        startup = container["startupProbe"]
        assert seconds <= startup["failureThreshold"] * startup["periodSeconds"] < seconds + 60
        assert not startup.get("initialDelaySeconds")
        for probe in ("livenessProbe", "readinessProbe"):
            assert not container[probe].get("initialDelaySeconds")
            # Once it runs, a dead engine is noticed within two minutes.
            assert container[probe]["failureThreshold"] * container[probe]["periodSeconds"] <= 120


def test_d05_the_gateway_s_life_does_not_hang_on_engines_or_on_redis() -> None:
    container = containers(gateway_of(render(load_values(CHART / "ci" / "everything.yaml"))))[0]
    paths = {
        probe: container[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    # /health/ready is about draining and the first look at the workers, as docs say; see also
    # tests/gateway. Nothing else may decide on life and death.
    assert paths == {
        "startupProbe": "/health/live",
        "livenessProbe": "/health/live",
        "readinessProbe": "/health/ready",
    }
    gateway = pod_of(gateway_of(render()))["spec"]
    assert "initContainers" not in gateway


def _annotations(values: Values, name: str = "warmlane") -> dict[str, str]:
    found: dict[str, str] = pod_of(gateway_of(render(values, name=name)))["metadata"]["annotations"]
    return found


# What is changed, by the path of the value; each alone must roll the gateway's pods.
CHANGES: list[tuple[str, Any]] = [
    ("config.routing", {"share": 50}),
    ("config.server.drain_s", 601),
    ("config.telemetry", {"log_level": "debug"}),
    ("engine.pool", {"weight": 3}),
    ("engine.port", 8001),
    ("engine.kvEvents.enabled", False),
    ("discovery.type", "dns"),
    ("valkey.enabled", True),
    ("secrets.adminToken.value", "another"),
    ("secrets.adminToken.existingSecretKey", "another"),
    ("secrets.env", {"KEY": {"value": "another"}}),
    ("secrets.env", {"KEY": {"existingSecret": "another"}}),
    ("secrets.keyFiles", {"acme": {"value": "another"}}),
    ("secrets.tls.existingSecret", "another"),
    ("secrets.redisUrl.existingSecret", "another"),
]


@pytest.mark.parametrize(("path", "value"), CHANGES, ids=lambda value: str(value)[:40])
def test_d19_a_change_of_configuration_or_secrets_rolls_the_pods(path: str, value: Any) -> None:
    before: Values = {
        "secrets": {
            "adminToken": {"value": "one"},
            "env": {"KEY": {"value": "one"}},
            "keyFiles": {"acme": {"value": "one"}},
        }
    }
    after = copy.deepcopy(before)
    at = after
    *parents, last = path.split(".")
    for key in parents:
        at = at.setdefault(key, {})
    at[last] = value
    if path == "secrets.adminToken.existingSecretKey":
        for values in (before, after):
            values["secrets"]["adminToken"] |= {"value": "", "existingSecret": "token"}
    assert _annotations(before) != _annotations(after)


def test_d19_nothing_else_rolls_them() -> None:
    before = _annotations({})
    assert before == _annotations({"gateway": {"replicas": 1}, "metrics": {"dashboards": {}}})
    assert before == _annotations({"networkPolicy": {"enabled": False}})
    # The workers' pods do not follow the gateway's configuration.
    (one,) = of_kind(render(), "StatefulSet")
    (other,) = of_kind(render({"config": {"routing": {"share": 50}}}), "StatefulSet")
    assert pod_of(one) == pod_of(other)


def test_d19_files_are_mounted_so_that_a_running_gateway_sees_them_change() -> None:
    objects = render(load_values(CHART / "ci" / "tls-tenants.yaml"))
    (container,) = containers(gateway_of(objects))
    # A mount with subPath is never written again.
    assert not [mount for mount in container["volumeMounts"] if "subPath" in mount]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    config = gateway_config(objects)
    assert config["server"]["tls"]["cert"] == f"{mounts['tls']}/tls.crt"
    assert config["tenants"][1]["keys_file"] == f"{mounts['key-files']}/umbrella"
