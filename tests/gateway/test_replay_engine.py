"""The engine model against a second one that walks every step, and its cache against its rules."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.replay.engine import Engine, EngineModel, Job
from gateway.replay.kv_cache import Change
from gateway.replay.presets import LLAMA_8B, PRESETS, load_engine_model
from gateway.routing.cost import CostModel, prefill_s
from prefix_index.index import Index

SIZE = 512


def chain(*ids: int) -> list[bytes]:
    return [i.to_bytes(16, "big") for i in ids]


def engine(model: EngineModel = LLAMA_8B, **changes: object) -> tuple[Engine, list[Change]]:
    announced: list[Change] = []
    return Engine(msgspec.structs.replace(model, **changes), announced.append), announced


def run(engine: Engine, arrivals: list[tuple[float, Job]]) -> list[Job]:
    """Feed requests in order of time and run until nothing is left."""
    for at_s, job in arrivals:
        engine.advance(at_s)
        engine.submit(job, at_s)
    while engine.next_s < inf:
        engine.advance(engine.next_s)
    return [job for _, job in arrivals]


def job(ids: list[int], extra_tokens: int = 10, output_tokens: int = 5) -> Job:
    return Job(chain(*ids), len(ids) * SIZE + extra_tokens, output_tokens, None)


def test_one_request_takes_its_prefill_its_decodes_and_a_step_overhead_each() -> None:
    e, _ = engine()
    (done,) = run(e, [(1.0, Job(chain(*range(19)), 10_000, 3, None))])
    cost = LLAMA_8B.cost
    # 10,000 tokens are two steps of at most 8,192.
    assert done.first_token_s == pytest.approx(1.0 + prefill_s(cost, 10_000, 10_000) + 2 * 0.004)
    context_s = (10_001 + 10_002) * cost.context_s
    decode_s = 2 * (LLAMA_8B.weights_s + 0.004) + context_s
    assert done.finished_s == pytest.approx((done.first_token_s or 0) + decode_s)
    assert e.next_s == inf


def test_a_prompt_served_before_is_a_hit_except_for_its_last_token() -> None:
    e, _ = engine()
    first, again, exact = job([1, 2, 3]), job([1, 2, 3]), job([1, 2], 0)
    run(e, [(0.0, first), (5.0, again), (9.0, exact)])

    assert (first.hit_tokens, again.hit_tokens, exact.hit_tokens) == (0, 3 * SIZE, SIZE)


def test_blocks_are_announced_when_their_chunk_is_computed() -> None:
    e, announced = engine(max_batched_tokens=1024, max_sequences=2)
    e.submit(job([1, 2, 3, 4, 5]), 0.0)
    seen = []
    while e.next_s < inf:
        e.advance(e.next_s)
        seen.append([len(change.blocks) for change in announced])
    assert seen[:3] == [[2], [2, 2], [2, 2, 1]]
    assert announced[1] == Change(True, "gpu", chain(3, 4), chain(2)[0])


def test_two_first_requests_at_once_both_compute_and_one_copy_stays() -> None:
    e, announced = engine()
    left, right = job([1, 2]), job([1, 2])
    # Both wait for the step of the first one.
    run(e, [(0.0, job([9])), (0.0001, left), (0.0002, right)])

    assert left.hit_tokens == right.hit_tokens == 0
    assert [block for change in announced for block in change.blocks] == chain(9, 1, 2)
    assert e.cache.num_cached == 3
    assert e.cache.num_pinned == 0


def test_the_deepest_block_of_the_oldest_prompt_is_evicted_first() -> None:
    e, announced = engine(gpu_tokens=5 * SIZE)
    run(e, [(0.0, job([1, 2, 3])), (9.0, job([7]))])

    assert [change for change in announced if not change.stored] == []
    run(e, [(19.0, job([8]))])
    assert [change for change in announced if not change.stored] == [Change(False, "gpu", chain(3))]


def test_a_request_waits_until_its_prompt_and_output_fit() -> None:
    e, _ = engine(gpu_tokens=4 * SIZE)
    big, small = job([1, 2], output_tokens=100), job([7], output_tokens=5)
    big_2 = job([3, 4], output_tokens=100)
    run(e, [(0.0, big), (0.0, big_2), (0.0, small)])

    assert big_2.first_token_s is not None
    assert big.finished_s is not None
    assert big_2.first_token_s > big.finished_s
    assert small.first_token_s is not None
    assert small.first_token_s >= big_2.first_token_s  # arrival order, whatever would fit


def test_a_request_that_can_never_fit_is_refused() -> None:
    e, _ = engine(gpu_tokens=4 * SIZE)
    with pytest.raises(ValueError, match=r"needs 5 blocks of KV memory; the engine has 4"):
        e.submit(job([1, 2], output_tokens=2 * SIZE), 0.0)


def test_what_the_gpu_evicts_is_restored_from_the_cpu_tier_over_one_link() -> None:
    e, announced = engine(gpu_tokens=4 * SIZE, cpu_tokens=8 * SIZE)
    back = job([1, 2])
    run(e, [(0.0, job([1, 2])), (9.0, job([5, 6, 7])), (19.0, back)])

    assert back.hit_tokens == back.restored_tokens == 2 * SIZE
    assert back.first_token_s is not None
    restore_s = 2 * SIZE / LLAMA_8B.cost.restore_cpu_tokens_per_s
    assert back.first_token_s - 19.0 == pytest.approx(
        restore_s
        + LLAMA_8B.weights_s
        + 0.004
        + prefill_s(LLAMA_8B.cost, 10, back.prompt_tokens)
        - 10 * LLAMA_8B.cost.token_s
    )
    assert Change(True, "cpu", chain(2), chain(1)[0]) in announced


def test_a_long_prompt_that_comes_during_a_restore_is_computed_after_it() -> None:
    e, _ = engine(gpu_tokens=120 * SIZE, cpu_tokens=400 * SIZE)
    back, long = job(list(range(40))), job(list(range(300, 360)))
    run(e, [(0.0, job(list(range(40)))), (20.0, job(list(range(100, 210))))])
    run(e, [(50.0, back), (50.001, long)])

    assert back.restored_tokens > 0
    # It waits for the step that runs when its restore ends, not for all four of the long prompt.
    assert (back.first_token_s or 0) < 50.8
    assert (long.first_token_s or 0) > 51.2


def test_what_the_cpu_tier_drops_goes_to_disk_and_is_lost_behind_it() -> None:
    e, announced = engine(gpu_tokens=3 * SIZE, cpu_tokens=2 * SIZE, disk_tokens=SIZE)
    for i in range(6):
        run(e, [(10.0 * i, job([10 * i + 1, 10 * i + 2]))])
    held: dict[str, set[bytes]] = {"gpu": set(), "cpu": set(), "disk": set()}
    for change in announced:
        for block in change.blocks:
            (held[change.tier].add if change.stored else held[change.tier].remove)(block)
    assert {tier: len(blocks) for tier, blocks in held.items()} == {"gpu": 2, "cpu": 2, "disk": 1}


def test_pulled_blocks_count_as_hits_once_they_are_there() -> None:
    e, announced = engine()
    pulled = job([1, 2, 3])
    pulled.pulled_blocks, pulled.pulled_s = 2, 4.0
    run(e, [(1.0, pulled)])

    assert (pulled.hit_tokens, pulled.pulled_tokens) == (2 * SIZE, 2 * SIZE)
    assert (pulled.first_token_s or 0) > 4.0
    assert [block for change in announced for block in change.blocks] == chain(1, 2, 3)


def walked(model: EngineModel, arrivals: list[tuple[float, int, int]]) -> list[tuple[float, float]]:
    """First and last token times of unshared prompts, every step of its own.

    Memory is taken to be large enough.
    """
    cost, now_s = model.cost, 0.0
    waiting = list(range(len(arrivals)))
    left = [tokens for _, tokens, _ in arrivals]
    prefilling: list[int] = []
    decoding: dict[int, int] = {}
    out: list[list[float]] = [[] for _ in arrivals]
    while waiting or prefilling or decoding:
        if not prefilling and not decoding:
            now_s = max(now_s, arrivals[waiting[0]][0])
        budget = model.max_batched_tokens - len(decoding)
        chunks = []
        candidates = [*prefilling, *(i for i in waiting if arrivals[i][0] <= now_s)]
        for i in candidates:
            if budget <= 0 or (
                i in waiting and len(prefilling) + len(decoding) >= model.max_sequences
            ):
                break
            if i in waiting:
                waiting.remove(i)
                prefilling.append(i)
            chunks.append((i, min(budget, left[i])))
            budget -= chunks[-1][1]
        attention = sum(t * (arrivals[i][1] - left[i] + t / 2) for i, t in chunks)
        context = sum(arrivals[i][1] + done for i, done in decoding.items())
        tokens = len(decoding) + sum(t for _, t in chunks)
        now_s += max(tokens * cost.token_s, model.weights_s) + cost.step_s
        now_s += cost.attention_s * attention + cost.context_s * context
        for i in list(decoding):
            decoding[i] += 1
            if decoding[i] == arrivals[i][2]:
                del decoding[i]
                out[i].append(now_s)
        for i, t in chunks:
            left[i] -= t
            if not left[i]:
                prefilling.remove(i)
                out[i].append(now_s)
                if arrivals[i][2] == 1:
                    out[i].append(now_s)
                else:
                    decoding[i] = 1
    return [(times[0], times[1]) for times in out]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 3).map(lambda x: round(x, 3)),
            st.integers(1, 5000),
            st.integers(1, 60),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 6),
)
def test_stretches_of_steps_end_when_single_steps_would(
    arrivals: list[tuple[float, int, int]], max_sequences: int
) -> None:
    model = msgspec.structs.replace(
        LLAMA_8B, max_batched_tokens=1024, max_sequences=max_sequences, gpu_tokens=10_000_000
    )
    # Never at one instant: what comes second then waits for a step, as in a real engine.
    arrivals = [(at_s + 1e-5 * i, *sizes) for i, (at_s, *sizes) in enumerate(sorted(arrivals))]  # type: ignore[misc]
    e, _ = engine(model)
    jobs = [
        Job(chain(*range(1000 * i, 1000 * i + tokens // SIZE)), tokens, out, None)
        for i, (_, tokens, out) in enumerate(arrivals)
    ]
    run(e, [(at_s, job) for (at_s, _, _), job in zip(arrivals, jobs, strict=True)])

    got = [(job.first_token_s, job.finished_s) for job in jobs]
    assert got == [pytest.approx(times, abs=1e-9) for times in walked(model, arrivals)]
    assert e.cache.num_pinned == 0


def test_tokens_generated_in_the_middle_of_a_stretch_are_counted() -> None:
    e, _ = engine()
    one = Job([], 100, 50, None)
    e.submit(one, 0.0)
    e.advance(e.next_s)
    start_s, end_s = one.first_token_s or 0.0, e.next_s
    counts = [e.generated_tokens(one, start_s + (end_s - start_s) * k / 10) for k in range(11)]

    assert counts[0] == 1
    assert counts == sorted(counts)
    assert 20 <= counts[5] <= 30
    assert counts[10] == 50


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=25))
def test_the_announced_changes_keep_an_index_equal_to_the_cache(
    prompts: list[tuple[int, int]],
) -> None:
    index = Index(SIZE)
    root = b"\xffroot\xff" + bytes(10)

    def apply(change: Change) -> None:
        if change.stored:
            index.store("w", change.blocks, change.parent or root, change.tier)
        else:
            index.remove("w", change.blocks, change.tier)

    model = msgspec.structs.replace(
        LLAMA_8B, gpu_tokens=8 * SIZE, cpu_tokens=6 * SIZE, disk_tokens=9 * SIZE
    )
    e = Engine(model, apply)
    for i, (family, length) in enumerate(prompts):
        blocks = chain(*(100 * family + depth for depth in range(length)))
        run(e, [(float(i), Job(blocks, length * SIZE + 1, 20, None))])
        hit = index.match(blocks).get("w")
        found = e.cache.match(blocks)
        assert (
            (hit.gpu, hit.cpu, hit.disk)
            == (
                len(found.gpu) * SIZE,
                len(found.cpu) * SIZE,
                len(found.disk) * SIZE,
            )
            if hit
            else found.num_blocks == 0
        )
        assert index.held_blocks("w") == e.cache.num_cached


def test_presets_have_the_documented_constants() -> None:
    c8, c70 = PRESETS["8b"].cost, PRESETS["70b"].cost
    assert (c8.token_s, c70.token_s) == pytest.approx((32.5e-6, 79.2e-6), rel=2e-3)
    assert (c8.context_s, c70.context_s) == pytest.approx((5.2168e-8, 3.2605e-8), rel=1e-4)
    assert (c8.restore_cpu_tokens_per_s, c70.restore_cpu_tokens_per_s) == pytest.approx(
        (190_734.86, 305_175.78), rel=1e-6
    )


def test_an_engine_model_is_read_from_a_file(tmp_path: object) -> None:
    path = f"{tmp_path}/engine.json"
    with open(path, "wb") as file:
        file.write(msgspec.json.encode(LLAMA_8B))
    assert load_engine_model(path) == LLAMA_8B


def test_a_live_gateways_answer_is_an_engine_model_of_its_slowest_worker(tmp_path: object) -> None:
    rows = [
        {"id": "a", "cost": None, "capacity_tokens": 9000, "cpu_capacity_tokens": None},
        {"id": "b", "cost": msgspec.to_builtins(LLAMA_8B.cost), "capacity_tokens": 80_000},
        {
            "id": "c",
            "cost": msgspec.to_builtins(CostModel(1.0, 0.0, 0.001, 0.0)),
            "capacity_tokens": 90_000,
            "cpu_capacity_tokens": 5000,
        },
    ]
    path = f"{tmp_path}/workers.json"
    with open(path, "wb") as file:
        file.write(msgspec.json.encode({"workers": rows}))
    model = load_engine_model(path)

    assert (model.cost.token_s, model.cost.step_s) == (1.0, 0.004)
    assert (model.gpu_tokens, model.cpu_tokens, model.weights_s) == (80_000, 0, 0.0)
    with open(path, "wb") as file:
        file.write(msgspec.json.encode({"workers": rows[:1]}))
    with pytest.raises(ValueError, match=r"workers\.json: no worker has both"):
        load_engine_model(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_tokens": 100}, "gpu_tokens must be at least 512, not 100"),
        ({"cost": CostModel(0.0, 0.0, 0.0, 0.0)}, r"cost.token_s must be above 0, not 0\.0"),
        ({"cost": CostModel(1.0, 0.0, -1.0, 0.0)}, r"cost.step_s must be at least 0, not -1\.0"),
        ({"disk_tokens": 512}, "disk_tokens needs cpu_tokens above 0"),
        ({"max_batched_tokens": 10}, "max_batched_tokens must be at least 257, not 10"),
    ],
)
def test_an_impossible_engine_model_is_refused_with_its_bound(
    tmp_path: object, changes: dict[str, object], message: str
) -> None:
    path = f"{tmp_path}/engine.json"
    with open(path, "wb") as file:
        file.write(msgspec.json.encode(msgspec.structs.replace(LLAMA_8B, **changes)))
    with pytest.raises(ValueError, match=message):
        load_engine_model(path)


@pytest.mark.parametrize("text", ["", "[]", '{"gpu_tokens": 1}', '{"cots": {}}'])
def test_a_file_that_is_no_engine_model_is_refused_by_name(tmp_path: object, text: str) -> None:
    path = f"{tmp_path}/engine.json"
    with open(path, "w") as file:
        file.write(text)
    with pytest.raises(ValueError, match=r"engine\.json"):
        load_engine_model(path)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="expected 8b, 70b or a JSON file"):
        load_engine_model("9b")
