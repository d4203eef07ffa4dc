"""What recurs across conversations is told from a conversation that goes on."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_index.recurrence import Recurrence, chunk_ends
from tests.support import cpu_s

Texts = list[tuple[str, str]]


def prose(num_sentences: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 9))) for _ in range(500)]
    return "".join(
        " ".join(rng.choices(words, k=12)) + rng.choice([". ", ".\n"]) for _ in range(num_sentences)
    )


DOCUMENT = prose(60)
RULES = "Handbook rule 7: refunds are accepted within thirty days of delivery. " * 40


def num_recurring(memory: Recurrence, texts: Texts, message: int, tenant: str = "t") -> int:
    runs = memory.recurring(tenant, texts)[message]
    return sum(run.end_char - run.start_char for run in runs)


@pytest.mark.parametrize("document", [DOCUMENT, RULES], ids=["prose", "one sentence repeated"])
@pytest.mark.parametrize(
    "move",
    [
        lambda d: [("system", f"You are helping Omar. {d}"), ("user", "q")],
        lambda d: [("user", "q1"), ("assistant", "a1"), ("user", f"Use this:\n{d}\nQuestion: q2")],
        lambda d: [("user", f"Question: what about it?\n{d}")],
        lambda d: [("system", "Be brief."), ("user", d)],
    ],
    ids=["behind a name", "in a later turn", "behind a question", "behind instructions"],
)
def test_a_document_is_found_wherever_it_moves(document: str, move: object) -> None:
    memory = Recurrence()
    memory.observe("t", [("system", f"You are helping Dana Reyes. {document}"), ("user", "q")])
    texts: Texts = move(document)  # type: ignore[operator]
    at = max(range(len(texts)), key=lambda m: len(texts[m][1]))
    found = num_recurring(memory, texts, at)

    assert 0.7 * len(document) < found <= len(texts[at][1])
    assert all(run.is_moved for run in memory.recurring("t", texts)[at])


def test_a_document_with_another_question_below_it_is_shared_and_not_moved() -> None:
    memory = Recurrence()
    memory.observe("t", [("user", f"{DOCUMENT}\nQuestion: one?")])
    texts = [("user", f"{DOCUMENT}\nQuestion: two?")]
    (run,) = memory.recurring("t", texts)[0]

    assert (run.start_char, run.is_moved) == (0, False)
    assert run.end_char == len(f"{DOCUMENT}\n")


def test_a_conversation_that_goes_on_does_not_recur() -> None:
    memory = Recurrence()
    texts: Texts = [("system", RULES)]
    for turn in range(6):
        texts.append(("user", prose(8, seed=turn)))
        memory.observe("t", texts)
        memory.observe("t", texts)
        assert memory.recurring("t", texts) == [[] for _ in texts]
        assert memory.shared_messages("t", texts) == 0
        texts.append(("assistant", prose(5, seed=100 + turn)))


def test_pairs_that_conversations_begin_with_are_shared() -> None:
    examples: Texts = [("system", "Grade."), ("user", "2+2?"), ("assistant", "4")]
    memory = Recurrence()
    memory.observe("t", [*examples, ("user", "5+5?")])
    other = [*examples, ("user", "7+7?"), ("assistant", "14"), ("user", "8+8?")]

    assert memory.shared_messages("t", other) == len(examples)
    assert memory.shared_messages("t", [*examples, ("user", "5+5?")]) == 0
    memory.observe("t", other)
    assert memory.shared_messages("t", [*examples, ("user", "5+5?")]) == len(examples)


def test_the_role_is_part_of_what_stands_before() -> None:
    memory = Recurrence()
    memory.observe("t", [("system", DOCUMENT), ("user", "q")])

    assert all(run.is_moved for run in memory.recurring("t", [("user", DOCUMENT)])[0])


def test_tenants_never_meet() -> None:
    memory = Recurrence()
    memory.observe("a", [("user", f"Hi. {DOCUMENT}")])

    assert memory.recurring("b", [("user", DOCUMENT)]) == [[]]
    memory.observe("b", [("user", "something else")])
    assert memory.recurring("b", [("user", DOCUMENT)]) == [[]]
    assert num_recurring(memory, [("user", DOCUMENT)], 0, "a") > 0


def test_it_is_bounded_and_a_flood_is_its_own_tenants_loss() -> None:
    memory = Recurrence(max_entries=2000)
    memory.observe("small", [("user", f"Hi. {DOCUMENT}")])
    for k in range(300):
        memory.observe("flood", [("user", prose(20, seed=k))])
        assert len(memory) <= 2000

    assert num_recurring(memory, [("user", DOCUMENT)], 0, "small") > 0.7 * len(DOCUMENT)


def test_many_tenants_are_bounded_too() -> None:
    memory = Recurrence(max_entries=500)
    for k in range(400):
        memory.observe(f"tenant {k}", [("user", f"question {k}"), ("assistant", "yes")])

    assert len(memory) <= 500


def test_it_keeps_no_text() -> None:
    memory = Recurrence()
    memory.observe("t", [("user", "a secret word " * 99)])

    for known in memory._tenants.values():
        for entries in (known._nodes, known._places, known._messages):
            for key, value in entries.items():
                assert isinstance(key, int)
                assert isinstance(value, int) or all(isinstance(part, int) for part in value)


TEXT = st.text(st.sampled_from("ab .\n<>/é\ud800"), max_size=400)
PROMPTS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", ""]), TEXT), max_size=6
)


@given(st.lists(PROMPTS, max_size=4), PROMPTS)
@settings(max_examples=60)
def test_runs_are_ordered_disjoint_and_inside_their_text(seen: list[Texts], texts: Texts) -> None:
    memory = Recurrence()
    for other in seen:
        memory.observe("t", other)
    before = len(memory)
    runs = memory.recurring("t", texts)

    assert len(runs) == len(texts)
    for (_, text), row in zip(texts, runs, strict=True):
        at = 0
        for run in row:
            assert at <= run.start_char < run.end_char <= len(text)
            at = run.end_char
    assert 0 <= memory.shared_messages("t", texts) <= len(texts)
    assert len(memory) == before


@given(TEXT)
def test_chunks_cover_a_text(text: str) -> None:
    ends = chunk_ends(text)

    assert ends == sorted(set(ends))
    assert (ends[-1] if ends else 0) == len(text)


@pytest.mark.parametrize("unit", ["a", "\n", ". ", "</a>", "</", "a. ", "x" * 100 + ".\n"])
def test_hostile_text_costs_linear_time(unit: str) -> None:
    def seconds(num_chars: int) -> float:
        text = unit * (num_chars // len(unit))
        return cpu_s(lambda: Recurrence().observe("t", [("user", text)]))

    floor_s = seconds(31_250)
    # 32 times the text; quadratic would be 1,024 times.
    assert seconds(1_000_000) < 128 * floor_s + 0.05
