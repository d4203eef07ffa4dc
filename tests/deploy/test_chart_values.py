"""The chart's values: every one is described, the schema is closed, what cannot work is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import helm_python as helm
import pytest
import yaml

from deploy.chart.readme import README, with_table
from deploy.chart.schema import SCHEMA, schema_text
from deploy.chart.values import VALUES, read_values
from gateway.config import Settings
from tests.deploy.chart_parts import CHART, CI_VALUES, Values, chart, lint, load_values, render

WRONG: list[tuple[str, str]] = [
    # Names that do not exist, at every depth.
    ("replicaCount: 3", "'replicaCount' not allowed"),
    ("gateway: {replica: 3}", "'replica' not allowed"),
    ("config: {server: {ports: 8080}}", "'ports' not allowed"),
    ("config: {pools: [{name: a, models: [m], engin: vllm}]}", "'engin' not allowed"),
    ("workers: [{name: a, model: smollm2, gpus: 1}]", "'gpus' not allowed"),
    ("workers: [{name: a, model: smollm2, pool: {weigth: 1}}]", "'weigth' not allowed"),
    ("secrets: {env: {KEY: {secretName: x}}}", "'secretName' not allowed"),
    ("engine: {resources: {limit: {cpu: 1}}}", "'limit' not allowed"),
    # Values of another type or beyond what is possible.
    ("gateway: {replicas: two}", "got string, want integer"),
    ("gateway: {replicas: 0}", "minimum: got 0, want 1"),
    ("engine: {env: {A: true}}", "got boolean, want string"),
    ("engine: {env: {B: 7}}", "got number, want string"),
    ("engine: {extraArgs: [--port, 8000]}", "got number, want string"),
    ("engine: {extraArgs: --port}", "want array"),
    ("image: {tag: latest}", "'not' failed"),
    ("valkey: {image: {tag: latest}}", "'not' failed"),
    ("image: {repository: 'warmlane:0.1.0'}", "does not match pattern"),
    ("image: {digest: abc}", "does not match pattern"),
    ("engine: {type: sglang}", "value must be one of"),
    ("engine: {modelLoadSeconds: 0}", "minimum: got 0, want 1"),
    ("engine: {drainSeconds: 1.5}", "want integer"),
    ("engine: {port: 80000}", "maximum: got 80,000, want 65,535"),
    ("engine: {runner: {dtype: fp8}}", "value must be one of"),
    ("engine: {runner: {hostBytes: much}}", "does not match pattern"),
    ("discovery: {type: consul}", "value must be one of"),
    ("config: {routing: {share: 200}}", "maximum: got 200, want 100"),
    ("config: {pools: []}\nworkers: []", "minItems"),
    ("workers: [{model: smollm2}]", "missing property 'name'"),
    ("workers: [{name: Runner, model: smollm2}]", "does not match pattern"),
    ("secrets: {salt: {value: short}}", "minLength"),
    ("secrets: {valkeyPassword: {value: 'a@b'}}", "does not match pattern"),
    ("warmup: {schedule: daily}", "does not match pattern"),
    ("metrics: {serviceMonitor: {interval: 15}}", "got number, want string"),
    ("httpRoute: {paths: [v1]}", "does not match pattern"),
    ("extraObjects: [{data: {}}]", "missing properties 'apiVersion', 'kind'"),
    ("gateway: {preStopSeconds: 0}", "minimum: got 0, want 1"),
    ("commonLabels: {app.kubernetes.io/name: other}", "'not' failed"),
    ("engine: {podLabels: {helm.sh/chart: other}}", "'not' failed"),
    ("gateway: {podLabels: {team: 'a b'}}", "does not match pattern"),
    ("gateway: null", "missing property 'gateway'"),
    ("engine: {kvEvents: null}", "missing property 'kvEvents'"),
    ("gateway: {replicas: null}", "missing property 'replicas'"),
    ("config: null", "missing property 'config'"),
    # Values that are possible each, but not together.
    (
        "gateway: {env: {KEY: a}}\nsecrets: {env: {KEY: {value: b}}}",
        "a variable stands twice in secrets.env, gateway.env and gateway.extraEnv: KEY, KEY",
    ),
    ("workers: []", "there are no workers: expected worker sets of this chart"),
    ("gateway: {replicas: 2}", "up to 2 gateways with an index in memory"),
    (
        "gateway: {autoscaling: {hpa: {enabled: true, maxReplicas: 4}}}",
        "up to 4 gateways with an index in memory",
    ),
    (
        "valkey: {enabled: true}\ngateway: {autoscaling: {hpa: {enabled: true}, "
        "keda: {enabled: true}}}",
        "gateway.autoscaling: hpa and keda are both enabled",
    ),
    (
        "discovery: {type: dns}\nengine: {autoscaling: {hpa: {enabled: true}, "
        "keda: {enabled: true}}}",
        "workers[0] (runner).autoscaling: hpa and keda are both enabled",
    ),
    (
        "valkey: {enabled: true}\n"
        "gateway: {autoscaling: {keda: {enabled: true, minReplicas: 5, maxReplicas: 3}}}",
        "minReplicas 5 is above maxReplicas 3",
    ),
    (
        "valkey: {enabled: true}\ngateway: {resources: {requests: {cpu: null}}, "
        "autoscaling: {hpa: {enabled: true}}}",
        "expected gateway.resources.requests.cpu",
    ),
    (
        "engine: {autoscaling: {hpa: {enabled: true}}}",
        "autoscaling with discovery.type static: the gateway would not see new pods",
    ),
    (
        "discovery: {type: dns}\nengine: {autoscaling: {keda: {enabled: true}}}",
        "expected prometheusAddress",
    ),
    (
        "valkey: {enabled: true}\nsecrets: {redisUrl: {existingSecret: other}}",
        "valkey.enabled with another Redis",
    ),
    (
        "config: {index: {url: 'redis://a'}}\nsecrets: {redisUrl: {existingSecret: other}}",
        "secrets.redisUrl and config.index.url are both set",
    ),
    ("config: {index: {backend: redis}}", "config.index.backend is redis without a server"),
    (
        "config: {index: {backend: memory}}\nvalkey: {enabled: true}",
        "config.index.backend is memory, but",
    ),
    ("config: {server: {processes: 4}}", "config.server.processes 4 need a shared index"),
    ("config: {server: {host: 127.0.0.1}}", "cannot be reached from outside the pod"),
    ("config: {server: {admin_port: 8080}}", "port and admin_port are both 8080"),
    ("config: {server: {port: 0}}", "config.server.port is 0"),
    (
        "config: {tenants: [{name: acme, key_env: ACME}]}",
        "config.tenants (acme).key_env names the variable ACME, which no pod would have",
    ),
    (
        "config: {tenants: [{name: acme, keys_file: /var/run/warmlane/keys/acme}]}",
        "expected acme in secrets.keyFiles",
    ),
    (
        "config: {server: {access: {admin_token_env: TOKEN}}}",
        "config.server.access.admin_token_env names the variable TOKEN",
    ),
    ("secrets: {env: {ACME: {}}}", "secrets.env.ACME: expected existingSecret"),
    (
        "secrets: {adminToken: {existingSecret: a, value: b}}",
        "secrets.adminToken: existingSecret and value are both set",
    ),
    (
        "secrets: {tls: {existingSecret: a}}\nconfig: {server: {tls: {cert: /a, key: /b}}}",
        "secrets.tls and config.server.tls are both set",
    ),
    (
        "workers: [{name: a, model: smollm2}, {name: a, model: smollm2}]",
        "workers[1] (a): there is another set of this name",
    ),
    ("workers: [{name: admin, model: smollm2}]", "this name is the chart's own"),
    ("workers: [{name: a}]", "workers[0] (a): model is not set"),
    ("workers: [{name: a, model: org/model}]", "a runner downloads nothing but smollm2"),
    ("workers: [{name: a, model: /models/m}]", "modelVolume is empty"),
    (
        "workers: [{name: a, model: smollm2, runner: {device: cuda}}]",
        "runner.device cuda with gpu.count 0",
    ),
    ("workers: [{name: a, model: smollm2, gpu: {count: 1}}]", "would leave it idle"),
    (
        "workers: [{name: a, model: smollm2, gpu: {count: 1}, "
        "runner: {device: cuda, dtype: int8}}]",
        "runner.dtype int8 on cuda",
    ),
    (
        "workers: [{name: a, type: vllm, model: org/m, modelVolumeReadOnly: true}]",
        "modelVolumeReadOnly without a modelVolume",
    ),
    (
        "discovery: {type: dns}\nengine: {runner: {servePeers: true}}",
        "runner.servePeers with discovery.type dns",
    ),
    (
        "workers: [{name: a, type: vllm, model: org/m, runner: {threads: 2}}]",
        "runner has the bundled engine's options, and this is vllm",
    ),
    ("engine: {kvEvents: {port: 8000}}", "have to differ, got 8000, 8000, 5558"),
    ("warmup: {enabled: true}", "warmup.enabled without warmup.manifest"),
    ("warmup: {enabled: true, manifest: {model: m}}", "without secrets.adminToken"),
    ("httpRoute: {enabled: true}", "without httpRoute.parentRefs"),
]


@pytest.mark.parametrize(("values", "expected"), WRONG, ids=[values for values, _ in WRONG])
def test_values_that_cannot_work_are_refused_with_what_was_expected(
    values: str, expected: str
) -> None:
    with pytest.raises(helm.HelmError) as refused:
        render(yaml.safe_load(values))
    assert expected in str(refused.value)


@pytest.mark.parametrize("path", CI_VALUES, ids=lambda path: path.stem)
def test_lint_finds_no_fault(path: Any) -> None:
    assert lint(load_values(path)) == []


def test_there_are_values_files_for_twelve_ways_to_install() -> None:
    assert len(CI_VALUES) >= 12


def test_every_value_says_what_it_means() -> None:
    silent = [value.dotted for value in read_values(VALUES.read_text()) if not value.comment]
    assert silent == []


def test_schema_and_readme_are_what_the_values_say() -> None:
    hint = "run: python -m deploy.chart"
    assert SCHEMA.read_text("utf-8") == schema_text(), hint
    assert README.read_text("utf-8") == with_table(README.read_text("utf-8")), hint


def _objects(schema: Any, at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        if "properties" in schema and isinstance(schema["properties"], dict):
            yield at, schema
        for key, value in schema.items():
            yield from _objects(value, f"{at}/{key}")
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from _objects(value, f"{at}/{index}")


def test_every_section_of_the_schema_is_closed() -> None:
    schema = json.loads(SCHEMA.read_text())
    sections = dict(_objects(schema))
    open_ones = [at for at, one in sections.items() if one.get("additionalProperties") is not False]
    assert len(sections) > 60
    assert open_ones == []


def test_the_chart_takes_every_key_that_the_gateway_takes() -> None:
    ours = json.loads(SCHEMA.read_text())["$defs"]
    theirs = Settings.model_json_schema()["$defs"]
    for name, shape in theirs.items():
        assert set(ours[name]["properties"]) == set(shape["properties"]), name
    assert set(ours["Settings"]["properties"]) == set(Settings.model_fields)


def test_each_set_may_say_otherwise_than_engine_and_false_is_a_word() -> None:
    values: Values = {
        "engine": {"kvEvents": {"enabled": True}, "env": {"A": "1", "B": "1"}, "drainSeconds": 90},
        "workers": [
            {
                "name": "a",
                "model": "smollm2",
                "kvEvents": {"enabled": False},
                "pdb": {"enabled": False},
                "replicas": 2,
                "env": {"B": "2"},
                "drainSeconds": 7,
            }
        ],
    }
    objects = render(values)
    (workers,) = (one for one in objects if one["kind"] == "StatefulSet")
    (engine,) = workers["spec"]["template"]["spec"]["containers"]
    env = {item["name"]: item["value"] for item in engine["env"]}
    assert (env["A"], env["B"]) == ("1", "2")
    assert "--kv-events" not in engine["args"]
    assert engine["lifecycle"]["preStop"]["sleep"]["seconds"] == 7
    assert not [one for one in objects if one["kind"] == "PodDisruptionBudget"]


def test_values_of_a_parent_chart_pass() -> None:
    chart().validate_schema({"global": {"anything": [1]}})


def test_the_chart_names_its_version_and_the_project_s() -> None:
    metadata = chart().metadata
    pyproject = (CHART.parents[1] / "pyproject.toml").read_text()
    assert f'version = "{metadata["appVersion"]}"' in pyproject


def test_values_shown_on_the_charts_page_can_be_installed_as_they_stand() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", README.read_text("utf-8"), re.DOTALL)

    assert len(blocks) > 1
    for block in blocks:
        assert render(yaml.safe_load(block))
