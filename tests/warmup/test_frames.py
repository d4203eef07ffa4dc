from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from warmup.frames import MARKER, body_of, to_json
from warmup.manifest import Frame

# What an application holds in its own code, for a document and a question.
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "z", "parameters": {"b": {"x": 1.0}, "a": {}}}}
]


def application(document: str, question: str) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Rules: {x} {{y}} {documents}\n" + document + "}}\n"},
            {"role": "user", "content": [{"type": "text", "text": "Q: " + question + "?"}]},
        ],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
        "temperature": 0.0,
        "seed": 2**63,
    }


def frame(**fields: Any) -> Frame:
    return Frame.model_validate(fields)


FRAME = frame(
    system="Rules: {x} {{y}} {documents}\n{document}}}\n",
    messages=[{"role": "user", "content": [{"type": "text", "text": "Q: {question}?"}]}],
    tools=TOOLS,
    chat_template_kwargs={"enable_thinking": False},
    body={"temperature": 0.0, "seed": 2**63},
)
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\x00")


@given(
    document=st.one_of(
        st.text(CHARACTERS),
        st.sampled_from(["{question}", "{document}", r"\1 \g<0> \n", "\r\n\ufeff{", "{{}}"]),
    ),
    question=st.text(CHARACTERS),
)
def test_the_body_is_what_the_application_sends_byte_for_byte(document: str, question: str) -> None:
    ours = to_json(body_of(FRAME, "m", document, question))

    assert ours == json.dumps(application(document, question), ensure_ascii=False).encode()
    marked = json.loads(to_json(body_of(FRAME, "m", document)))
    assert marked == application(document, MARKER)


def test_completions_have_a_prompt() -> None:
    body = body_of(frame(prompt="{document}\nQ: {question}\nA:", body={"max_tokens": 5}), "m", "D")

    assert body == {"model": "m", "prompt": f"D\nQ: {MARKER}\nA:", "max_tokens": 5}


def test_other_placeholders_leave_the_usual_ones_as_text() -> None:
    other = frame(
        messages=[{"role": "user", "content": "Fill {document} and {question}: <D> <Q>"}],
        placeholders={"document": "<D>", "question": "<Q>"},
    )

    content = body_of(other, "m", "doc", "q")["messages"][0]["content"]
    assert content == "Fill {document} and {question}: doc q"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt": "{document}"}, "expected {question} once"),
        ({"prompt": "{question}"}, "expected {document} once"),
        ({"prompt": "{document}{document}{question}"}, "found it 2 times"),
        ({"prompt": "{question}{document}"}, "stands before the document"),
        ({"prompt": "{document}\x00{question}"}, "NUL"),
        ({}, "either messages"),
        ({"prompt": "{document}{question}", "system": "s"}, "go with messages"),
        (
            {"prompt": "{document}{question}", "messages": [{"role": "user", "content": "x"}]},
            "either messages",
        ),
        ({"messages": []}, "at least 1"),
        ({"prompt": "{document}{question}", "body": {"model": "x", "tools": []}}, "model, tools"),
        ({"prompt": "{document}{question}", "body": {"x": float("inf")}}, "JSON"),
        (
            {"prompt": "{document}{question}", "placeholders": {"document": "{q", "question": "{"}},
            "neither placeholder may contain the other",
        ),
    ],
)
def test_a_frame_without_one_clear_place_for_each_is_refused(
    fields: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        frame(**fields)
    assert error in str(caught.value)
