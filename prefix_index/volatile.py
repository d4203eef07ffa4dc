"""Text in a prompt that is likely to differ in the next one: clocks, dates, ids, counters, nonces.

Finding is guessing by shape: a date may be what a contract says. So what is found is reported, and
skipped where a mistake costs nothing (an affinity key); it never changes a prompt by itself.

Every quantifier is bounded and every match starts at a word's start, so the time is linear in the
text, whatever the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind: TypeAlias = Literal[
    "datetime", "date", "uuid", "hex_id", "counter", "attribution_header", "random"
]

# More of them in one text is data, a log or a table, and not a prompt that changes in one place.
MAX_SPANS = 32
# Text near digits that is looked at, the rest of a text is not: the bound on the time that hostile
# text can cost (about 1 us per character).
MAX_LOOK_CHARS = 65_536
# A match reaches at most this far to either side of its first digits: a full date with its weekday
# before, a token of 128 characters behind.
_REACH_CHARS = 136
# Shorter runs of letters and digits are words, versions and part numbers.
_MIN_RANDOM_CHARS = 16
_MIN_HEX_CHARS = 16
# Share of neighbours of different class (upper, lower, digit), words' capitals not counted. Random
# base 36 has 0.40, base 62 0.44; identifiers such as ``ISO8601DateTimeFormat2`` less than 0.3.
_MIN_CHANGE_RATIO = 0.3

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    r"|Sep(?:t(?:ember)?)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
# German, French, Spanish, Italian and Portuguese names that are no English ones.
_OTHER_MONTH = (
    r"(?i:januar|februar|m\u00e4rz|mai|juni|juli|oktober|dezember"
    r"|janvier|f\u00e9vrier|mars|avril|juin|juillet|ao\u00fbt|septembre|octobre|novembre"
    r"|d\u00e9cembre|enero|febrero|marzo|abril|mayo|junio|julio|agosto|septiembre|octubre"
    r"|noviembre|diciembre|gennaio|febbraio|aprile|maggio|giugno|luglio|settembre|ottobre|dicembre"
    r"|janeiro|fevereiro|mar\u00e7o|maio|junho|julho|setembro|outubro|novembro|dezembro)"
)
_WEEKDAY = r"(?:(?:Mon|Tue|Tues|Wed|Wednes|Thu|Thur|Thurs|Fri|Sat|Satur|Sun)(?:day)?\.?,?[ ]{1,2})"
_YEAR = r"(?:19|20)\d\d"
_DAY = r"(?:0?[1-9]|[12]\d|3[01])"
_MON = r"(?:0?[1-9]|1[0-2])"
_CLOCK = (
    r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-6]\d(?:[.,]\d{1,9})?)?(?:[ ]?[AaPp](?:[Mm]\b|\.[Mm]\.))?"
)
_ZONE = r"(?:[ ]?(?:Z\b|UTC\b|GMT\b|[A-Z]{3,4}T\b)?(?:[ ]?[+-]\d\d:?\d\d\b)?)"
# By their first character: a digit is not tried against names, nor a name against digits.
_NUMBER_DATE = (
    rf"(?:{_YEAR}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])"
    rf"|{_YEAR}/{_MON}/{_DAY}"
    rf"|(?:{_MON}/{_DAY}|{_DAY}/{_MON})/{_YEAR}"
    rf"|{_DAY}\.{_MON}\.{_YEAR}"
    rf"|{_YEAR}\u5e74{_MON}\u6708{_DAY}\u65e5"  # as Chinese and Japanese write it
    rf"|{_DAY}(?:\.|st|nd|rd|th)?[ -](?:of[ ]|de[ ])?(?:{_MONTH}|{_OTHER_MONTH})"
    rf"(?:[ ]de)?[ -,]{{1,2}}{_YEAR})"
)
_NAME_DATE = (
    rf"(?:{_WEEKDAY}?{_MONTH}[ ]{{1,2}}{_DAY}(?:st|nd|rd|th)?,?[ ]{_YEAR}"
    rf"|{_WEEKDAY}{_DAY}(?:st|nd|rd|th)?[ -](?:of[ ])?{_MONTH}[ -,]{{1,2}}{_YEAR})"
)
_DATE = rf"(?:(?=\d\d?\d?\d?[-/. snrt\u5e74])(?:{_NUMBER_DATE})|(?=[A-Z])(?:{_NAME_DATE}))"
_TIME_AFTER = rf"(?:T|,?[ ]{{0,2}}(?:at[ ]|um[ ]|\u00e0[ ])?){_CLOCK}{_ZONE}"
# ``Mon Nov 30 10:14:00 2026``, as C's ctime and many shells print it.
_CTIME = rf"{_WEEKDAY}?{_MONTH}[ ]{{1,2}}{_DAY}[ ]{_CLOCK}[ ](?:[A-Z]{{3,4}}[ ])?{_YEAR}"
_NUMBERED = r"(?:request|turn|message|attempt|iteration|invocation|call|query|visit|counter)"
_NAMED_ID = (
    r"(?:request|trace|span|session|correlation|conversation|transaction|message|run|chat)"
    r"[-_ ]?(?:id|uuid|token)|nonce|cache[-_ ]?bust(?:er)?"
)

_PATTERN = re.compile(
    rf"""(?<![A-Za-z0-9_./-])(?:
    (?P<uuid>[0-9A-Fa-f]{{8}}(?:-[0-9A-Fa-f]{{4}}){{3}}-[0-9A-Fa-f]{{12}})
  | (?P<date>(?=[A-Z]){_CTIME}|{_DATE}(?P<time>{_TIME_AFTER})?)
  | (?=["'A-Za-z])(?:
        (?i:time|now|clock)(?:[ ]is)?[:=]?[ ]{{0,2}}(?P<clock>{_CLOCK}{_ZONE})
      | ["']?(?i:timestamp|epoch|unixtime|unix[_ ]time)["']?[ ]?[:=][ ]?
        (?P<epoch>1\d{{9}}(?:\d{{3}}|\.\d{{1,9}})?)
      | (?i:{_NUMBERED})(?:[ ](?i:number|no\.|count))?[ ]?(?:[:=][ ]?\#?|\#)(?P<number>\d{{1,12}})
        (?![.,]?\d)
      | (?i:{_NUMBERED})[ ](?P<number_of>\d{{1,9}}(?:[ ]of[ ]|/)\d{{1,9}})(?![.,]?\d)
      | ["']?(?i:{_NAMED_ID})["']?[ ]?[:=\#][ ]?["']?(?P<named>[A-Za-z0-9][A-Za-z0-9_-]{{5,63}}))
  | (?P<token>[A-Za-z0-9][A-Za-z0-9_+=-]{{{_MIN_RANDOM_CHARS - 1},127}})
    )(?![A-Za-z0-9_-]|/\w)""",
    re.VERBOSE,
)
_DIGITS = re.compile("[0-9]+")
# A per-request line that coding agents put first in a block of system text.
_HEADER = re.compile(r"^x-[a-z]{1,32}-(?:billing|attribution)-header:[^\n]{0,1024}", re.MULTILINE)
_GROUPS: tuple[tuple[str, Kind], ...] = (
    ("uuid", "uuid"),
    ("clock", "datetime"),
    ("epoch", "datetime"),
    ("number", "counter"),
    ("number_of", "counter"),
)
_LETTERS = re.compile(r"[^\W\d_]")
_DIGIT = re.compile(r"\d")


@dataclass(frozen=True, slots=True)
class Volatile:
    """One span of text that probably changes.

    Attributes:
        kind: What it looks like.
        start_char: First character, in the text that was searched.
        end_char: One behind the last.
        text_hint: Its shape, never its value; at most 48 characters.
    """

    kind: Kind
    start_char: int
    end_char: int
    text_hint: str


def find_volatile(
    text: str, *, max_spans: int = MAX_SPANS, max_look_chars: int = MAX_LOOK_CHARS
) -> list[Volatile]:
    """Return the volatile spans of a text in order, disjoint, the first ``max_spans`` of them.

    Pure. About 25 us per KB of prose, up to 1 ms per KB of lone digits until ``max_look_chars`` of
    such text were looked at.
    """
    spans: list[Volatile] = []
    if max_spans < 1:
        return spans
    headers = [(m.start(), m.end()) for m in _headers(text, max_spans)]
    for start, end in _outside(headers, len(text)):
        for kind, begin, stop in _near_digits(text, start, end, max_look_chars):
            spans.append(_span(text, kind, begin, stop))
            if len(spans) >= max_spans:
                break
        if len(spans) >= max_spans:
            break
    spans += [_span(text, "attribution_header", start, end) for start, end in headers]
    spans.sort(key=lambda span: span.start_char)
    return spans[:max_spans]


def skip_volatile(text: str, *, max_look_chars: int = MAX_LOOK_CHARS) -> str:
    """Return a text with each volatile span replaced by its kind: equal where only those differ."""
    spans = find_volatile(text, max_look_chars=max_look_chars)
    if not spans:
        return text
    parts = []
    at = 0
    for span in spans:
        parts += [text[at : span.start_char], f"\0{span.kind}\0"]
        at = span.end_char
    return "".join([*parts, text[at:]])


def _headers(text: str, max_spans: int) -> list[re.Match[str]]:
    if "-header:" not in text:  # spares nearly every text the pass
        return []
    return [m for m, _ in zip(_HEADER.finditer(text), range(max_spans), strict=False)]


def _outside(spans: list[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    at = 0
    for start, end in spans:
        yield at, start
        at = end
    yield at, length


def _near_digits(
    text: str, start: int, end: int, max_look_chars: int
) -> Iterator[tuple[Kind, int, int]]:
    """Search around digits only: nothing volatile but a header is without any."""
    for low, high in _windows(text, start, end, max_look_chars):
        for match in _PATTERN.finditer(text, low, high):
            found = _classify(match)
            if found is not None:
                yield found


def _windows(text: str, start: int, end: int, max_look_chars: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches around digits, as far as a match can reach; disjoint."""
    low = high = start
    for digits in _DIGITS.finditer(text, start, end):
        begin = digits.start() - _REACH_CHARS
        if begin > high:
            if high > low:
                yield low, high
                max_look_chars -= high - low
            low = begin
        high = min(end, digits.end() + _REACH_CHARS)
        if high - low >= max_look_chars:
            break
    if high > low:
        yield low, min(high, low + max_look_chars)


def _classify(match: re.Match[str]) -> tuple[Kind, int, int] | None:
    if match.start("date") >= 0:
        is_clock = match["time"] is not None or ":" in match["date"]
        return "datetime" if is_clock else "date", match.start(), match.end()
    for group, kind in _GROUPS:
        if match.start(group) >= 0:
            return kind, match.start(group), match.end(group)
    group = "named" if match["named"] is not None else "token"
    found = _token_kind(match[group], is_named=group == "named")
    return (found, match.start(group), match.end(group)) if found else None


def _token_kind(token: str, *, is_named: bool) -> Kind | None:
    """Say what a token of letters and digits is: an id if it says so or looks drawn at random."""
    num_digits = sum(char.isdigit() for char in token)
    if is_named and num_digits:
        if num_digits == len(token):
            return "counter"
        return "hex_id" if _is_hex(token) else "random"
    if num_digits < 3 or num_digits == len(token):
        return None
    if _is_hex(token) and len(token) >= _MIN_HEX_CHARS:
        return "hex_id"
    # Behind the last separator: ``req_011CS...``, ``session-9f8...``.
    core = max(re.split(r"[_=+-]", token), key=len)
    if len(core) < _MIN_RANDOM_CHARS or sum(char.isdigit() for char in core) < 3:
        return None
    # A capital before small letters starts a word.
    changes = sum(
        _class(a) != _class(b) and not (a.isupper() and b.islower()) for a, b in pairwise(core)
    )
    return "random" if changes >= _MIN_CHANGE_RATIO * (len(core) - 1) else None


def _is_hex(token: str) -> bool:
    return all(char in "0123456789abcdefABCDEF" for char in token)


def _class(char: str) -> int:
    return 0 if char.isdigit() else 1 if char.isupper() else 2


def _span(text: str, kind: Kind, start: int, end: int) -> Volatile:
    value = text[start:end]
    if kind in ("datetime", "date"):
        hint = _LETTERS.sub("x", _DIGIT.sub(".", value))[:48]
    else:
        hint = f"{kind} of {len(value)} characters"
    return Volatile(kind, start, end, hint)
