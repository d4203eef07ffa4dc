"""The command line: exit codes, and where data and talk go."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gateway.__main__ import all_commands
from warmup.__main__ import app as warmup_app

CONFIG = 'pools: [{name: chat, models: [m], workers: [{id: w0, url: "http://h:1"}]}]\n'


def warmlane(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "warmlane", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def test_config_check_says_ok(config: Path) -> None:
    done = warmlane("config", "check", "--config", str(config))

    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_config_check_names_the_line_of_an_unknown_key(config: Path) -> None:
    config.write_text(CONFIG + "colour: blue\n")

    done = warmlane("config", "check", "--config", str(config))

    assert done.returncode == 1
    assert f"{config}:2: colour: unknown key 'colour'" in done.stderr


def test_config_check_speaks_json(config: Path) -> None:
    config.write_text(CONFIG + "colour: blue\n")

    done = warmlane("config", "check", "--config", str(config), "--json")

    answer = json.loads(done.stdout)
    assert (done.returncode, answer["ok"], len(answer["errors"])) == (1, False, 1)


def test_config_check_warns_of_a_file_that_a_start_here_would_miss(config: Path) -> None:
    config.write_text(CONFIG.replace("models: [m],", "models: [m], tokenizer: /no,"))

    done = warmlane("config", "check", "--config", str(config))

    assert (done.returncode, done.stdout) == (0, "ok\n")
    assert "warning: pools[chat].tokenizer: no file /no/tokenizer.json" in done.stderr


def test_config_show_names_the_source_of_each_value(config: Path) -> None:
    done = warmlane("config", "show", "--config", str(config))

    assert f'pools.0.name = "chat"  # {config}:1' in done.stdout.splitlines()
    assert "server.port = 8080  # default" in done.stdout.splitlines()


def test_config_schema_is_a_json_schema() -> None:
    done = warmlane("config", "schema")

    assert "pools" in json.loads(done.stdout)["properties"]


USAGE_ERRORS = {
    "no command": [],
    "unknown command": ["nope"],
    "unknown subcommand": ["config", "nope"],
    "a port that is no number": ["serve", "--port", "x"],
    "serve without workers": ["serve"],
    "serve with a file and workers": ["serve", "--config", "f", "--worker", "http://h:1"],
    "explain without a file": ["explain"],
    "drain without a worker": ["workers", "drain"],
    "replay without a trace": ["replay"],
    "a gateway without a scheme": ["workers", "list", "--gateway", "127.0.0.1:8080"],
    "a gateway's client URL": ["doctor", "--gateway", "http://127.0.0.1:8080/v1"],
    "a demo on any port": ["demo", "--port", "0"],
    "a port that is none": ["serve", "--worker", "http://h:1", "--model", "m", "--port", "70000"],
}


@pytest.mark.parametrize("args", USAGE_ERRORS.values(), ids=USAGE_ERRORS)
def test_a_usage_error_exits_with_2_and_prints_nothing_on_stdout(args: list[str]) -> None:
    done = warmlane(*args)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that can be given, with its words."""
    below = getattr(command, "commands", None)
    if below is None:
        yield name, command
    for word, found in (below or {}).items():
        yield from leaves(found, f"{name} {word}".strip())


# What runs until a signal writes nothing but its log.
WITHOUT_DATA = {"serve"}


def test_every_command_that_prints_data_speaks_json() -> None:
    apps = {"": all_commands(), "warmup": warmup_app}
    found = {
        words: {flag for param in command.params for flag in param.opts}
        for name, app in apps.items()
        for words, command in leaves(typer.main.get_command(app), name)
    }

    assert len(found) > 10
    assert {words for words, flags in found.items() if "--json" not in flags} == WITHOUT_DATA


IN_USE = [(key, processes, "in use") for key in ("port", "admin_port") for processes in (1, 2)]


@pytest.mark.parametrize(("key", "processes", "fault"), [*IN_USE, ("port", 1, "no such host")])
def test_an_address_that_cannot_be_listened_on_is_said_with_its_key(
    tmp_path: Path, key: str, processes: int, fault: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        host = "127.0.0.1" if fault == "in use" else "nowhere.invalid"
        server = {"host": host, "port": 0, key: number, "processes": processes}
        redis = {"backend": "redis", "url": "redis://127.0.0.1:1"}
        pool = {"name": "c", "models": ["m"], "workers": [{"id": "w", "url": "http://127.0.0.1:1"}]}
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"server": server, "index": redis, "pools": [pool]}))
        done = warmlane("serve", "--config", str(path))

    said = done.stderr.splitlines()[-1]
    assert f"server.{key}: cannot listen at {host}:{number}: " in said
    assert "Errno" not in said
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


def test_a_gateway_that_is_away_is_said_in_one_line() -> None:
    done = warmlane("workers", "list", "--gateway", "http://127.0.0.1:1")

    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "no answer from the gateway" in done.stderr


HEAVY = {"numpy", "httpx", "aiohttp", "gateway.settings", "gateway.replay", "prefix_index"}


@pytest.mark.parametrize("command", ["doctor", "workers"])
def test_commands_that_ask_a_gateway_import_nothing_heavy_before_they_run(command: str) -> None:
    code = (
        f"import sys, gateway.__main__ as m; m.main([{command!r}, '--help']); "
        f"print(*({HEAVY!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "\n")


def test_replay_is_a_command_like_the_others() -> None:
    done = warmlane("replay", "--help")

    assert done.returncode == 0
    assert "--policy" in done.stdout
    assert "replay" in warmlane("--help").stdout


def test_explain_refuses_a_file_that_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "body.json"
    path.write_text("{")

    done = warmlane("explain", str(path))

    assert done.returncode == 1
    assert "expected a JSON request body" in done.stderr


@pytest.mark.parametrize("missing", ["numpy", "torch"])
def test_without_its_extra_the_runner_says_what_to_install(missing: str, tmp_path: Path) -> None:
    # A module of that name that cannot be found, as in an installation without the extra.
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError(name={missing!r})\n")
    done = subprocess.run(
        [sys.executable, "-m", "warmlane", "runner", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("pip install '.[runner]'")
