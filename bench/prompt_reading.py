"""What reading a prompt costs: ``python bench/prompt_reading.py [models/smollm2]``.

Prints, per prompt, the median microseconds of rendering, of finding and completing a known prompt
after rendering, of reading it for the first time, and of hashing and matching its blocks.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prefix_index import ChatTemplate, Index, PromptReader, PromptTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BLOCK_SIZE = 16
NUM_WORKERS = 16
ROUNDS = 300
TEXT = "Rule 7: refunds are accepted within thirty days of delivery, in the same box, please. "


def median_us(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median duration of one call in microseconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def chat(num_bytes: int, num_messages: int) -> dict[str, list[dict[str, str]]]:
    """Return a chat body with about this many bytes of text."""
    share = num_bytes // num_messages
    roles = ["system", *(["user", "assistant"] * num_messages)][:num_messages]
    return {
        "messages": [
            {"role": role, "content": (f"{at}: " + TEXT * (share // len(TEXT) + 1))[:share]}
            for at, role in enumerate(roles)
        ]
    }


class Rendered:
    """What renders nothing: the text is at hand, to time what comes after it."""

    def render(self, body: Mapping[str, str]) -> str:
        """Return the text itself."""
        return body["text"]


def main() -> None:
    """Measure and print one line per prompt."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "models/smollm2")
    tokenizer = PromptTokenizer.from_dir(folder)
    assert tokenizer.template_source is not None
    template = ChatTemplate(tokenizer.template_source, special_tokens=tokenizer.special_tokens)
    print("bytes messages tokens | render  known  first  match   (median us)")
    for num_bytes, num_messages in ((1_000, 2), (32_000, 2), (32_000, 16), (128_000, 64)):
        print(measure(tokenizer, template, chat(num_bytes, num_messages)))


def measure(
    tokenizer: PromptTokenizer, template: ChatTemplate, body: dict[str, list[dict[str, str]]]
) -> str:
    """Return the line of one prompt."""
    text = template.render(body["messages"])
    reader = PromptReader(tokenizer, template, model="m", block_size=BLOCK_SIZE)
    start = time.perf_counter()
    prompt = reader.chat(body).complete()
    first_us = (time.perf_counter() - start) * 1e6
    reader._renderer = Rendered()
    known_us = median_us(lambda: reader.chat({"text": text}).complete())
    assert reader.chat({"text": text}).unknown_chars == 0
    index = Index(BLOCK_SIZE)
    for worker in range(NUM_WORKERS):
        index.store(f"w{worker}", prompt.block_hashes, prompt.root)
    render_us = median_us(lambda: template.render(body["messages"]))
    match_us = median_us(lambda: index.match(prompt.block_hashes))
    return (
        f"{len(text):6} {len(body['messages']):8} {prompt.num_tokens:6} |"
        f" {render_us:6.1f} {known_us:6.1f} {first_us:6.0f} {match_us:6.1f}"
    )


if __name__ == "__main__":
    main()
