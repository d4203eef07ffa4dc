"""The fuzz targets hold on a few hundred inputs; ``python -m bench.fuzz`` runs them for longer."""

from __future__ import annotations

from random import Random

import pytest

from bench.fuzz import mutate
from bench.fuzz_front import Fronts
from bench.fuzz_targets import TARGETS


@pytest.mark.parametrize("name", ["sse", "events", "forms", "front"])
def test_what_comes_from_outside_is_read_one_way_and_breaks_nothing(name: str) -> None:
    make, seeds, words = TARGETS[name]
    target, random = make(), Random(7)
    for seed in seeds:
        target(seed)
    for _ in range(300):
        target(mutate(random, seeds, words))
    if isinstance(target, Fronts):
        target.close()


@pytest.mark.parametrize(
    ("data", "served"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}", [b"{}"]),
        (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n{}", []),
    ],
)
def test_the_fuzzer_sees_what_the_fronts_serve(data: bytes, served: list[bytes]) -> None:
    fronts = Fronts()
    fronts.check([data[:9], data[9:]])

    fronts.close()
    assert [body for _, body in fronts._served] == served
