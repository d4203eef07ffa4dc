"""From a request to a sequence: what can never run is refused, the rest gets its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.kvkeys import AdapterTag, BlockChain, adapter_identity, root_key
from runner.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.kvkeys import KvKey
    from runner.plan import Limits
    from runner.pool.blocks import BlockPool
    from runner.types import EngineRequest


class Intake:
    """Reads requests for one engine; used from its thread alone.

    Args:
        pool: Bounds what can run.
        namespace: Of the base model.
        limits: See there.
        adapters: Generation of each LoRA adapter by name (``Adapter.digest``).
    """

    def __init__(
        self, pool: BlockPool, namespace: KvKey, limits: Limits, adapters: Mapping[str, str]
    ) -> None:
        self._block_size = pool.block_size
        self._pool_tokens = pool.num_blocks * pool.block_size
        self._namespace = namespace
        # Identity and tag of each name that a request may give.
        self._adapters: dict[str, tuple[str, AdapterTag | None]] = {"": ("", None)}
        for number, (name, digest) in enumerate(adapters.items(), start=1):
            self._adapters[name] = adapter_identity(name, digest), AdapterTag(number, name)
        self._limits = limits
        self._num_arrivals = 0

    def refusal(self, request: EngineRequest) -> str | None:
        """Return why a request can never run, naming the limit; None if it can."""
        limits, prompt = self._limits, request.prompt_ids
        if not prompt:
            return "the prompt has no tokens"
        if request.adapter not in self._adapters:
            return f"there is no adapter {request.adapter}"
        if len(prompt) >= limits.max_model_len:
            return (
                f"the prompt has {len(prompt)} tokens; prompt and completion together may have "
                f"{limits.max_model_len} (maximum context length)"
            )
        if len(prompt) >= self._pool_tokens:
            return f"the prompt has {len(prompt)} tokens; the KV pool holds {self._pool_tokens}"
        if request.params.n > limits.max_seqs:
            return f"n is {request.params.n}; at most {limits.max_seqs} samples run at once"
        if not 0 <= min(prompt) <= max(prompt) < limits.vocab_size:
            return f"prompt token ids must be between 0 and {limits.vocab_size - 1}"
        return None

    def sequence(self, request: EngineRequest) -> Sequence:
        """Return the sequence of a request that ``refusal`` has nothing against."""
        prompt = request.prompt_ids
        identity, tag = self._adapters[request.adapter]
        root = root_key(self._namespace, salt=request.salt, adapter=identity)
        chain = BlockChain(root, self._block_size, request.salt, tag)
        chain.extend(prompt)
        max_tokens = min(
            len(prompt) + request.params.max_tokens, self._limits.max_model_len, self._pool_tokens
        )
        arrival = self._num_arrivals
        self._num_arrivals += 1
        return Sequence(
            request,
            arrival=arrival,
            indexes=list(range(request.params.n)),
            tokens=list(prompt),
            max_tokens=max_tokens,
            chain=chain,
        )
