"""The chart as tests see it: rendered by Helm's own library, as lists of objects."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "helm" / "warmlane"
CI_VALUES = sorted((CHART / "ci").glob("*.yaml"))

# The release the chart is checked against; the oldest one it says it works with is 1.30.
KUBERNETES = "1.33.0"

# Many times as quick as the one in Python, for the same YAML.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Object = dict[str, Any]
Values = dict[str, Any]


@cache
def chart() -> helm.Chart:
    """The chart, loaded once."""
    return helm.Chart.load(CHART)


def load_values(path: Path) -> Values:
    """Return the values of a file."""
    values: Values = yaml.safe_load(path.read_text("utf-8")) or {}
    return values


def rendered_files(
    values: Values | None = None, name: str = "warmlane", namespace: str = "llm"
) -> dict[str, str]:
    """Return what each template renders to, by its path inside the chart.

    Raises:
        HelmValuesError: If the values do not fit the schema.
        HelmRenderError: If the chart refuses them.
    """
    files = chart().render(values or {}, name=name, namespace=namespace)
    return {path.partition("/")[2]: text for path, text in files.items()}


def render(
    values: Values | None = None, name: str = "warmlane", namespace: str = "llm"
) -> list[Object]:
    """Return all objects of a release, hooks included."""
    return copy.deepcopy(_rendered(json.dumps(values or {}), name, namespace))


@cache
def _rendered(values: str, name: str, namespace: str) -> list[Object]:
    files = rendered_files(json.loads(values), name, namespace)
    texts = [text for path, text in files.items() if not path.endswith("NOTES.txt")]
    return [found for text in texts for found in yaml.load_all(text, _Loader) if found]


def find(objects: list[Object], kind: str, part: str | None = None) -> Object:
    """Return the one object of a kind whose name is the base's, or ends with ``-part``."""
    found = of_kind(objects, kind)
    if part is not None:
        found = [one for one in found if one["metadata"]["name"].endswith(f"-{part}")]
    assert len(found) == 1, [one["metadata"]["name"] for one in found]
    return found[0]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    """Return the objects of one kind."""
    return [one for one in objects if one["kind"] == kind]


def gateway_of(objects: list[Object]) -> Object:
    """Return the gateway's Deployment."""
    (found,) = (one for one in of_kind(objects, "Deployment") if component(one) == "gateway")
    return found


def component(one: Object) -> str:
    """Return which part of the release an object belongs to."""
    return str(one["metadata"]["labels"]["app.kubernetes.io/component"])


def pod_of(one: Object) -> Object:
    """Return the pod that an object is, or makes: with ``metadata`` and ``spec``."""
    if one["kind"] == "Pod":
        return one
    spec = one["spec"]
    if one["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    template: Object = spec["template"]
    return template


def pods(objects: list[Object]) -> list[Object]:
    """Return all objects that make pods."""
    kinds = ("Deployment", "StatefulSet", "CronJob", "Pod")
    return [one for one in objects if one["kind"] in kinds]


def containers(one: Object, *, init: bool = True) -> list[Object]:
    """Return the containers of a pod's object."""
    spec = pod_of(one)["spec"]
    return [*(spec.get("initContainers", []) if init else []), *spec["containers"]]


def gateway_config(objects: list[Object]) -> Object:
    """Return the gateway's configuration as its ConfigMap has it."""
    text = find(objects, "ConfigMap", "config")["data"]["config.yaml"]
    config: Object = yaml.safe_load(text)
    return config


def environment(container: Object, secrets: dict[tuple[str, str], str] | None = None) -> Object:
    """Return a container's variables as the kubelet would set them.

    Args:
        container: Of a pod.
        secrets: (name, key) of a Secret to its value; everything else is ``SECRET``.
    """
    found: dict[str, str] = {}
    for item in container.get("env", []):
        value = item.get("value", "")
        if "valueFrom" in item:
            ref = item["valueFrom"].get("secretKeyRef", {"name": "", "key": ""})
            value = (secrets or {}).get((ref["name"], ref["key"]), "SECRET")
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        found[item["name"]] = value
    return found


def lint(values: Values) -> list[str]:
    """Return what ``helm lint --strict`` finds fault with."""
    report = helm.lint(CHART, values, strict=True, kube_version=f"v{KUBERNETES}")
    # 1 is information: the chart has no icon.
    return [json.dumps(one) for one in report["messages"] if one["severity"] > 1]
