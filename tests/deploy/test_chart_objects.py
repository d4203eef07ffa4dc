"""What the chart makes of twelve values files: valid objects, restricted pods, a usable config."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from gateway.settings import load
from gateway.unsupported import unsupported
from tests.deploy.chart_parts import (
    CHART,
    CI_VALUES,
    Object,
    chart,
    containers,
    environment,
    find,
    gateway_config,
    gateway_of,
    load_values,
    of_kind,
    pod_of,
    pods,
    render,
    rendered_files,
)

# The oldest release that the chart takes, and the newest that the validator knows.
RELEASES = ("1.30.0", "1.37.0")
CUSTOM = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}
# Longest release name that Helm takes.
LONG_NAME = "a" + "b" * 51 + "c"


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Kind -> the operators' own model of it. They take seconds to import."""
    import cloudcoil.models.keda.v1alpha1 as keda
    import cloudcoil.models.prometheus_operator.v1 as operator

    return {
        "ServiceMonitor": operator.ServiceMonitor,
        "PrometheusRule": operator.PrometheusRule,
        "ScaledObject": keda.ScaledObject,
    }


@pytest.fixture(params=CI_VALUES, ids=lambda path: path.stem, scope="module")
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(load_values(request.param))


@pytest.mark.parametrize("release", RELEASES)
def test_kubernetes_knows_every_field(release: str) -> None:
    unique: dict[str, Object] = {}
    for path in CI_VALUES:
        for one in render(load_values(path)):
            if one["kind"] not in CUSTOM | {"HTTPRoute"}:
                unique.setdefault(json.dumps(one), one)
    assert len(unique) > 50
    for one in unique.values():
        kubernetes_validate.validate(one, release, strict=True)


def test_operators_know_every_field_of_their_objects(models: dict[str, Any]) -> None:
    objects = render(load_values(CHART / "ci" / "everything.yaml"))
    custom = [one for one in objects if one["kind"] in CUSTOM]
    assert {one["kind"] for one in custom} == set(models) == CUSTOM
    for one in custom:
        model = models[one["kind"]].model_validate(one)
        kept = model.model_dump(mode="json", by_alias=True, exclude_none=True)
        assert _lost(one, kept) == [], one["kind"]


def _lost(ours: Any, kept: Any, at: str = "") -> list[str]:
    """Return the keys of ours that a model took for nothing it knows."""
    if isinstance(ours, dict):
        if not isinstance(kept, dict):
            return [at]
        gone = [f"{at}/{key}" for key in ours if key not in kept]
        return gone + [
            lost
            for key in ours
            if key in kept
            for lost in _lost(ours[key], kept[key], f"{at}/{key}")
        ]
    if isinstance(ours, list):
        if not isinstance(kept, list) or len(ours) != len(kept):
            return [at]
        return [lost for i, one in enumerate(ours) for lost in _lost(one, kept[i], f"{at}/{i}")]
    return []


def test_the_round_trip_notices_a_key_that_nobody_knows(models: dict[str, Any]) -> None:
    values = load_values(CHART / "ci" / "external-workers.yaml")
    monitor = find(
        render(values | {"metrics": {"serviceMonitor": {"enabled": True}}}), "ServiceMonitor"
    )
    monitor["spec"]["endpoints"][0]["intervall"] = "1s"
    model = models["ServiceMonitor"].model_validate(monitor)
    kept = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert _lost(monitor, kept) == ["/spec/endpoints/0/intervall"]


def test_the_gateway_can_use_its_configuration(objects: list[Object], tmp_path: Path) -> None:
    (container,) = containers(gateway_of(objects))
    secrets = {("redis-login", "uri"): "rediss://user:p%40ss@redis.example.com:6380/1"}
    environ = environment(container, secrets)
    path = tmp_path / "config.yaml"
    path.write_text(find(objects, "ConfigMap", "config")["data"]["config.yaml"])
    settings, _ = load(str(path), environ=environ)
    assert unsupported(settings) == ([], [])
    assert settings.pools
    assert container["args"][:2] == ["serve", "--config"]
    mount = container["volumeMounts"][0]
    assert container["args"][2] == f"{mount['mountPath']}/config.yaml"


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("replicas-valkey", "redis://:SECRET@warmlane-valkey:6379/0"),
        ("hpa", "redis://warmlane-valkey:6379/0"),
        ("external-redis", "SECRET"),
    ],
)
def test_passwords_of_redis_reach_the_gateway_in_a_variable(name: str, url: str) -> None:
    objects = render(load_values(CHART / "ci" / f"{name}.yaml"))
    (container,) = containers(gateway_of(objects))
    index = gateway_config(objects)["index"]
    assert index["backend"] == "redis"
    assert environment(container).get("WARMLANE_INDEX__URL", index.get("url")) == url
    assert "SECRET" not in index.get("url", "")


def test_the_command_that_checks_configurations_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(find(render(), "ConfigMap", "config")["data"]["config.yaml"])
    command = [sys.executable, "-m", "gateway", "config", "check", "--config", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "ok"), result.stderr


def test_every_container_keeps_to_the_restricted_profile(objects: list[Object]) -> None:
    for one in pods(objects):
        spec = pod_of(one)["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for container in containers(one):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            if "HOME" in environment(container):
                home = environment(container)["HOME"]
                (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == home)
                assert not mount.get("readOnly")


def test_every_image_is_pinned(objects: list[Object]) -> None:
    for one in pods(objects):
        for container in containers(one):
            assert re.fullmatch(r"[^:@]+(:[^:@]+|@sha256:[0-9a-f]{64})", container["image"])
            assert not container["image"].endswith(":latest")
            assert container["imagePullPolicy"] == "IfNotPresent"


def test_every_volume_that_is_mounted_is_there(objects: list[Object]) -> None:
    for one in pods(objects):
        volumes = [volume["name"] for volume in pod_of(one)["spec"].get("volumes", [])]
        assert len(volumes) == len(set(volumes))
        for container in containers(one):
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(paths) == len(set(paths))
            assert {m["name"] for m in container.get("volumeMounts", [])} <= set(volumes)


def test_services_and_budgets_select_pods_of_the_release(objects: list[Object]) -> None:
    labels = [pod_of(one)["metadata"]["labels"] for one in pods(objects)]
    for one in objects:
        if one["kind"] == "Service":
            selector = one["spec"]["selector"]
        elif one["kind"] == "PodDisruptionBudget":
            selector = one["spec"]["selector"]["matchLabels"]
        elif one["kind"] == "NetworkPolicy":
            selector = one["spec"]["podSelector"]["matchLabels"]
        else:
            continue
        assert sum(selector.items() <= one.items() for one in labels) == 1, one["metadata"]["name"]


def test_ports_of_services_are_ports_of_their_pods(objects: list[Object]) -> None:
    for service in of_kind(objects, "Service"):
        selector = service["spec"]["selector"].items()
        (pod,) = (
            p for p in map(pod_of, pods(objects)) if selector <= p["metadata"]["labels"].items()
        )
        names = {port["name"] for c in pod["spec"]["containers"] for port in c["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def _sets_of_long_names() -> dict[str, Any]:
    names = ["a" * 30, "a" * 29 + "b", "a" * 29 + "c"]
    return {"workers": [{"name": name, "model": "smollm2", "replicas": 2} for name in names]}


@pytest.mark.parametrize("values", [*map(load_values, CI_VALUES), _sets_of_long_names()])
def test_names_of_long_releases_fit_and_differ(values: dict[str, Any]) -> None:
    objects = render(values, name=LONG_NAME)
    seen = [
        (one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in objects
    ]
    assert len(seen) == len(set(seen))
    for one in objects:
        name = one["metadata"]["name"]
        # A Job of a CronJob and the label of a StatefulSet's revision add eleven characters.
        assert len(name) <= (52 if one["kind"] in ("CronJob", "StatefulSet") else 63), name
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name)
        for value in _label_values(one):
            assert len(value) <= 63
            assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", value)
    for pool in gateway_config(objects)["pools"]:
        assert all(len(worker["id"]) <= 64 for worker in pool.get("workers", []))


def _label_values(one: Any) -> list[str]:
    if isinstance(one, dict):
        own = [
            v
            for k in ("labels", "matchLabels")
            if isinstance(one.get(k), dict)
            for v in one[k].values()
        ]
        return own + [value for item in one.values() for value in _label_values(item)]
    if isinstance(one, list):
        return [value for item in one for value in _label_values(item)]
    return []


def test_selectors_are_made_of_what_never_changes() -> None:
    def selectors(values: dict[str, Any]) -> list[Any]:
        return [
            one["spec"]["selector"]
            for one in render(values)
            if one["kind"] in ("Deployment", "StatefulSet")
        ]

    before = selectors({"valkey": {"enabled": True}})
    after = selectors(
        {
            "valkey": {"enabled": True},
            "commonLabels": {"team": "b"},
            "gateway": {"podLabels": {"x": "y"}},
            "image": {"tag": "9.9.9"},
            "engine": {"podLabels": {"x": "y"}, "model": "smollm2"},
        }
    )
    assert before == after
    for selector in before:
        assert set(selector["matchLabels"]) == {
            "app.kubernetes.io/name",
            "app.kubernetes.io/instance",
            "app.kubernetes.io/component",
        }


def test_an_upgrade_of_the_chart_alone_restarts_no_engine() -> None:
    for one in of_kind(render(), "StatefulSet"):
        labels = pod_of(one)["metadata"]["labels"]
        assert "helm.sh/chart" in one["metadata"]["labels"]
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(labels)


def test_files_that_templates_read_are_inside_the_chart() -> None:
    objects = render(load_values(CHART / "ci" / "everything.yaml"))
    boards = find(objects, "ConfigMap", "dashboards")
    on_disk = {path.name: path.read_text() for path in (CHART / "dashboards").glob("*.json")}
    assert on_disk
    assert boards["data"] == on_disk
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert boards["metadata"]["annotations"]["grafana_folder"] == "Warmlane"


def test_rules_of_the_operator_are_those_of_the_plain_file_with_whole_addresses() -> None:
    objects = render(load_values(CHART / "ci" / "everything.yaml"))
    (rule,) = of_kind(objects, "PrometheusRule")
    plain = yaml.safe_load((CHART / "rules" / "warmlane.yaml").read_text())
    assert plain["groups"]
    for group in plain["groups"]:
        for one in group["rules"]:
            if "annotations" in one:
                address = one["annotations"]["runbook_url"]
                one["annotations"]["runbook_url"] = f"https://example.com/warmlane/{address}"
    assert rule["spec"]["groups"] == plain["groups"]
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_further_objects_are_as_they_are_and_texts_are_templates() -> None:
    objects = render(load_values(CHART / "ci" / "everything.yaml"))
    assert find(objects, "ConfigMap", "it-is")["data"] == {"text": "{{ .Release.Name }} stays"}
    assert find(objects, "ConfigMap", "templated")["data"] == {"namespace": "llm"}


def test_a_packaged_chart_makes_the_same_objects(tmp_path: Path) -> None:
    values = load_values(CHART / "ci" / "everything.yaml")
    with helm.Chart.load(chart().save(tmp_path)) as packaged:
        there = packaged.render(values, name="warmlane", namespace="llm")
    assert {path.partition("/")[2]: text for path, text in there.items()} == rendered_files(values)
