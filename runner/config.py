"""Settings of one runner process: flags over environment over defaults.

Importing this is cheap on purpose: ``--help`` and usage errors must not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from runner.tiers.options import TierOptions
from runner.tiers.peer import peer_url
from runner.tiers.resp import parse_url

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# `WARMLANE_` with `__` for nesting, as everywhere in this project: WARMLANE_RUNNER__PORT=8101.
ENV_PREFIX = "WARMLANE_RUNNER__"

DEFAULT_MODEL = "smollm2"
DEFAULT_PORT = 8101

# vLLM's default; small enough that short chats hit, large enough that hashing costs nothing.
DEFAULT_BLOCK_SIZE = 16

# Several runners share a machine in the demo, so one takes at most this share of its memory.
POOL_MEMORY_RATIO = 0.25

# Past this a CPU cannot prefill what it could hold in any useful time.
MAX_DEFAULT_POOL_TOKENS = 65_536

DTYPES = ("float32", "bfloat16", "int8", "int4")
DEVICES = ("cpu", "cuda")
ATTENTIONS = ("triton", "flashinfer")
CUDA_DTYPES = ("float32", "bfloat16")
_SWITCH = {"true": True, "1": True, "false": False, "0": False}
LOG_LEVELS = ("debug", "info", "warning", "error")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?)?(B?)")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


class ConfigError(ValueError):
    """A setting that does not fit the model or another setting."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Capacity of the KV pool, in tokens or in bytes; the other one is 0."""

    tokens: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """What one runner serves and how.

    Attributes:
        model: ``smollm2``, a folder, or a .gguf file.
        port: 0 takes any free one.
        device: ``cuda`` is torch's current NVIDIA GPU.
        attention: What computes attention on a GPU.
        pool: None takes a share of the machine's memory.
        max_model_len: None takes what model and pool allow.
        kv_events: ZMQ endpoint to publish KV events on; None publishes none.
        kv_replay: ZMQ endpoint to answer replays on.
        served_model_name: None takes the model's own name.
        lora: Folders of LoRA adapters by the names clients ask for.
        host_bytes: Memory for KV that the pool has given up; 0 for none.
        ssd_dir: Folder for KV on disk; None for none.
        ssd_bytes: Most it may take there.
        remote: Redis that several runners keep KV in; None for none.
        peers: Runners that a request may name as the source of its prefix.
        serve_peers: Hand out KV to other runners.
    """

    model: str = DEFAULT_MODEL
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    dtype: str = "float32"
    device: str = "cpu"
    attention: str = "triton"
    threads: int = 1
    pool: PoolSize | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    max_model_len: int | None = None
    kv_events: str | None = None
    kv_replay: str | None = None
    served_model_name: str | None = None
    lora: Mapping[str, Path] = field(default_factory=dict)
    host_bytes: int = 0
    ssd_dir: Path | None = None
    ssd_bytes: int = 0
    remote: str | None = None
    peers: tuple[str, ...] = ()
    serve_peers: bool = False
    log_level: str = "info"

    @property
    def tiers(self) -> TierOptions:
        """What is beneath the KV pool."""
        return TierOptions(
            host_bytes=self.host_bytes,
            disk_dir=self.ssd_dir,
            disk_bytes=self.ssd_bytes,
            remote_url=self.remote,
            peers=self.peers,
        )

    @property
    def name(self) -> str:
        """The model name clients ask for."""
        return self.served_model_name or Path(self.model).name.removesuffix(".gguf")


def parse_args(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> RunnerConfig:
    """Read the command line and the environment.

    Raises:
        SystemExit: 0 after ``--help``, 2 on a usage error, as argparse does.
    """
    parser = make_parser()
    environ = os.environ if environ is None else environ
    # A later flag wins over an earlier one, so the environment comes first.
    flags = _flags_of(parser, environ) + list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(flags)
    if options.device == "cuda" and options.dtype not in CUDA_DTYPES:
        parser.error(f"--device cuda computes in {' or '.join(CUDA_DTYPES)}, not {options.dtype}")
    if options.device != "cuda" and options.attention != ATTENTIONS[0]:
        parser.error(f"--attention {options.attention} needs --device cuda")
    if options.kv_replay and not options.kv_events:
        parser.error("--kv-replay needs --kv-events")
    if options.ssd_bytes and options.ssd_dir is None:
        parser.error("--ssd-bytes needs --ssd-dir")
    if options.ssd_dir is not None and not options.ssd_bytes:
        parser.error("--ssd-dir needs --ssd-bytes, the most it may take there")
    adapters = options.lora or []
    peers = tuple(dict.fromkeys(url for urls in options.peers or () for url in urls))
    config = RunnerConfig(**vars(options) | {"lora": dict(adapters), "peers": peers})
    names = [config.name, *(name for name, _ in adapters)]
    if repeated := {name for name in names if names.count(name) > 1}:
        parser.error(f"--lora: more than one model or adapter is called {min(repeated)}")
    return config


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the runner's flags."""
    parser = argparse.ArgumentParser(
        prog="warmlane runner",
        description="Serve a model over the OpenAI API with a paged KV cache and prefix reuse.",
        epilog=f"Each flag can be set as {ENV_PREFIX}NAME too, e.g. {ENV_PREFIX}POOL_TOKENS=32Ki.",
        allow_abbrev=False,
    )
    defaults = RunnerConfig()
    add = parser.add_argument
    add("--model", default=defaults.model, help="smollm2, a model folder, or a .gguf file")
    add("--served-model-name", metavar="NAME", help="name clients ask for (default: the model's)")
    add(
        "--lora",
        type=_adapter,
        action="append",
        metavar="NAME=DIR",
        help="serve a LoRA adapter, a PEFT folder, as model NAME too; repeatable",
    )
    add("--host", default=defaults.host, help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=defaults.port, help="0 for any free (default: %(default)s)")
    add(
        "--dtype",
        choices=DTYPES,
        default=defaults.dtype,
        help="weights; KV and activations are bfloat16 unless this is float32 (%(default)s)",
    )
    add(
        "--device",
        choices=DEVICES,
        default=defaults.device,
        help="where to compute; cuda takes float32 or bfloat16 (%(default)s)",
    )
    add(
        "--attention",
        choices=ATTENTIONS,
        default=defaults.attention,
        help="on a GPU; flashinfer must be installed (%(default)s)",
    )
    add("--threads", type=_positive, default=defaults.threads, help="compute threads (%(default)s)")
    add(
        "--pool-tokens",
        dest="pool",
        type=parse_pool_size,
        metavar="N",
        help="KV pool capacity: tokens (32768, 32Ki) or memory (512MiB); default: a quarter of "
        f"the memory, at most {MAX_DEFAULT_POOL_TOKENS} tokens; on a GPU most of what is free",
    )
    add("--block-size", type=_positive, default=defaults.block_size, help="tokens (%(default)s)")
    add("--max-model-len", type=_positive, metavar="N", help="most tokens of prompt + completion")
    add("--kv-events", metavar="ADDR", help="publish KV events here, e.g. tcp://127.0.0.1:5557")
    add("--kv-replay", metavar="ADDR", help="answer replays of KV events here")
    _add_tiers(parser)
    add("--log-level", choices=LOG_LEVELS, default=defaults.log_level, help="(%(default)s)")
    return parser


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    tiers = parser.add_argument_group(
        "tiers", "Where KV goes that the pool has no room for. Sizes: 512MiB, 20GB, or bytes."
    )
    add = tiers.add_argument
    add("--host-bytes", type=parse_bytes, default=0, metavar="N", help="host memory to keep KV in")
    add("--ssd-dir", type=Path, metavar="DIR", help="folder to keep KV in; one runner per folder")
    add("--ssd-bytes", type=parse_bytes, default=0, metavar="N", help="most it takes in --ssd-dir")
    add("--remote", type=_remote, metavar="URL", help="Redis to share KV in (redis://HOST:PORT/0)")
    add(
        "--peer",
        dest="peers",
        type=_peers,
        action="append",
        metavar="URL",
        help="runner that requests may name as the source of their prefix; repeatable, or a,b",
    )
    add(
        "--serve-peers",
        type=_switch,
        nargs="?",
        const=True,
        default=False,
        metavar="true|false",
        help="hand out KV to other runners on this port, by block key",
    )


def _flags_of(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> list[str]:
    """Return the environment's settings as flags; a wrong one is a usage error naming it."""
    checker = argparse.ArgumentParser(parents=[parser], add_help=False, exit_on_error=False)
    flags = []
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or not value:
            continue
        flag = "--" + variable.removeprefix(ENV_PREFIX).lower().replace("_", "-")
        try:
            _, unknown = checker.parse_known_args([f"{flag}={value}"])
        except argparse.ArgumentError as error:
            parser.error(f"environment variable {variable}: {error.message}")
        if unknown:
            parser.error(f"environment variable {variable}: there is no flag {flag}")
        flags.append(f"{flag}={value}")
    return flags


def parse_bytes(text: str) -> int:
    """Read an amount of memory: ``512MiB``, ``1.5GB``, ``4Gi``, or a number of bytes.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    size = parse_pool_size(text)
    return size.num_bytes or size.tokens


def parse_pool_size(text: str) -> PoolSize:
    """Read a capacity: ``32768``, ``32Ki`` (tokens) or ``512MiB``, ``1.5GB`` (memory).

    Raises:
        argparse.ArgumentTypeError: If it is neither.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; expected a number (32768, 32Ki) or memory (512MiB)"
        )
    number, unit, is_bytes = match.groups()
    unit = unit or ""
    base = 1024 if unit.endswith("i") else 1000
    amount = int(float(number) * base ** _POWERS.get(unit[:1].lower(), 0))
    if amount < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return PoolSize(num_bytes=amount) if is_bytes else PoolSize(tokens=amount)


def pool_tokens(
    pool: PoolSize | None, token_bytes: int, block_size: int, device_bytes: int | None = None
) -> int:
    """Return the capacity of the KV pool in tokens, rounded down to whole blocks.

    Args:
        pool: As configured; None takes a share of the machine's memory.
        token_bytes: Bytes of one token's KV.
        block_size: Tokens per block.
        device_bytes: What it may take of a device with memory of its own.

    Raises:
        ConfigError: If not even one block fits.
    """
    if pool is None and device_bytes is not None:
        tokens = device_bytes // token_bytes
    elif pool is None:
        by_memory = int(memory_bytes() * POOL_MEMORY_RATIO) // token_bytes
        tokens = min(by_memory, MAX_DEFAULT_POOL_TOKENS)
    else:
        tokens = pool.tokens or pool.num_bytes // token_bytes
    tokens -= tokens % block_size
    if tokens < block_size:
        raise ConfigError(
            f"the KV pool is smaller than one block: {block_size} tokens of {token_bytes} bytes"
        )
    return tokens


def memory_bytes(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Return the memory this process may use: the machine's, or its control group's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = cgroup.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _adapter(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not name or not equals or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is no adapter; expected NAME=DIR")
    return name, Path(folder)


def _remote(text: str) -> str:
    try:
        parse_url(text)
    except ValueError as error:
        # The address may hold a password: it is not repeated.
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _peers(text: str) -> list[str]:
    try:
        return [peer_url(url) for url in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return _SWITCH[text.lower()]


def _port(text: str) -> int:
    return _integer(text, 0, 65_535)


def _positive(text: str) -> int:
    # The upper bound only keeps absurd values from overflowing later on.
    return _integer(text, 1, 2**40)


def _integer(text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer between {low} and {high}")
    return int(text)
