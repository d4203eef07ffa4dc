"""vLLM in its own environment, driven by bench/engines.py: argv is the model folder.

In one process and without HTTP, as the other engines are measured.
"""

from __future__ import annotations

import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)

from engines_protocol import serve
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main() -> None:
    import torch

    model = LLM(
        sys.argv[1],
        dtype="bfloat16",
        max_model_len=2048,
        block_size=32,
        max_num_seqs=16,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        enforce_eager="--eager" in sys.argv,
    )
    torch.set_num_threads(1)

    def generate(batch: list[list[int]], tokens: int) -> None:
        params = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in batch]
        model.generate(prompts, params, use_tqdm=False)

    serve(generate)


if __name__ == "__main__":
    main()
