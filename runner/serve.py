"""One runner process put together: files, model, engine, event publisher, HTTP server."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog
from tokenizers import Tokenizer

from runner.config import ConfigError, RunnerConfig, memory_bytes, pool_tokens
from runner.detokenizer import TokenTexts
from runner.fetch import ModelMissingError, model_path
from runner.gguf import GgufError
from runner.metrics import RunnerMetrics, TransferMeter
from runner.peers import BlockServer
from runner.publisher import EventPublisher, PublisherError
from runner.server import AddressError, HttpServer, bind
from runner.service import ModelFacts, PromptPipeline, Service
from runner.tokenizer import TokenizerError, TokenizerFiles, read_tokenizer
from runner.types import EngineConfig

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from runner.engine import Engine
    from runner.model import Model

# Requests that outlive the drain have had their chance; the engine only finishes its step.
ENGINE_STOP_TIMEOUT_S = 5.0

# An 8B model prefills as many in about 20 ms of an H200 (by its arithmetic): long enough that
# launching costs nothing beside it, short enough for those who decode meanwhile.
CUDA_BATCHED_TOKENS = 2048

log = structlog.get_logger(__name__)


class StartError(RuntimeError):
    """This runner cannot start; the message tells an operator why and what to do."""


@dataclass(slots=True)
class Runner:
    """A loaded runner. ``start``, ``drain`` and ``stop`` belong to one event loop."""

    url: str
    port: int
    engine: Engine
    service: Service
    server: HttpServer
    publisher: EventPublisher | None

    async def start(self) -> None:
        """Begin to serve."""
        self.engine.start()
        if self.publisher is not None:
            self.publisher.start()
        await self.server.start()

    async def drain(self, timeout_s: float) -> None:
        """Finish what is in flight, refuse the rest."""
        await self.server.drain(timeout_s)

    async def stop(self) -> None:
        """Close everything; the runner cannot be started again."""
        await self.server.stop()
        self.engine.stop(ENGINE_STOP_TIMEOUT_S)
        if self.publisher is not None:
            self.publisher.close()


def load(config: RunnerConfig) -> Runner:
    """Take the ports and load the model; nothing is served yet.

    Raises:
        StartError: If the model is missing or unusable, or an address cannot be taken.
        ConfigError: If a size does not fit the model.
    """
    try:
        path = model_path(config.model)
        with ExitStack() as opened:
            bound = bind(config.host, config.port)
            opened.callback(bound.close)
            publisher = None
            if config.kv_events is not None:
                topic = f"kv@{config.name}"
                publisher = EventPublisher(config.kv_events, config.kv_replay, topic=topic)
                opened.callback(publisher.close)
            # Only now, since torch takes seconds to import and a taken port must not wait for it.
            files, model = _read_model(config, path)
            meter = TransferMeter(config.name)
            engine, facts = _make_engine(config, path, model, publisher, meter)
            opened.callback(engine.stop, ENGINE_STOP_TIMEOUT_S)
            address = _address(bound)
            service = _make_service(config, facts, files, engine, publisher, meter, address)
            opened.pop_all()
    except (ModelMissingError, AddressError, PublisherError) as error:
        raise StartError(str(error)) from error
    server = HttpServer(service, bound)
    port = bound.getsockname()[1]
    return Runner(f"http://{_address(bound)}", port, engine, service, server, publisher)


def _read_model(config: RunnerConfig, path: Path) -> tuple[TokenizerFiles, Model]:
    try:
        files = read_tokenizer(path)
    except (TokenizerError, GgufError, OSError) as error:
        raise StartError(str(error)) from error

    from runner.adapters import AdapterError
    from runner.facts import UnsupportedModelError
    from runner.ops.cuda.device import DeviceError
    from runner.sources import WeightsError
    from runner.weights import load_model

    try:
        model = load_model(
            path,
            config.dtype,
            config.threads,
            config.lora,
            device=config.device,
            attention=config.attention,
        )
    except (DeviceError, WeightsError, UnsupportedModelError, AdapterError, OSError) as error:
        raise StartError(str(error)) from error
    return files, model


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _make_service(
    config: RunnerConfig,
    facts: ModelFacts,
    files: TokenizerFiles,
    engine: Engine,
    publisher: EventPublisher | None,
    meter: TransferMeter,
    address: str,
) -> Service:
    try:
        detokenizer = Tokenizer.from_str(files.tokenizer_json)
    except Exception as error:  # the library has no narrower one
        raise StartError(f"{facts.root}: tokenizer.json cannot be read: {error}") from error
    puller = engine.puller
    peers = None
    if config.serve_peers:
        block_bytes = engine.stats().block_bytes
        peers = BlockServer(engine, namespace=engine.namespace, block_bytes=block_bytes)
    selftest = None
    if config.ssd_dir is not None:
        from runner.selftest import SelfTest

        selftest = SelfTest(
            config.ssd_dir,
            config.ssd_bytes,
            block_bytes=engine.stats().block_bytes,
            block_size=facts.block_size,
        )
    return Service(
        facts=facts,
        engine=engine,
        prompts=PromptPipeline(files, facts),
        detokenizer=detokenizer,
        texts=TokenTexts(detokenizer),
        files=files,
        metrics=RunnerMetrics(
            model=facts.name,
            worker=address,
            stats=engine.stats,
            transfers=meter,
            pulls=puller.figures if puller is not None else None,
            served=(lambda: peers) if peers is not None else None,
        ),
        publisher=publisher,
        peers=peers,
        puller=puller,
        selftest=selftest,
    )


def _make_engine(
    config: RunnerConfig,
    path: Path,
    model: Model,
    publisher: EventPublisher | None,
    meter: TransferMeter,
) -> tuple[Engine, ModelFacts]:
    from runner.engine import Engine
    from runner.tiers.assemble import TiersError, build_tiers

    tokens, max_model_len = _limits(config, model)
    if config.host_bytes > (available := memory_bytes()):
        # The system would promise it all the same, and kill this process when it is used.
        raise ConfigError(
            f"--host-bytes {config.host_bytes}: this machine has {available} bytes of memory"
        )
    is_cuda = config.device == "cuda"
    sizes = EngineConfig(
        block_size=config.block_size, pool_tokens=tokens, max_model_len=max_model_len
    )
    if is_cuda:
        sizes = replace(sizes, max_batched_tokens=CUDA_BATCHED_TOKENS)
    tiers = partial(build_tiers, config.tiers, observer=meter, is_cuda=is_cuda)
    on_events = publisher.publish if publisher is not None else None
    try:
        engine = Engine(model, sizes, on_events, tiers)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except TiersError as error:
        raise StartError(str(error)) from error
    facts = ModelFacts(
        name=config.name,
        root=str(path),
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        block_size=config.block_size,
        adapters={name: str(folder) for name, folder in config.lora.items()},
    )
    return engine, facts


def _limits(config: RunnerConfig, model: Model) -> tuple[int, int]:
    """Return the pool's capacity and the longest request, both in tokens."""
    from runner.ops.cuda.device import pool_memory_bytes

    sizes = model.config
    # Keys and values of every layer.
    token_bytes = 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * model.dtype.itemsize
    device_bytes = pool_memory_bytes() if config.device == "cuda" else None
    tokens = pool_tokens(config.pool, token_bytes, config.block_size, device_bytes)
    longest = min(sizes.context_tokens, tokens)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is above what the model "
            f"({sizes.context_tokens} tokens) and the KV pool ({tokens} tokens) allow"
        )
    return tokens, config.max_model_len or longest
