"""How the parts of a release go together: time to end, scaling, monitoring, labels, routes."""

from __future__ import annotations

from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.deploy.chart_parts import (
    CHART,
    CI_VALUES,
    Values,
    component,
    containers,
    find,
    gateway_config,
    gateway_of,
    load_values,
    of_kind,
    pod_of,
    render,
    rendered_files,
)


@pytest.mark.parametrize("drain_s", [1, 30, 29.5, 600, 3600])
def test_pods_get_the_time_that_their_streams_have(drain_s: float) -> None:
    objects = render({"config": {"server": {"drain_s": drain_s}}, "gateway": {"preStopSeconds": 7}})
    spec = pod_of(gateway_of(objects))["spec"]
    assert spec["containers"][0]["lifecycle"]["preStop"] == {"sleep": {"seconds": 7}}
    assert 10 <= spec["terminationGracePeriodSeconds"] - drain_s - 7 <= 30
    for one in of_kind(objects, "StatefulSet"):
        spec = pod_of(one)["spec"]
        pause = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        # The bundled runner lets requests go on for half a minute.
        assert spec["terminationGracePeriodSeconds"] >= pause + 30 + 5


def test_the_default_lets_the_longest_wait_for_a_first_byte_end() -> None:
    # server.limits.first_byte_s is 600.
    assert pod_of(gateway_of(render()))["spec"]["terminationGracePeriodSeconds"] > 600


def test_what_scales_by_itself_has_no_number_of_pods() -> None:
    for name in ("keda", "hpa", "kubernetes-discovery", "everything"):
        objects = render(load_values(CHART / "ci" / f"{name}.yaml"))
        scalers = of_kind(objects, "HorizontalPodAutoscaler") + of_kind(objects, "ScaledObject")
        assert scalers
        targets = {
            (one["spec"]["scaleTargetRef"]["kind"], one["spec"]["scaleTargetRef"]["name"])
            for one in scalers
        }
        scaled = {
            (one["kind"], one["metadata"]["name"])
            for one in objects
            if one["kind"] in ("Deployment", "StatefulSet") and "replicas" not in one["spec"]
        }
        assert scaled == targets


def test_keda_asks_for_the_prefill_that_waits_for_that_set() -> None:
    objects = render(load_values(CHART / "ci" / "keda.yaml"))
    (trigger,) = find(objects, "ScaledObject")["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    assert query == 'sum(warmlane_queued_prefill_seconds{pool="runner",namespace=~"llm|"})'
    assert [pool["name"] for pool in gateway_config(objects)["pools"]] == ["runner"]


def test_monitors_find_the_services_and_ports_that_have_metrics() -> None:
    for config, expected in (({}, "admin"), ({"server": {"admin_port": None}}, "http")):
        values = {"metrics": {"serviceMonitor": {"enabled": True}}, "config": config}
        objects = render(values)
        monitors = {component(one): one["spec"] for one in of_kind(objects, "ServiceMonitor")}
        assert set(monitors) == {"gateway", "worker-runner"}
        for part, spec in monitors.items():
            (endpoint,) = spec["endpoints"]
            ports = [
                port["name"]
                for one in of_kind(objects, "Service")
                if spec["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
                for port in one["spec"]["ports"]
            ]
            # Exactly one: each pod is scraped once.
            assert ports.count(endpoint["port"]) == 1, part
            assert endpoint["path"] == "/metrics"
        assert monitors["gateway"]["endpoints"][0]["port"] == expected


def test_operators_port_is_scraped_in_the_language_that_it_speaks() -> None:
    secrets = {"tls": {"existingSecret": "cert"}}
    for server, scheme in (({}, "http"), ({"admin_tls": True}, "https")):
        values = {"config": {"server": server}, "secrets": secrets}
        objects = render(values | {"metrics": {"serviceMonitor": {"enabled": True}}})
        (spec,) = (
            one["spec"] for one in of_kind(objects, "ServiceMonitor") if component(one) == "gateway"
        )
        assert [each["scheme"] for each in spec["endpoints"]] == [scheme]


def test_pods_are_spread_among_those_of_their_own_part() -> None:
    for one in render(load_values(CHART / "ci" / "everything.yaml")):
        if one["kind"] not in ("Deployment", "StatefulSet") or component(one) == "valkey":
            continue
        spreads = pod_of(one)["spec"]["topologySpreadConstraints"]
        assert spreads
        for spread in spreads:
            assert spread["labelSelector"] == one["spec"]["selector"]


def test_tls_on_the_client_port_is_known_to_probes_and_services() -> None:
    objects = render(load_values(CHART / "ci" / "tls-tenants.yaml"))
    (container,) = containers(gateway_of(objects))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    services = [p for s in of_kind(objects, "Service") for p in s["spec"]["ports"]]
    assert [p["appProtocol"] for p in services if p["port"] == 8080] == ["https"]
    assert [p["appProtocol"] for p in services if p["port"] == 9090] == ["http"]


def test_names_that_look_like_numbers_stay_names() -> None:
    values = load_values(CHART / "ci" / "everything.yaml")
    values |= {"fullnameOverride": "12", "serviceAccount": {"name": "77"}, "extraObjects": []}
    values["secrets"]["adminToken"]["existingSecret"] = "1e3"
    values["gateway"]["priorityClassName"] = "99"
    values["image"]["pullSecrets"] = ["5"]
    custom = ("ServiceMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute")
    for one in render(values, name="007", namespace="1234"):
        assert isinstance(one["metadata"]["name"], str)
        assert isinstance(one["metadata"]["namespace"], str)
        if one["kind"] not in custom:
            kubernetes_validate.validate(one, "1.33.0", strict=True)


def test_the_route_leads_to_the_client_port() -> None:
    objects = render(load_values(CHART / "ci" / "everything.yaml"))
    route = find(objects, "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    service = next(
        one for one in of_kind(objects, "Service") if one["metadata"]["name"] == backend["name"]
    )
    assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert not of_kind(render(), "HTTPRoute")


def test_labels_that_are_given_twice_stand_once_and_the_nearer_one_counts() -> None:
    values: Values = {
        "commonLabels": {"team": "all", "release": "all"},
        "gateway": {"podLabels": {"team": "gateway"}},
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    }
    text = rendered_files(values)["templates/gateway.yaml"]
    assert text.count("team: gateway") == 1
    objects = render(values)
    assert pod_of(gateway_of(objects))["metadata"]["labels"]["team"] == "gateway"
    for monitor in of_kind(objects, "ServiceMonitor"):
        labels = monitor["metadata"]["labels"]
        assert (labels["team"], labels["release"]) == ("all", "prometheus")


@pytest.mark.parametrize("path", CI_VALUES, ids=lambda path: path.stem)
def test_no_key_stands_twice_anywhere(path: Any) -> None:
    for name, text in rendered_files(load_values(path)).items():
        if not name.endswith("NOTES.txt"):
            for document in yaml.compose_all(text):
                _refuse_repeats(document, name)


def _refuse_repeats(node: yaml.Node | None, at: str) -> None:
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), (at, keys)
        for key, value in node.value:
            _refuse_repeats(value, f"{at}/{key.value}")
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_repeats(value, at)
