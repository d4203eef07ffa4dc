"""What an operator wants warm: the shape of the manifest, and reading it with lines in errors.

The schema is closed: a key that is not here is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from warmup.frames import count_places, to_json
from warmup.yaml_lines import Location, YamlError, line_of, load

if TYPE_CHECKING:
    from pathlib import Path

# More copies than any fleet has workers is a slip of the finger.
MAX_COPIES = 1024
# A manifest lists documents and does not hold them all; beyond this it is the wrong file.
MAX_MANIFEST_BYTES = 16 << 20

# What the gateway takes as a document's name.
MAX_ID_CHARS = 256

Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
Name = Annotated[str, Field(min_length=1, max_length=4096)]
# 3 is the version "3"; 1.10 would be another version than 1.1, so a number with a point is refused.
Version = Annotated[
    str,
    BeforeValidator(lambda v: str(v) if isinstance(v, int) and not isinstance(v, bool) else v),
    Field(min_length=1, max_length=256),
]
Copies = Annotated[int, Field(gt=0, le=MAX_COPIES)]


class ManifestError(Exception):
    """The manifest cannot be used; the message has file and line, one problem per line."""


class Section(BaseModel):
    """A part of the manifest: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Placing(Section):
    """How a document is to be kept; what is not said comes from ``defaults``.

    Attributes:
        copies: On how many workers; None leaves it to the gateway.
        pin: Whether the gateway keeps it warm until it is purged.
        priority: Higher ones are warmed first.
        tenant: Whose cache it is for.
        version: Of the document.
        headers: Those that real requests have and that routing looks at; None: ``x-document-id``
            with the document's id.
    """

    copies: Copies | None = None
    pin: bool | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    tenant: Id | None = None
    version: Version | None = None
    headers: dict[str, str] | None = None


class Placeholders(Section):
    """What stands for document and question in the frame; other braces are just braces."""

    document: Name = "{document}"
    question: Name = "{question}"

    @model_validator(mode="after")
    def _apart(self) -> Placeholders:
        if self.document in self.question or self.question in self.document:
            raise ValueError("document and question: neither placeholder may contain the other")
        return self


class Frame(Section):
    """The request around a document, exactly as the application sends it.

    Attributes:
        system: Content of a first message of role ``system``.
        messages: The messages behind it.
        prompt: Instead of both: the prompt of ``/v1/completions``.
        tools: As sent; order and spelling count.
        chat_template_kwargs: As sent.
        body: All other fields that the application sends.
        placeholders: What stands for document and question.
    """

    system: str | None = None
    messages: Annotated[list[dict[str, JsonValue]], Field(min_length=1)] | None = None
    prompt: str | None = None
    tools: list[dict[str, JsonValue]] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    body: dict[str, JsonValue] = {}
    placeholders: Placeholders = Placeholders()

    @model_validator(mode="after")
    def _complete(self) -> Frame:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either messages (chat) or prompt (completions)")
        if self.prompt is not None and (self.system is not None or self.tools is not None):
            raise ValueError("system and tools go with messages, not with prompt")
        taken = {"model", "messages", "prompt", "tools", "chat_template_kwargs"} & self.body.keys()
        if taken:
            raise ValueError(f"body: {', '.join(sorted(taken))}: has a place of its own")
        count_places(self)
        to_json(self.model_dump())
        return self


class DocumentEntry(Placing):
    """One document, or all that a pattern matches."""

    file: Name | None = None
    glob: Name | None = None
    text: str | None = None
    id: Id | None = None

    @model_validator(mode="after")
    def _one_source(self) -> DocumentEntry:
        given = [name for name in ("file", "glob", "text") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"expected one of file, glob, text, got {' and '.join(given) or 'none'}"
            )
        if self.glob is not None and self.id is not None:
            raise ValueError("id: a glob names several documents; each gets its path as id")
        if self.text is not None and self.id is None:
            raise ValueError("id: is required for a text")
        return self


class CapturedEntry(Placing):
    """A file with one client request body a line.

    Attributes:
        file: JSON lines.
        whole: Warm all tokens of each body, and not only those that other requests may share.
    """

    file: Name
    whole: bool = False


class Manifest(Section):
    """Everything one warm-up is about."""

    gateway: str | None = None
    model: Name
    frame: Frame | None = None
    defaults: Placing = Placing()
    documents: list[DocumentEntry] = []
    captured: list[CapturedEntry] = []
    budget_tokens: Annotated[int, Field(gt=0)] | None = None

    @field_validator("gateway")
    @classmethod
    def _http_url(cls, value: str | None) -> str | None:
        return None if value is None else check_url(value)

    @model_validator(mode="after")
    def _something(self) -> Manifest:
        if not self.documents and not self.captured:
            raise ValueError("expected documents or captured requests")
        if self.documents and self.frame is None:
            raise ValueError("frame: is required for documents: the request they are used in")
        return self


def read_manifest(path: Path) -> Manifest:
    """Read and validate a manifest.

    Raises:
        ManifestError: If the file cannot be read or a value is wrong or unknown.
    """
    name = str(path)
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ManifestError(f"{name}: expected at most {MAX_MANIFEST_BYTES >> 20} MiB")
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "expected text in UTF-8"
        raise ManifestError(f"{name}: cannot read the manifest: {why}") from error
    try:
        values, lines = load(text, name)
    except YamlError as error:
        raise ManifestError(str(error)) from error
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        raise ManifestError(_explain(error, lines)) from None


def check_url(value: str) -> str:
    """Return a gateway's base URL without a trailing slash.

    Raises:
        ValueError: If it is no HTTP URL with a host, or carries more than host, port and path.
    """
    try:
        parts = urlsplit(value)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        valid = valid and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or "@" in parts.netloc:
        # Not repeated in full: what stands before an @ may be a password.
        raise ValueError("expected http://HOST[:PORT] without user, query or fragment")
    return value.rstrip("/")


def _explain(error: ValidationError, lines: dict[Location, str]) -> str:
    problems = error.errors(include_url=False, include_input=False)
    return "\n".join(
        dict.fromkeys(
            _problem(problem, lines)
            for problem in problems
            # A bad item also makes its list wrong; only the deepest problem helps.
            if not any(_is_inside(other["loc"], problem["loc"]) for other in problems)
        )
    )


def _is_inside(inner: Location, outer: Location) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _problem(problem: Any, lines: dict[Location, str]) -> str:
    location: Location = problem["loc"]
    if problem["type"] == "extra_forbidden":
        text = f"unknown key {location[-1]!r}"
    elif problem["type"] == "missing":
        text = "is required"
    else:
        text = problem["msg"].removeprefix("Value error, ")
    dotted = ".".join(str(part) for part in location) or "manifest"
    return f"{line_of(lines, location)}: {dotted}: {text}"
