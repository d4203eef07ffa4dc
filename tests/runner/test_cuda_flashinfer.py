"""FlashInfer behind the attention call: what it is told, against attention by its definition."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.batch import BatchBuilder, Chunk
from runner.config import parse_args
from runner.ops.cuda.flashinfer import FlashInferAttention
from tests.runner.ops_parts import config_of, expected_attention, new_pool, random_of

CPU = torch.device("cpu")


class Wrapper:
    """FlashInfer's paged prefill, as its documentation describes it."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        window_left: int,
        q_data_type: torch.dtype,
    ) -> None:
        parts = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {part.dtype for part in parts} == {torch.int32}
        assert causal
        self.rows, self.pages, self.indices, self.last = (part.tolist() for part in parts)
        self.group, self.size, self.left = num_qo_heads // num_kv_heads, page_size, window_left

    def run(self, queries: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out = []
        for at, last in enumerate(self.last):
            first, end_page = self.pages[at : at + 2]
            end = (end_page - first - 1) * self.size + last
            pages = self.indices[first:end_page]
            keys, values = (
                part[pages].flatten(0, 1)[:end].repeat_interleave(self.group, 1) for part in cache
            )
            start, stop = self.rows[at : at + 2]
            for row in range(start, stop):
                to = end - (stop - row) + 1
                begin = 0 if self.left < 0 else max(0, to - 1 - self.left)
                scores = torch.einsum("hd,thd->ht", queries[row].double(), keys[begin:to].double())
                shares = (scores / queries.shape[2] ** 0.5).softmax(-1)
                out.append(torch.einsum("ht,thd->hd", shares, values[begin:to].double()))
        return torch.stack(out).to(queries.dtype)


@pytest.mark.parametrize("window", [0, 7])
def test_it_is_told_what_to_compute(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    config = config_of(window=window)
    pool = new_pool(config, torch.float32)
    chunks = [
        Chunk([1], 39, [5, 2, 9], True),
        Chunk([1], 15, [7, 8, 9], True),
        Chunk([1] * 6, 14, [11, 30], True),
    ]
    batch = BatchBuilder(config.num_layers, 16).build(chunks)
    attention = FlashInferAttention(config, torch.float32, CPU)
    attention.begin(batch, 16)
    qkv = random_of((8, config.num_heads + 2 * config.num_kv_heads, config.head_dim))
    step: Any = SimpleNamespace(pool=pool, batch=batch)
    for layer in range(config.num_layers):
        expected = expected_attention(qkv, pool, config, layer, step)
        actual = attention(qkv, layer, step)
        torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


def test_where_it_is_not_installed_the_runner_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError):
        FlashInferAttention(config_of(), torch.float32, CPU)


def test_on_a_cpu_it_cannot_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--attention", "flashinfer"], {})
    assert "--attention flashinfer needs --device cuda" in capsys.readouterr().err
    assert parse_args(["--attention", "flashinfer", "--device", "cuda"], {}).attention


def test_its_name_says_that_bits_depend_on_the_batch() -> None:
    assert FlashInferAttention.family.endswith("-varying")
