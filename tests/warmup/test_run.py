"""Runs against a gateway that goes away, stalls, breaks off and talks nonsense."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.warmup.conftest import FRAME
from tests.warmup.fake_gateway import FakeGateway, Fault
from warmup.book import Book
from warmup.gateway_client import Gateway, RefusedError
from warmup.items import Item, batches, read_items
from warmup.manifest import read_manifest
from warmup.run import Ask, GaveUpError, Warming
from warmup.talk import Several

DOCUMENTS = ["a.md", "b.md", "c.md", "d.md"]
BREAKS = ["die", "close", "garbage", "stopped", "stall"]


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, wait_s: float) -> None:
        self.waits_s.append(wait_s)
        self.now_s += wait_s


class Try:
    """One run of a manifest against a fake gateway."""

    def __init__(self, folder: Path, gateway: FakeGateway, **ask: Any) -> None:
        self.manifest = read_manifest(folder / "warm.yaml")
        self.folder = folder
        self.book = Book()
        self.clock = Clock()
        self.gateway = Gateway(gateway.url, None, silence_s=0.3)
        self.warming = Warming(
            self.gateway,
            Ask(ask.pop("purpose", "run"), "m", "test", **ask),
            self.book,
            Several([]),
            patience_s=60.0,
            clock=self.clock,
            sleep=self.clock.sleep,
            rng=random.Random(1),
        )

    def run(self) -> Book:
        try:
            self.warming.warm(read_items(self.manifest, self.folder))
        finally:
            self.gateway.close()
        return self.book


def states(book: Book) -> dict[str, str]:
    return {name: row.state for name, row in book.rows.items()}


def test_all_documents_are_sent_in_their_frame_and_proven(
    folder: Path, gateway: FakeGateway
) -> None:
    book = Try(folder, gateway, concurrency=3, max_share=0.25).run()

    assert states(book) == dict.fromkeys(DOCUMENTS, "warm")
    (request,) = gateway.requests
    assert request["run_id"] == "test-1"
    asked = {"model": "m", "concurrency": 3, "max_share": 0.25, "dry_run": False, "verify": True}
    assert asked.items() <= request.items()
    item = request["items"][0]
    text = (folder / "a.md").read_text()
    assert item["body"]["messages"] == [
        {"role": "system", "content": f"Answer from this document:\n\n{text}"},
        {"role": "user", "content": item["marker"]},
    ]


def test_a_second_run_computes_nothing(folder: Path, gateway: FakeGateway) -> None:
    Try(folder, gateway).run()
    before = len(gateway.computed)

    book = Try(folder, gateway).run()

    assert states(book) == dict.fromkeys(DOCUMENTS, "warm")
    assert len(gateway.computed) == before == 4
    assert book.computed_tokens == 0


@pytest.mark.parametrize("then", BREAKS)
@pytest.mark.parametrize("after_lines", [0, 1, 3, 8, 14, 16])
def test_a_stream_that_breaks_anywhere_is_taken_up_again_without_computing_twice(
    folder: Path, gateway: FakeGateway, then: str, after_lines: int
) -> None:
    gateway.faults.append(Fault(after_lines=after_lines, then=then))

    run = Try(folder, gateway)
    book = run.run()

    assert states(book) == dict.fromkeys(DOCUMENTS, "warm")
    assert sorted(name for name, _ in gateway.computed) == DOCUMENTS
    assert book.computed_tokens == 400 - 100 * _lost_dones(after_lines)
    assert len(run.clock.waits_s) == 1


def _lost_dones(after_lines: int) -> int:
    """How many documents were computed whose ``done`` was the line at which the stream broke."""
    return int(after_lines in (3,)) if after_lines <= 12 else 0


def test_what_is_proven_is_not_sent_again(folder: Path, gateway: FakeGateway) -> None:
    # The plan, four times start, progress and done, then proofs: of two.
    gateway.faults.append(Fault(after_lines=15))

    Try(folder, gateway).run()

    assert gateway.ids() == [DOCUMENTS, ["c.md", "d.md"]]
    assert [request["run_id"] for request in gateway.requests] == ["test-1", "test-2"]


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
def test_a_gateway_that_is_busy_or_restarting_is_asked_again_and_when_it_says(
    folder: Path, gateway: FakeGateway, status: int
) -> None:
    gateway.faults += [Fault(status), Fault(status, headers={"retry-after": "7"})]

    run = Try(folder, gateway)
    book = run.run()

    assert states(book) == dict.fromkeys(DOCUMENTS, "warm")
    assert 0.25 <= run.clock.waits_s[0] <= 0.5
    assert run.clock.waits_s[1] == 7.0


@pytest.mark.parametrize("asked", ["nan", "inf", "-1", "tomorrow", ""])
def test_a_retry_after_that_is_no_time_is_passed_over(
    folder: Path, gateway: FakeGateway, asked: str
) -> None:
    gateway.faults.append(Fault(503, headers={"retry-after": asked}))

    run = Try(folder, gateway)
    run.run()

    assert 0 < run.clock.waits_s[0] <= 0.5


def test_an_absent_gateway_is_given_up_after_the_operators_patience(
    folder: Path, gateway: FakeGateway
) -> None:
    gateway.faults += [Fault(503)] * 100

    run = Try(folder, gateway)
    with pytest.raises(GaveUpError, match="given up after 60 s"):
        run.run()

    assert run.clock.now_s == pytest.approx(60.0)
    assert max(run.clock.waits_s) <= 15.0
    assert states(run.book) == dict.fromkeys(DOCUMENTS, "cold")


def test_patience_begins_anew_with_every_document_that_becomes_final(
    folder: Path, gateway: FakeGateway
) -> None:
    away = [Fault(503, headers={"retry-after": "25"})] * 2
    gateway.faults += [*away, Fault(after_lines=4), *away, Fault(after_lines=4), *away]

    run = Try(folder, gateway)
    book = run.run()

    assert run.clock.now_s > 60.0
    assert states(book) == dict.fromkeys(DOCUMENTS, "warm")


def test_a_gateway_that_breaks_off_every_time_without_progress_is_given_up(
    folder: Path, gateway: FakeGateway
) -> None:
    gateway.faults += [Fault(after_lines=1)] * 200

    with pytest.raises(GaveUpError):
        Try(folder, gateway).run()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault(401, message="The admin token is missing or wrong."), "--token-env"),
        (Fault(403, message="loopback only"), "loopback only"),
        (Fault(404, message="No such path."), "expected a Warmlane gateway"),
        (Fault(404, "model_not_found", "The model 'm' does not exist."), "'m' does not exist"),
        (Fault(405), "405"),
        (Fault(301, headers={"location": "http://elsewhere.invalid/"}), "301"),
    ],
)
def test_a_refusal_for_good_ends_the_run_at_once_with_the_gateways_words(
    folder: Path, gateway: FakeGateway, fault: Fault, text: str
) -> None:
    gateway.faults.append(fault)

    run = Try(folder, gateway)
    with pytest.raises(RefusedError, match=text):
        run.run()

    assert run.clock.waits_s == []


def test_a_batch_that_is_too_large_is_sent_in_parts(folder: Path, gateway: FakeGateway) -> None:
    gateway.max_items = 1

    book = Try(folder, gateway).run()

    assert states(book) == dict.fromkeys(DOCUMENTS, "warm")
    assert [ids for ids in gateway.ids() if len(ids) == 1] == [[name] for name in DOCUMENTS]


def test_a_document_that_spoils_its_batch_is_found_and_the_rest_goes_on(
    folder: Path, gateway: FakeGateway
) -> None:
    gateway.faults += [Fault(400, message="odd"), None, Fault(400, message="odd")]
    gateway.faults += [Fault(400, message="c is odd"), None]

    book = Try(folder, gateway).run()

    assert gateway.ids() == [DOCUMENTS, DOCUMENTS[:2], DOCUMENTS[2:], ["c.md"], ["d.md"]]
    assert states(book) == {"a.md": "warm", "b.md": "warm", "c.md": "cold", "d.md": "warm"}
    assert "c is odd" in (book.rows["c.md"].problem or "")


def test_a_gateway_that_takes_no_document_at_all_is_not_asked_about_each_of_thousands(
    folder: Path, gateway: FakeGateway
) -> None:
    for number in range(300):
        (folder / f"{number}.md").write_text("text")
    gateway.faults += [Fault(400, message="copies: unknown key")] * 10_000

    with pytest.raises(RefusedError, match="unknown key"):
        Try(folder, gateway).run()

    assert len(gateway.requests) < 40


def test_what_the_gateway_refuses_or_cannot_place_is_named_and_the_rest_goes_on(
    folder: Path, gateway: FakeGateway
) -> None:
    gateway.refused["a.md"] = "9,000 tokens, longer than the context of 8,192"
    place = {"id": "b.md", "worker": None, "tokens": 100, "action": "no_worker", "reason": "none"}
    gateway.placed["b.md"] = [place]
    gateway.failing["c.md", "w1"] = "the worker died"

    book = Try(folder, gateway).run()

    assert states(book) == {"a.md": "cold", "b.md": "cold", "c.md": "cold", "d.md": "warm"}
    assert "longer than the context" in (book.rows["a.md"].problem or "")
    assert [copy.reason for copy in book.rows["b.md"].copies.values()] == ["none"]
    assert [copy.reason for copy in book.rows["c.md"].copies.values()] == ["the worker died"]


@pytest.mark.parametrize("action", ["skip_capacity", "skip_worth", "skip_budget", "no_worker"])
def test_a_copy_that_is_left_out_makes_its_document_partial(
    folder: Path, gateway: FakeGateway, action: str
) -> None:
    warm = {"id": "a.md", "worker": "w0", "tokens": 100, "action": "warm"}
    gateway.placed["a.md"] = [warm, {**warm, "worker": "w1", "action": action, "reason": "full"}]

    book = Try(folder, gateway).run()

    assert book.rows["a.md"].state == "partial"
    assert book.rows["a.md"].copies["w1"].reason == "full"


def test_nothing_is_warm_without_proof(folder: Path, gateway: FakeGateway) -> None:
    gateway.unproven["a.md", "w0"] = 84
    gateway.silent_about.add("b.md")
    real = gateway._probe

    def probe(placement: dict[str, Any]) -> dict[str, Any]:
        seen = real(placement)
        if placement["id"] == "c.md":  # says so, and shows nothing
            return {**seen, "warm": True, "cached_tokens": None}
        if placement["id"] == "d.md":  # says so against its own numbers
            return {**seen, "warm": True, "cached_tokens": 99}
        return seen

    gateway._probe = probe  # type: ignore[method-assign]
    book = Try(folder, gateway).run()

    assert set(states(book).values()) == {"cold"}
    assert "84 of 100" in str(book.rows["a.md"].copies["w0"].reason)
    assert "without a word" in str(book.rows["b.md"].problem)


def test_a_plan_and_a_verification_compute_nothing(folder: Path, gateway: FakeGateway) -> None:
    planned = Try(folder, gateway, purpose="plan").run()
    verified = Try(folder, gateway, purpose="verify").run()

    assert [(r["dry_run"], r["verify"]) for r in gateway.requests] == [(True, False), (True, True)]
    assert gateway.computed == []
    assert len(planned.placements()) == 4
    assert set(states(verified).values()) == {"cold"}


def test_large_manifests_go_in_batches_and_the_budget_goes_along(
    folder: Path, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmup.items.MAX_BATCH_ITEMS", 2)

    Try(folder, gateway, budget_tokens=250).run()

    assert gateway.ids() == [DOCUMENTS[:2], DOCUMENTS[2:]]
    assert [request["budget_tokens"] for request in gateway.requests] == [250, 50]


def test_batches_are_bounded_in_count_and_bytes_and_read_no_further_than_sent() -> None:
    read = []

    def items() -> Any:
        for number in range(1000):
            read.append(number)
            yield Item(str(number), b"x" * (1 << 16))

    first = next(stream := batches(items()))

    assert sum(len(item.data) for item in first) <= 8 << 20
    assert len(read) == len(first) + 1
    assert sum(map(len, stream)) + len(first) == 1000


def test_a_document_larger_than_a_batch_goes_alone() -> None:
    large = Item("large", b"x" * (9 << 20))
    small = [Item("a", b"x"), Item("b", b"x")]

    assert [[i.id for i in b] for b in batches([small[0], large, small[1]])] == [
        ["a"], ["large"], ["b"],
    ]  # fmt: skip


def test_higher_priorities_go_first(folder: Path, gateway: FakeGateway) -> None:
    (folder / "warm.yaml").write_text(
        "model: m\ndefaults: {priority: 1}\ndocuments:\n"
        "  - {file: a.md}\n  - {file: b.md, priority: 5}\n  - {file: c.md, priority: -1}\n" + FRAME
    )

    Try(folder, gateway).run()

    assert gateway.ids() == [["b.md", "a.md", "c.md"]]
