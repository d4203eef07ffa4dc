"""docker-compose.yml is valid, tight, and names only things that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.compose_parts import ADMIN_TOKEN, compose, composed
from tests.deploy.images import PROJECT, REPOSITORY
from tests.tools import tool

COMPOSE: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
DEPLOY = REPOSITORY / "deploy"
TOKEN = {"WARMLANE_ADMIN_TOKEN": ADMIN_TOKEN}


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = composed()["services"]
    return found


def test_without_an_admin_token_it_says_what_to_do() -> None:
    refused = compose("config", "--quiet")

    assert refused.returncode != 0
    assert "openssl rand" in refused.stderr


def test_a_misspelt_key_is_refused(tmp_path: Path) -> None:
    """Compose itself checks, so that a green check means something."""
    wrong = tmp_path / "wrong.yml"
    wrong.write_text("services: {a: {image: a, healthchek: {}}}")
    done = compose("--file", str(wrong), "config", "--quiet", **TOKEN)

    assert done.returncode != 0
    assert "healthchek" in done.stderr


def test_images_are_pinned_and_ours_are_this_release(services: dict[str, Any]) -> None:
    for name, service in services.items():
        repository, _, tag = service["image"].partition(":")
        assert re.fullmatch(r"v?\d+\.\d+\.\d+[\w.-]*", tag), name
        if "build" in service:
            assert tag == PROJECT["version"], name
            assert (
                repository
                == {
                    "deploy/gateway.Dockerfile": "warmlane",
                    "deploy/runner.Dockerfile": "warmlane-runner",
                }[service["build"]["dockerfile"]]
            )


def test_chart_and_compose_have_the_same_valkey(services: dict[str, Any]) -> None:
    image = read_yaml(REPOSITORY / "helm/warmlane/values.yaml")["valkey"]["image"]

    assert services["valkey"]["image"] == f"{image['repository']}:{image['tag']}"


def test_every_container_is_read_only_and_without_privileges(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("privileged", False) is False
        assert all(
            mount.get("read_only") for mount in service.get("volumes", ()) if is_file(mount)
        ), name


def test_only_the_client_port_leaves_this_machine(services: dict[str, Any]) -> None:
    published = {
        (name, port["target"]): port.get("host_ip")
        for name, service in services.items()
        for port in service.get("ports", ())
    }

    assert published == {
        ("gateway", 8080): None,
        ("gateway", 9090): "127.0.0.1",
        ("prometheus", 9090): "127.0.0.1",
        ("grafana", 3000): "127.0.0.1",
    }
    host_ports = [port["published"] for one in services.values() for port in one.get("ports", ())]
    assert len(set(host_ports)) == len(host_ports)


def test_the_index_and_the_engines_are_on_networks_of_their_own(services: dict[str, Any]) -> None:
    def members(network: str) -> set[str]:
        return {name for name, one in services.items() if network in one["networks"]}

    assert members("index") == {"gateway", "valkey"}
    assert members("engines") == {"gateway", "runner-0", "runner-1", "prometheus"}
    assert all(COMPOSE["networks"][name]["internal"] for name in ("index", "engines", "watched"))


def test_whatever_serves_has_a_health_check(services: dict[str, Any]) -> None:
    # One ends by itself, the other's image has no program to ask with.
    without = {name for name, one in services.items() if "test" not in one.get("healthcheck", {})}

    assert without == {"weights", "otel"}


def test_mounted_files_exist_and_named_volumes_are_used(services: dict[str, Any]) -> None:
    mounts = [mount for one in services.values() for mount in one.get("volumes", ())]

    assert [m["source"] for m in mounts if is_file(m) and not Path(m["source"]).exists()] == []
    assert {m["source"] for m in mounts if not is_file(m)} == set(COMPOSE["volumes"])


def test_the_gateway_of_compose_knows_the_services(services: dict[str, Any]) -> None:
    config = read_yaml(DEPLOY / "compose.yaml")
    check = [sys.executable, "-m", "warmlane", "config", "check", "--config"]
    done = subprocess.run(
        [*check, str(DEPLOY / "compose.yaml")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert config["server"]["access"]["admin_token_env"] in services["gateway"]["environment"]
    assert config["index"]["url"] == "redis://valkey:6379/0"
    command = services["runner-0"]["command"]
    ports = {
        "http": command[command.index("--port") + 1],
        "events": command[command.index("--kv-events") + 1].rpartition(":")[2],
        "replay": command[command.index("--kv-replay") + 1].rpartition(":")[2],
    }
    runners = [name for name in services if name.startswith("runner-")]
    workers = config["pools"][0]["workers"]
    assert [(worker["url"], worker["kv_events"], worker["kv_replay"]) for worker in workers] == [
        (
            f"http://{name}:{ports['http']}",
            f"tcp://{name}:{ports['events']}",
            f"tcp://{name}:{ports['replay']}",
        )
        for name in runners
    ]


def test_prometheus_accepts_its_configuration_with_the_rules_beside_it(
    services: dict[str, Any], tmp_path: Path
) -> None:
    for mount in services["prometheus"]["volumes"]:
        if is_file(mount):
            place = tmp_path / mount["target"].removeprefix("/etc/prometheus/")
            place.symlink_to(mount["source"])
    command = [str(tool("promtool")), "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert re.search(r"SUCCESS: \d+ rules found", done.stdout), done.stdout


def test_grafana_finds_its_data_source_and_the_dashboards(services: dict[str, Any]) -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = read_yaml(provisioning / "datasources" / "prometheus.yaml")["datasources"]
    (provider,) = read_yaml(provisioning / "dashboards" / "warmlane.yaml")["providers"]
    mounted = {m["target"]: m["source"] for m in services["grafana"]["volumes"]}

    assert source["url"] == "http://prometheus:9090"
    interval = read_yaml(DEPLOY / "prometheus" / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    folder = Path(mounted[provider["options"]["path"]])
    assert folder == REPOSITORY / "helm" / "warmlane" / "dashboards"
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert json.loads((folder / home.name).read_text())["panels"]


def test_the_collector_uses_only_what_it_defines() -> None:
    config = read_yaml(DEPLOY / "otel" / "collector.yaml")

    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(config[kind])
    # The gateway exports over http, to the port that docker-compose.yml names.
    endpoint = config["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert (
        f"OTLP_ENDPOINT=http://otel:{endpoint.rpartition(':')[2]}"
        in (REPOSITORY / "docker-compose.yml").read_text()
    )


def is_file(mount: dict[str, Any]) -> bool:
    return bool(mount["type"] == "bind")


def read_yaml(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found
