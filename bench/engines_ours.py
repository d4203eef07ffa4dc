"""The bundled runner's engine, driven by bench/engines.py: argv is model folder and dtype."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from engines_protocol import serve

from runner.engine import Engine
from runner.types import EngineConfig, EngineRequest, SamplingParams, TokenOutput
from runner.weights import load_model


class Driver:
    """Submits prompts and waits for all of their tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open = 0
        self._done = threading.Event()
        self._count = 0

    def generate(self, batch: list[list[int]], tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._open = len(batch)
        self._done.clear()
        for prompt in batch:
            self._count += 1
            request = EngineRequest(str(self._count), prompt, params, self._take)
            self._engine.submit(request)
        self._done.wait()

    def _take(self, output: TokenOutput) -> None:
        if output.error:
            raise RuntimeError(output.error)
        self._open -= output.finish_reason is not None
        if not self._open:
            self._done.set()


def main() -> None:
    folder, dtype = sys.argv[1:]
    engine = Engine(load_model(Path(folder), dtype, 1), EngineConfig(pool_tokens=32_768))
    engine.start()
    serve(Driver(engine).generate)
    engine.stop(10)


if __name__ == "__main__":
    main()
