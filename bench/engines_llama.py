"""llama.cpp through llama-cpp-python, driven by bench/engines.py: argv is a GGUF file.

One sequence only: the binding's high level has no batches.
"""

from __future__ import annotations

import sys

from engines_protocol import serve
from llama_cpp import Llama
from llama_cpp import llama_cpp as llama


def without_tiles() -> None:
    """Keep weights out of llama.cpp's tile (AMX) buffers.

    Its int8 tile kernels end the process with an illegal instruction on the machine this was made
    on (0.3.36, a virtual Sapphire Rapids); its vector kernels are what it has elsewhere.
    """
    defaults = llama.llama_model_default_params

    def changed() -> llama.llama_model_params:
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama.llama_model_default_params = changed


def main() -> None:
    without_tiles()
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
