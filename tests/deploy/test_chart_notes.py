"""The notes after an install, followed to the letter against a gateway of that install."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.chart_parts import (
    CHART,
    CI_VALUES,
    containers,
    gateway_config,
    gateway_of,
    load_values,
    render,
    rendered_files,
)
from tests.e2e.fleet import Process
from tests.live_runner import LiveRunner
from tests.support import free_port
from tests.tools import tool


def notes(path: Path) -> str:
    return rendered_files(load_values(path))["templates/NOTES.txt"]


def curl_of(text: str) -> list[str]:
    """The curl command of the notes, as a shell would split it."""
    _, _, rest = text.replace("\\\n", "").partition("   curl ")
    return ["curl", *shlex.split(rest.partition("\n")[0])]


@pytest.fixture(scope="module")
def gateway(live_runner: LiveRunner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """The gateway of a default install: one of its two engines is there, the other is not."""
    folder = tmp_path_factory.mktemp("notes")
    config = gateway_config(render())
    first, second = config["pools"][0]["workers"]
    config["pools"][0]["workers"] = [
        {"id": first["id"], "url": live_runner.url},
        {**second, "url": f"http://127.0.0.1:{free_port()}", "kv_events": []} | {"kv_replay": None},
    ]
    config["server"]["admin_port"] = free_port()
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    port = free_port()
    args = ["gateway", "serve", "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
    probe = containers(gateway_of(render()))[0]["readinessProbe"]["httpGet"]["path"]
    process = Process(args, port, folder / "log", probe)
    process.start()
    process.wait_ready()
    yield process
    assert process.stop() == 0


def test_the_curl_of_the_notes_works(gateway: Process) -> None:
    command = curl_of(notes(CHART / "ci" / "defaults.yaml"))
    here = [word.replace("127.0.0.1:8080", f"127.0.0.1:{gateway.port}") for word in command]
    answer = subprocess.run(
        [str(tool("curl")), *here[1:], "--silent", "--show-error", "--max-time", "60"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    head, _, body = answer.partition("\n\n")
    assert head.startswith("HTTP/1.1 200"), answer
    # -i and the explain header show where it went.
    assert "x-warmlane-worker: warmlane-runner-0" in head.lower()
    assert json.loads(body)["choices"][0]["message"]["content"]


def test_d05_readiness_does_not_wait_for_an_engine_that_is_away(gateway: Process) -> None:
    assert httpx.get(gateway.url + "/health/ready").status_code == 200


def test_the_test_of_the_chart_passes_and_says_when_it_cannot(gateway: Process) -> None:
    (pod,) = (one for one in render() if one["kind"] == "Pod")
    (container,) = containers(pod)
    env = {item["name"]: item["value"] for item in container["env"]}
    assert env["GATEWAY"] == "http://warmlane:8080"

    def run(**changed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *container["command"][1:]],
            env=env | {"GATEWAY": gateway.url} | changed,
            capture_output=True,
            text=True,
            check=False,
        )

    served = run()
    assert served.returncode == 0, served.stderr
    assert "served by warmlane-runner-0" in served.stdout
    unknown = run(MODEL="nobody-has-this")
    assert unknown.returncode == 1
    assert "status 404" in unknown.stderr
    away = run(GATEWAY=f"http://127.0.0.1:{free_port()}", TIMEOUT_S="0")
    assert away.returncode == 1
    assert "not served" in away.stderr


@pytest.mark.parametrize("path", CI_VALUES, ids=lambda path: path.stem)
def test_every_install_has_a_curl_that_a_shell_understands(path: Path) -> None:
    command = curl_of(notes(path))
    url, body = next(w for w in command if "://" in w), command[command.index("-d") + 1]
    config = gateway_config(render(load_values(path)))
    assert url.endswith("127.0.0.1:8080/v1/chat/completions")
    assert url.startswith("https") is ("tls" in config["server"])
    assert json.loads(body)["model"] in config["pools"][0]["models"]
    assert ("authorization: Bearer $API_KEY" in command) is bool(config.get("tenants"))
