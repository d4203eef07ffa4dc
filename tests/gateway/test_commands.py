"""The command line: exit codes, and where data and talk go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
}


@pytest.mark.parametrize("args", USAGE_ERRORS.values(), ids=USAGE_ERRORS)
def test_a_usage_error_exits_with_2_and_prints_nothing_on_stdout(args: list[str]) -> None:
    done = warmlane(*args)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


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
