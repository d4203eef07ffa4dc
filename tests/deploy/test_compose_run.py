"""The services of docker-compose.yml as it starts them, from the wheel, found by their names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.compose_parts import ADMIN_TOKEN, composed, foreign_image, spec_of
from tests.deploy.images import REPOSITORY, Image
from tests.deploy.site import Container, Site
from tests.e2e.fleet import chat, wait_for

# The first test waits for two engines to load, on whatever machine this is.
pytestmark = pytest.mark.timeout(400)

RUNNERS = ("runner-0", "runner-1")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("compose")) as site:
        yield site


@pytest.fixture(scope="module")
def services(
    site: Site, images: dict[str, Image], kernels: Path, smollm2_dir: Path, tmp_path_factory: Any
) -> dict[str, Container]:
    """Everything that can run here, ready by its own health check."""
    volumes = tmp_path_factory.mktemp("volumes")
    (volumes / "models").symlink_to(smollm2_dir.parent)
    (volumes / "kernels").symlink_to(kernels)
    described = composed()["services"]
    addresses = {name: site.name(name) for name in described}
    started = {}
    for name in ("valkey", *RUNNERS, "gateway", "prometheus"):
        service = described[name]
        repository = service["image"].partition(":")[0]
        image = images.get(repository) or foreign_image(name)
        spec = spec_of(name, service, image, volumes)
        started[name] = site.start(spec, addresses[name])
    for name in (*RUNNERS, "gateway"):
        kind, *probe = described[name]["healthcheck"]["test"]
        assert kind == "CMD"
        site.wait_until_healthy(started[name], probe)
    return started


def test_a_client_is_answered_and_the_second_time_from_cache(
    site: Site, services: dict[str, Container]
) -> None:
    base = f"http://{services['gateway'].address}:8080"
    text = "The clerk of the quay opens the gate at seven. " * 20
    first, second = (site.run(chat, base, text, "When does it open?") for _ in range(2))

    assert (first.status_code, second.status_code) == (200, 200)
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first.headers["x-warmlane-worker"] == second.headers["x-warmlane-worker"]


def test_operators_are_answered_on_their_own_port_and_with_the_token_only(
    site: Site, services: dict[str, Container]
) -> None:
    address = services["gateway"].address
    clients, operators = f"http://{address}:8080", f"http://{address}:9090"
    bearer = {"authorization": f"Bearer {ADMIN_TOKEN}"}

    assert site.get(f"{clients}/metrics").status_code == 404
    assert site.get(f"{clients}/admin/v1/workers", headers=bearer).status_code == 404
    assert site.get(f"{operators}/admin/v1/workers").status_code == 401
    answer = site.get(f"{operators}/admin/v1/workers", headers=bearer).json()
    assert {worker["id"] for worker in answer["workers"]} == {"w0", "w1"}


def test_the_index_is_shared_over_valkey(site: Site, services: dict[str, Container]) -> None:
    def connected() -> bool:
        text = site.get(f"http://{services['gateway'].address}:9090/metrics").text
        return bool(re.search(r"^warmlane_redis_up 1(\.0)?$", text, re.MULTILINE))

    wait_for(connected, "the gateway has its Redis")


def test_prometheus_scrapes_gateway_and_runners_and_has_the_rules(
    site: Site, services: dict[str, Container]
) -> None:
    base = f"http://{services['prometheus'].address}:9090/api/v1"

    def health() -> dict[str, str]:
        try:
            found = site.get(f"{base}/targets", params={"state": "active"}).json()
        except httpx.TransportError:
            return {}
        targets = found["data"]["activeTargets"]
        return {target["labels"]["instance"]: target["health"] for target in targets}

    up = dict.fromkeys(("gateway:9090", "runner-0:8000", "runner-1:8000"), "up")
    wait_for(lambda: health() == up, "all targets are up", deadline_s=40)
    loaded = site.get(f"{base}/rules").json()["data"]["groups"]
    written = [
        group["name"]
        for file in (REPOSITORY / "helm/warmlane/rules").glob("*.yaml")
        for group in yaml.safe_load(file.read_text())["groups"]
    ]
    assert sorted(group["name"] for group in loaded) == sorted(written)


def test_containers_are_held_as_tightly_as_compose_holds_them(
    site: Site, services: dict[str, Container]
) -> None:
    look = """
import json, os, pathlib
def writable(folder):
    try: pathlib.Path(folder, "probe").write_text(""); return True
    except OSError: return False
places = ["/", "/etc", "/opt/warmlane", "/models", "/var/cache/warmlane", "/tmp", "/usr/local/bin"]
status = pathlib.Path("/proc/self/status").read_text()
print(json.dumps({"uid": os.getuid(), "writable": [p for p in places if writable(p)],
                  "capabilities": int(status.split("CapEff:")[1].split()[0], 16)}))
"""
    seen = json.loads(site.execute(services["runner-0"], ["python", "-c", look]).stdout)

    written = ["/var/cache/warmlane", "/tmp"]  # noqa: S108  # inside the container
    assert seen == {"uid": 10001, "writable": written, "capabilities": 0}
