"""llama.cpp through llama-cpp-python, driven by bench/engines.py: argv is a GGUF file.

One sequence only: the binding's high level has no batches.
"""

from __future__ import annotations

import sys

from engines_protocol import serve
from llama_cpp import Llama


def main() -> None:
    model = Llama(
        sys.argv[1],
        n_ctx=2048,
        n_batch=2048,
        n_ubatch=512,
        n_threads=1,
        n_threads_batch=1,
        flash_attn=True,
        verbose=False,
    )
    held: list[int] = []

    def generate(batch: list[list[int]], tokens: int) -> None:
        nonlocal held
        (prompt,) = batch
        # Its cache holds one sequence: what both begin with stays.
        common = 0
        while common < min(len(held), len(prompt) - 1) and held[common] == prompt[common]:
            common += 1
        model.n_tokens = common
        model._ctx.kv_cache_seq_rm(-1, common, -1)
        model.eval(prompt[common:])
        for _ in range(tokens - 1):
            model.eval([model.sample(temp=0.0)])
        held = prompt

    serve(generate, without=("decode8",))


if __name__ == "__main__":
    main()
