"""Hold the client port to its description: schemathesis against a gateway over a mock engine.

    python -m bench.fuzz_schema --schemathesis VENV/bin/schemathesis [--examples 50] [--seed 1]

The tool (``pip install schemathesis``, an environment of its own) makes up requests from
``tests/data/openapi.yaml``, valid and not. None may bring a status of 5xx, an answer in another
shape than described, or be let through without a key. The exit status is the tool's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fakes.engine import DONE, FINISH, ROLE, RawEngine, answer, content, stream, usage
from tests.gateway.tenancy_parts import KEYS, T1, serving

if TYPE_CHECKING:
    from tests.fakes.engine import Script, Seen

DESCRIPTION = Path(__file__).absolute().parent.parent / "tests" / "data" / "openapi.yaml"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,ignored_auth,unsupported_method,negative_data_rejection,"
    "positive_data_acceptance"
)
KEY = "key-t1"
# What an engine answers that has every path.
_ANSWER = {
    "id": "x",
    "model": "m",
    "choices": [{"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"}],
    "usage": usage(7, 1, 0),
    "input_tokens": 7,
    "count": 7,
}


def respond(seen: Seen) -> Script:
    """Answer whatever is asked."""
    if seen.method == "GET":
        return answer(b"{}")
    if seen.json().get("stream") is True:
        return stream(ROLE, content("ok"), FINISH, DONE)
    return answer(json.dumps(_ANSWER).encode())


async def run(schemathesis: str, examples: int, seed: int) -> int:
    """Run the tool; return its exit status."""
    os.environ.update(KEYS)
    # It leaves its reports where it runs.
    with tempfile.TemporaryDirectory() as folder:
        async with RawEngine(respond) as engine, serving(engine, tenants=[T1]) as gw:
            process = await asyncio.create_subprocess_exec(
                *(schemathesis, "run", str(DESCRIPTION), "--url", gw.url),
                *("--header", f"Authorization: Bearer {KEY}", "--max-examples", str(examples)),
                *("--seed", str(seed), "--workers", "1", "--phases", "examples,coverage,fuzzing"),
                *("--continue-on-failure", "--generation-database", "none", "--warnings", "off"),
                *("--checks", CHECKS),
                cwd=folder,
            )
            return await process.wait()


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--schemathesis", default="schemathesis", help="its command")
    parser.add_argument("--examples", type=int, default=50, help="for each operation")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    command = os.path.abspath(shutil.which(options.schemathesis) or options.schemathesis)
    sys.exit(asyncio.run(run(command, options.examples, options.seed)))


if __name__ == "__main__":
    main()
