"""The command ``warmlane runner`` as a process: start, drain, exit codes, settings."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from runner.config import (
    ConfigError,
    PoolSize,
    RunnerConfig,
    memory_bytes,
    parse_args,
    parse_pool_size,
    pool_tokens,
)
from runner.serve import StartError, load
from runner.tiers.options import TierOptions
from tests.live_runner import LiveRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "runner"]

# Importing torch and loading the weights on a machine with much else to do.
START_TIMEOUT_S = 240.0
pytestmark = pytest.mark.timeout(600)


def run(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *flags],
        cwd=REPOSITORY,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )


@pytest.fixture
def process(smollm2_dir: Path) -> Iterator[subprocess.Popen[str]]:
    flags = ["--port", "0", "--pool-tokens", "512", "--model", "smollm2"]
    flags += ["--kv-events", "tcp://127.0.0.1:0", "--kv-replay", "tcp://127.0.0.1:0"]
    with subprocess.Popen(
        [*COMMAND, *flags],
        cwd=REPOSITORY,
        env={**os.environ, "WARMLANE_MODELS_DIR": str(smollm2_dir.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def ready_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stderr is not None
    for line in process.stderr:
        entry: dict[str, Any] = json.loads(line)
        if entry["event"] == "ready":
            return entry
    raise AssertionError(f"ended with {process.wait()} before it was ready")


def test_it_names_its_port_serves_and_drains_on_sigterm(process: subprocess.Popen[str]) -> None:
    ready = ready_line(process)
    assert ready["port"] == int(ready["url"].rpartition(":")[2]) > 0
    assert httpx.get(f"{ready['url']}/health").status_code == 200
    body = {"prompt": "Count: 1, 2,", "max_tokens": 24, "ignore_eos": True, "stream": True}

    with httpx.stream(
        "POST", f"{ready['url']}/v1/completions", json=body, timeout=START_TIMEOUT_S
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]

    assert last == "data: [DONE]"
    out, err = process.communicate(timeout=START_TIMEOUT_S)
    assert (process.returncode, out) == (0, "")
    assert [json.loads(line)["event"] for line in err.splitlines()] == [
        "draining",
        "request_finished",
    ]


def read_while_interrupting_twice(process: subprocess.Popen[str], url: str) -> None:
    body = {"prompt": "Go", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, timeout=START_TIMEOUT_S
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        while httpx.get(f"{url}/health").status_code != 503:
            pass
        process.send_signal(signal.SIGINT)
        for _ in lines:
            pass


def test_ctrl_c_drains_and_a_second_one_does_not_wait(process: subprocess.Popen[str]) -> None:
    url = ready_line(process)["url"]

    with pytest.raises(httpx.TransportError):
        read_while_interrupting_twice(process, url)

    assert process.wait(START_TIMEOUT_S) == 130


def test_help_is_quick_and_needs_no_torch() -> None:
    begun_s = time.monotonic()

    done = run("--help", PYTHONPROFILEIMPORTTIME="1")

    assert done.returncode == 0
    assert "--pool-tokens" in done.stdout
    assert "argparse" in done.stderr
    assert "torch" not in done.stderr
    assert "numpy" not in done.stderr
    assert time.monotonic() - begun_s < 5


def test_missing_weights_are_exit_1_with_both_remedies(tmp_path: Path) -> None:
    done = run("--port", "0", WARMLANE_MODELS_DIR=str(tmp_path))

    assert (done.returncode, done.stdout) == (1, "")
    assert "make weights" in done.stderr
    assert "python -m runner.fetch" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "code", "complaint"),
    [
        (["--model", "/nowhere"], 1, "no model at /nowhere"),
        (["--model", "tests"], 1, "no tokenizer"),
        (["--max-model-len", "100000"], 2, "--max-model-len 100000"),
        (["--kv-events", "tcp://nonsense"], 1, "cannot bind tcp://nonsense"),
    ],
)
def test_what_cannot_start_is_said_in_one_line(
    smollm2_dir: Path, flags: list[str], code: int, complaint: str
) -> None:
    done = run("--port", "0", *flags, WARMLANE_MODELS_DIR=str(smollm2_dir.parent))

    assert done.returncode == code
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"max_model_len": 100_000}, "--max-model-len 100000"),
        ({"block_size": 4096, "pool": PoolSize(tokens=8192)}, "block size"),
        ({"pool": PoolSize(num_bytes=1024)}, "smaller than one block"),
    ],
)
@pytest.mark.usefixtures("shared_weights")
def test_a_size_that_does_not_fit_the_model_is_refused(
    smollm2_dir: Path, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(RunnerConfig(model=str(smollm2_dir), port=0, **settings))


def test_a_taken_port_is_exit_1(smollm2_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])

        done = run("--port", port, WARMLANE_MODELS_DIR=str(smollm2_dir.parent))

    assert done.returncode == 1
    assert port in done.stderr


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"host_bytes": 2**50}, "--host-bytes"),
        ({"host_bytes": 1000}, "--host-bytes"),
        ({"ssd_bytes": 1000}, "no block"),
    ],
    ids=["more than there is", "less than a block", "less than a segment"],
)
@pytest.mark.usefixtures("shared_weights")
def test_a_tier_that_cannot_be_had_is_said_in_one_line_and_leaves_nothing_open(
    smollm2_dir: Path, tmp_path: Path, settings: dict[str, Any], complaint: str
) -> None:
    folder = {"ssd_dir": tmp_path / "kv"} if "ssd_bytes" in settings else {}
    sizes = {"model": str(smollm2_dir), "port": 0, "pool": PoolSize(tokens=512)}
    threads = threading.active_count()
    with pytest.raises((StartError, ConfigError), match=complaint) as caught:
        load(RunnerConfig(**sizes, **folder, **settings))

    assert "\n" not in str(caught.value)
    assert threading.active_count() == threads


@pytest.mark.usefixtures("shared_weights")
def test_a_second_runner_on_one_folder_is_refused_until_the_first_has_ended(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    config = RunnerConfig(
        model=str(smollm2_dir),
        port=0,
        pool=PoolSize(tokens=512),
        ssd_dir=tmp_path / "kv",
        ssd_bytes=256 * 2**20,
    )
    with LiveRunner.start(config), pytest.raises(StartError, match=str(config.ssd_dir)):
        load(config)

    with LiveRunner.start(config) as second:
        assert httpx.get(f"{second.url}/health").status_code == 200


def test_an_unknown_host_is_exit_1(smollm2_dir: Path) -> None:
    done = run("--host", "host.invalid", WARMLANE_MODELS_DIR=str(smollm2_dir.parent))

    assert done.returncode == 1
    assert "cannot listen on host.invalid" in done.stderr


def test_flags_win_over_the_environment_and_that_over_defaults() -> None:
    environ = {"WARMLANE_RUNNER__PORT": "1", "WARMLANE_RUNNER__POOL_TOKENS": "2Ki", "OTHER": "x"}

    config = parse_args(["--port", "2"], environ)

    assert (config.port, config.pool, config.block_size) == (2, PoolSize(tokens=2048), 16)


def test_adapters_come_from_flags_and_the_environment() -> None:
    config = parse_args(["--lora", "a=x/y", "--lora", "b=z=1"], {"WARMLANE_RUNNER__LORA": "c=w"})

    assert config.lora == {"c": Path("w"), "a": Path("x/y"), "b": Path("z=1")}
    assert parse_args([], {}).lora == {}


def test_tiers_come_from_flags_and_the_environment() -> None:
    flags = ["--host-bytes", "512MiB", "--ssd-dir", "kv", "--ssd-bytes", "20GB", "--serve-peers"]
    flags += ["--peer", "http://B:8101/", "--peer", "http://c", "--peer", "http://b:8101"]
    environ = {"WARMLANE_RUNNER__REMOTE": "redis://h:1/2", "WARMLANE_RUNNER__PEER": "http://d:1"}

    config = parse_args(flags, environ)

    assert config.tiers == TierOptions(
        host_bytes=512 * 2**20,
        disk_dir=Path("kv"),
        disk_bytes=20 * 10**9,
        remote_url="redis://h:1/2",
        peers=("http://d:1", "http://b:8101", "http://c:80"),
    )
    assert config.serve_peers
    assert parse_args([], {"WARMLANE_RUNNER__SERVE_PEERS": "1"}).serve_peers
    assert not parse_args([], {}).tiers.has_any


@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        (["--port", "70000"], {}, "--port"),
        (["--threads", "0"], {}, "--threads"),
        (["--dtype", "int3"], {}, "--dtype"),
        (["--pool-tokens", "lots"], {}, "--pool-tokens"),
        (["--nonsense"], {}, "--nonsense"),
        (["--kv-replay", "tcp://127.0.0.1:1"], {}, "--kv-events"),
        (["--host-bytes", "much"], {}, "--host-bytes"),
        (["--ssd-bytes", "1GiB"], {}, "--ssd-bytes needs --ssd-dir"),
        (["--ssd-dir", "d"], {}, "--ssd-dir needs --ssd-bytes"),
        (["--remote", "http://127.0.0.1"], {}, "expected redis://HOST:PORT/DATABASE"),
        (["--remote", "redis://h:port"], {}, "the port must be a number"),
        (["--peer", "127.0.0.1:8101"], {}, "expected http://HOST:PORT"),
        (["--peer", "http://a:1,ftp://b"], {}, "expected http://HOST:PORT"),
        (["--serve-peers=maybe"], {}, "neither true nor false"),
        ([], {"WARMLANE_RUNNER__SSD_BYTES": "1"}, "--ssd-bytes needs --ssd-dir"),
        (["--lora", "tone"], {}, "expected NAME=DIR"),
        (["--lora", "=dir"], {}, "expected NAME=DIR"),
        (["--lora", "tone="], {}, "expected NAME=DIR"),
        (["--lora", "tone=a", "--lora", "tone=b"], {}, "adapter is called tone"),
        (["--lora", "smollm2=a"], {}, "adapter is called smollm2"),
        ([], {"WARMLANE_RUNNER__LORA": "tone"}, "WARMLANE_RUNNER__LORA"),
        ([], {"WARMLANE_RUNNER__PORT": "x"}, "WARMLANE_RUNNER__PORT"),
        ([], {"WARMLANE_RUNNER__NONSENSE": "x"}, "WARMLANE_RUNNER__NONSENSE"),
    ],
)
def test_a_wrong_setting_is_a_usage_error_that_names_it(
    flags: list[str], environ: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(flags, environ)

    assert caught.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("32768", PoolSize(tokens=32768)),
        ("32Ki", PoolSize(tokens=32768)),
        ("32k", PoolSize(tokens=32000)),
        ("512MiB", PoolSize(num_bytes=512 * 2**20)),
        ("1.5GB", PoolSize(num_bytes=1_500_000_000)),
    ],
)
def test_sizes_are_tokens_or_memory(text: str, size: PoolSize) -> None:
    assert parse_pool_size(text) == size


@pytest.mark.parametrize(
    ("pool", "tokens"),
    [
        (PoolSize(tokens=100), 96),
        (PoolSize(num_bytes=5_000), 48),
    ],
)
def test_the_pool_holds_whole_blocks(pool: PoolSize, tokens: int) -> None:
    assert pool_tokens(pool, token_bytes=100, block_size=16) == tokens


def test_the_default_pool_is_a_share_of_the_memory_and_bounded() -> None:
    small_token, large_token = 1, memory_bytes() // 100

    assert pool_tokens(None, small_token, 16) == 65_536
    assert pool_tokens(None, large_token, 1) == 25
    with pytest.raises(ConfigError):
        pool_tokens(None, large_token, 32)


def test_a_control_group_limit_counts_when_it_is_lower(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1000\n")
    assert memory_bytes(limit) == 1000

    limit.write_text("max\n")
    assert memory_bytes(limit) == memory_bytes(tmp_path / "absent") > 1000


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("models/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("/m/tiny.Q4_1.gguf", "tiny.Q4_1"),
    ],
)
def test_the_served_name_comes_from_the_model(model: str, name: str) -> None:
    assert RunnerConfig(model=model).name == name
    assert RunnerConfig(model=model, served_model_name="other").name == "other"
