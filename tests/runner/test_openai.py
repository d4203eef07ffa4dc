from __future__ import annotations

from typing import Any

import pytest

from runner.errors import ApiError
from runner.fields import parse_object
from runner.kv_transfer import check_source
from runner.openai import (
    DEFAULT_COMPLETION_TOKENS,
    GenerationRequest,
    Surface,
    parse_generation,
)
from runner.tiers.types import PeerSource

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}


def chat(**fields: Any) -> GenerationRequest:
    return parse_generation("chat", CHAT | fields)


def text(**fields: Any) -> GenerationRequest:
    return parse_generation("completions", TEXT | fields)


def refusal(surface: Surface, body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_generation(surface, body)
    assert caught.value.status == 400
    return caught.value


# One wrong value per way to be wrong, for fields of each type.
NOT_INTEGERS = ["1", 1.5, True, [], {}]
NOT_BOOLEANS = ["true", 1, 0, [], {}]
NOT_NUMBERS = ["1", True, [], {}, -0.1]
NOT_STRINGS = [1, True, [], {}, ""]
NOT_OBJECTS = ["{}", 1, True, []]

WRONG: list[tuple[str, Any]] = [
    *(("model", value) for value in NOT_STRINGS),
    *(("max_tokens", value) for value in [*NOT_INTEGERS, 0, -1]),
    *(("n", value) for value in [*NOT_INTEGERS, 0, -1, 17]),
    *(("seed", value) for value in [*NOT_INTEGERS, 2**64, -(2**63) - 1]),
    *(("top_k", value) for value in [*NOT_INTEGERS, -2]),
    *(("temperature", value) for value in [*NOT_NUMBERS, float("inf"), float("nan")]),
    *(("top_p", value) for value in [*NOT_NUMBERS, 0, 1.1]),
    *(("stream", value) for value in NOT_BOOLEANS),
    *(("ignore_eos", value) for value in NOT_BOOLEANS),
    *(("return_token_ids", value) for value in NOT_BOOLEANS),
    *(("stop", value) for value in [1, True, {}, "", [""], ["a"] * 5, ["a", 1], ["a", None]]),
    *(("stop_token_ids", value) for value in ["1", 1, {}, ["1"], [True], [-1], [2**32]]),
    *(("cache_salt", value) for value in NOT_STRINGS),
    *(("kv_transfer_params", value) for value in NOT_OBJECTS),
]


@pytest.mark.parametrize("surface", ["chat", "completions"])
@pytest.mark.parametrize(
    ("name", "value"), WRONG, ids=[f"{name}={value!r:.30}" for name, value in WRONG]
)
def test_a_wrong_value_is_refused_naming_field_and_expectation(
    surface: Surface, name: str, value: Any
) -> None:
    body = (CHAT if surface == "chat" else TEXT) | {name: value}

    error = refusal(surface, body)

    assert error.param == name
    assert f"`{name}` must be" in error.message


@pytest.mark.parametrize("name", sorted({name for name, _ in WRONG}))
def test_null_counts_as_absent(name: str) -> None:
    assert chat(**{name: None}).sampling(1, 100) == chat().sampling(1, 100)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 1, "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": 1}], "messages[1].content"),
        ([{"role": "user", "content": {}}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": None, "tool_calls": "x"}], "messages[0].tool_calls"),
    ],
)
def test_messages_of_another_shape_are_refused_by_position(messages: Any, param: str) -> None:
    assert refusal("chat", {"messages": messages}).param == param


@pytest.mark.parametrize(
    "prompt",
    [None, [], {}, 1, True, [[]], [1, "a"], ["a", 1], [[1], "a"], ["a", [1]], [-1], [1.5], [True],
     [2**32], [[1], []], ["a"] * 2049],
)  # fmt: skip
def test_prompts_of_another_shape_are_refused(prompt: Any) -> None:
    assert refusal("completions", {"prompt": prompt}).param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_all_four_prompt_shapes_are_read(prompt: Any, prompts: list[Any]) -> None:
    assert parse_generation("completions", {"prompt": prompt}).prompts == prompts


@pytest.mark.parametrize("cap", [-1, 1.5, "8", True, None, [], {}])
@pytest.mark.parametrize("name", ["max_offload_tokens", "max_load_tokens"])
def test_an_offload_cap_that_is_no_count_is_refused(name: str, cap: Any) -> None:
    error = refusal("chat", CHAT | {"kv_transfer_params": {name: cap}})

    assert error.param == f"kv_transfer_params.{name}"


def test_offload_caps_are_read_and_zero_is_not_absent() -> None:
    caps = chat(kv_transfer_params={"max_offload_tokens": 0, "max_load_tokens": 512}).offload

    assert (caps.max_offload_tokens, caps.max_load_tokens) == (0, 512)
    assert chat(kv_transfer_params={}).offload == chat().offload


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ({"url": "redis://peer:1", "tokens": 64}, "http://HOST:PORT"),
        ({"tokens": 64}, "url"),
        ({"url": "http://peer:1", "tokens": -1}, "tokens"),
        ({"url": "http://peer:1"}, "tokens"),
        ("http://peer:1", "an object"),
    ],
)
def test_a_peer_that_is_none_is_refused_naming_the_member(source: Any, complaint: str) -> None:
    error = refusal("chat", CHAT | {"kv_transfer_params": {"source": source}})

    assert complaint in error.message
    assert error.param is not None
    assert error.param.startswith("kv_transfer_params.source")


def test_a_peer_is_read_in_one_form_and_refused_unless_it_is_allowed() -> None:
    source = chat(
        kv_transfer_params={"source": {"url": "http://Peer:8101/", "tokens": 64}}
    ).offload.source

    assert source == PeerSource("http://peer:8101", 64)
    check_source(source, ["http://peer:8101"])
    check_source(None, [])
    with pytest.raises(ApiError, match="does not allow; it allows http://other:1") as caught:
        check_source(source, ["http://other:1"])
    assert (caught.value.status, caught.value.code) == (400, "peer_not_allowed")


def test_an_unknown_transfer_parameter_is_refused() -> None:
    error = refusal("chat", CHAT | {"kv_transfer_params": {"do_remote_prefill": True}})

    assert error.param == "kv_transfer_params.do_remote_prefill"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("echo", True),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("chat_template", "{{ 1 }}"),
        ("best_of", 3),
    ],
)
def test_what_would_change_the_answer_and_is_not_supported_is_refused(
    name: str, value: Any
) -> None:
    assert refusal("chat", CHAT | {name: value}).param == name


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}


@pytest.mark.parametrize(
    ("name", "value", "param", "what"),
    [
        ("response_format", {"type": "json_object"}, "response_format", "of type json_object"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
            "response_format",
            "of type json_schema",
        ),
        (
            "response_format",
            {"type": "structural_tag"},
            "response_format",
            "of type structural_tag",
        ),
        ("tool_choice", "required", "tool_choice", "`tool_choice` required"),
        (
            "tool_choice",
            {"type": "function", "function": {"name": "f"}},
            "tool_choice",
            "`tool_choice` of a named function",
        ),
        ("function_call", {"name": "f"}, "function_call", "of a named function"),
        ("tools", [TOOL, STRICT], "tools[1].function.strict", "`tools[1].function.strict`"),
        ("structured_outputs", {"regex": "a+"}, "structured_outputs", "`structured_outputs`"),
        ("guided_json", {"type": "object"}, "guided_json", "`guided_json`"),
        ("guided_regex", "a+", "guided_regex", "`guided_regex`"),
        ("guided_choice", ["a", "b"], "guided_choice", "`guided_choice`"),
        ("guided_grammar", "root ::= 'a'", "guided_grammar", "`guided_grammar`"),
        ("structural_tag", {"x": 1}, "structural_tag", "`structural_tag`"),
        ("json_schema", "{}", "json_schema", "`json_schema`"),
        ("regex", "a+", "regex", "`regex`"),
        ("ebnf", "root ::= 'a'", "ebnf", "`ebnf`"),
        ("grammar", "root ::= 'a'", "grammar", "`grammar`"),
    ],
)
def test_an_answer_of_a_given_form_is_refused_saying_why_and_what_to_do(
    name: str, value: Any, param: str, what: str
) -> None:
    error = refusal("chat", CHAT | {"tools": [TOOL]} | {name: value})

    assert (error.status, error.param, error.code) == (400, param, "unsupported_parameter")
    assert what in error.message
    assert "does not constrain what a model writes" in error.message
    assert "leave this out" in error.message


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("response_format", "json", "response_format"),
        ("response_format", {}, "response_format.type"),
        ("response_format", {"type": 1}, "response_format.type"),
        ("tool_choice", 1, "tool_choice"),
        ("tools", [{"type": "function", "function": "f"}], "tools[0].function"),
        ("tools", [{"function": {"name": "f", "strict": "yes"}}], "tools[0].function.strict"),
    ],
)
def test_a_form_of_another_shape_is_refused_by_place(name: str, value: Any, param: str) -> None:
    error = refusal("chat", CHAT | {name: value})

    assert error.param == param
    assert f"`{param}` must be" in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [TOOL]),
        ("tools", [{"type": "function", "function": {"name": "f", "strict": False}}]),
        ("tool_choice", "none"),
        ("tool_choice", None),
        ("function_call", "auto"),
        ("response_format", None),
        ("structured_outputs", {}),
        ("echo", False),
        ("logit_bias", {}),
        ("presence_penalty", 0),
        ("response_format", {"type": "text"}),
        ("tool_choice", "auto"),
        ("best_of", 1),
        ("user", "u"),
        ("some_future_field", {"x": 1}),
    ],
)
def test_neutral_and_unknown_fields_are_accepted(name: str, value: Any) -> None:
    assert chat(**{name: value}).sampling(1, 9) == chat().sampling(1, 9)


def test_stream_options_need_a_stream() -> None:
    assert refusal("chat", CHAT | {"stream_options": {}}).param == "stream_options"
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True).include_usage


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
)
def test_chat_logprobs_are_a_switch_and_a_count(fields: dict[str, Any], logprobs: Any) -> None:
    assert chat(**fields).logprobs == logprobs


@pytest.mark.parametrize(
    "fields", [{"top_logprobs": 2}, {"logprobs": 1}, {"logprobs": True, "top_logprobs": 21}]
)
def test_chat_logprobs_of_another_shape_are_refused(fields: dict[str, Any]) -> None:
    refusal("chat", CHAT | fields)


def test_completion_logprobs_are_a_count() -> None:
    assert text().logprobs is None
    assert text(logprobs=0).logprobs == 0
    assert refusal("completions", TEXT | {"logprobs": True}).param == "logprobs"


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(max_tokens=5).max_tokens == 5


def test_without_max_tokens_a_chat_may_fill_the_context_and_a_completion_is_short() -> None:
    assert chat().sampling(30, 100).max_tokens == 70
    assert text().sampling(30, 100).max_tokens == DEFAULT_COMPLETION_TOKENS


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(90, 11), (100, None), (500, 1)])
def test_what_cannot_fit_the_context_is_refused_with_both_numbers(
    prompt_tokens: int, max_tokens: int | None
) -> None:
    with pytest.raises(ApiError) as caught:
        chat(max_tokens=max_tokens).sampling(prompt_tokens, 100)

    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert "100 tokens" in caught.value.message
    assert f"{prompt_tokens} " in caught.value.message


def test_a_request_that_fits_exactly_is_accepted() -> None:
    assert chat(max_tokens=10).sampling(90, 100).max_tokens == 10


def test_generation_prompt_and_continuation_exclude_each_other() -> None:
    both = {"add_generation_prompt": True, "continue_final_message": True}

    assert refusal("chat", CHAT | both).param == "add_generation_prompt"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b"[1]",
        b'"text"',
        b"null",
        b'{"a": NaN}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b"[" * 5000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(raw)

    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_long_wrong_value_is_quoted_briefly() -> None:
    assert len(refusal("chat", CHAT | {"stop": [["x" * 10_000] * 1000]}).message) < 500
