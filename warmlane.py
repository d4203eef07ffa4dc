"""The ``warmlane`` command: dispatches to the package that owns a subcommand, by name only.

The packages never import each other; this module imports none of them until one is asked for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys

OWNERS = {
    "serve": "gateway",
    "demo": "gateway",
    "explain": "gateway",
    "doctor": "gateway",
    "workers": "gateway",
    "replay": "gateway",
    "bench": "gateway",
    "config": "gateway",
    "runner": "runner",
    "warmup": "warmup",
}

# What only the extra `runner` installs; the gateway alone does without.
RUNNER_EXTRA = {"numpy", "safetensors", "torch"}

USAGE = """usage: warmlane COMMAND [OPTIONS]

  serve      run the gateway
  runner     run a bundled engine (needs the extra `runner`)
  demo       two bundled engines and the gateway, with a short real workload
  explain    say where a request would go, and why
  doctor     say what costs prefix hits; --checklist to go live, --bundle for support
  workers    list, add, drain or remove workers of a running gateway
  warmup     make documents warm before their users come, and prove it
  replay     play a trace or a decision log on a simulated fleet, and compare policies
  bench      send questions about documents and say what clients see
  config     check, show or describe the configuration

`warmlane COMMAND --help` tells more; `warmlane --version` prints the version.
"""


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; return its exit code (2 for a usage error)."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "help"):
        (sys.stdout if args else sys.stderr).write(USAGE)
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        build = " (compiled)" if _is_compiled() else ""
        sys.stdout.write(f"warmlane {importlib.metadata.version('warmlane')}{build}\n")
        return 0
    owner = OWNERS.get(args[0])
    if owner is None:
        sys.stderr.write(f"warmlane: unknown command {args[0]!r}\n\n{USAGE}")
        return 2
    # The runner is one command and the warm-up has an app of its own; the gateway has several and
    # reads the name itself.
    rest = args[1:] if owner in ("runner", "warmup") else args
    try:
        entry = importlib.import_module(f"{owner}.__main__")
        return int(entry.main(rest) or 0)
    except ModuleNotFoundError as error:
        if owner != "runner" or error.name not in RUNNER_EXTRA:
            raise
        sys.stderr.write(
            f"warmlane: the bundled engine needs {error.name}, which comes with the extra "
            "`runner`: pip install '.[runner]'\n"
        )
        return 1


def _is_compiled() -> bool:
    """Whether this is a build with the hot path in machine code; one of its modules tells."""
    spec = importlib.util.find_spec("gateway.routing.choose")
    return spec is not None and not (spec.origin or "").endswith(".py")


if __name__ == "__main__":
    sys.exit(main())
