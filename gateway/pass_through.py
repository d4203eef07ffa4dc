"""Which paths may be configured to be passed on to workers, and which never are."""

from __future__ import annotations

import re

# Last parts of paths by which engines are administered or looked into (vLLM, SGLang, llama.cpp).
ADMINISTRATION = re.compile(
    r"/(?:(?:un)?load_lora_adapter|lora[_-]adapters|reset_\w+_cache|flush_cache|clear_hicache\w*"
    r"|sleep|wake_up|is_sleeping|(?:start|stop)_profile|collective_rpc|update_\w*weights\w*"
    r"|init_weights\w*|(?:release|resume)_memory_occupation|abort_request|set_internal_state"
    r"|pause\w*|continue_generation|shutdown|slots|props|admin|server_info|get_\w+|metrics)(?:/|$)"
)

_PLAIN = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")


def is_plain_path(path: str) -> bool:
    """Whether a path reads the same for everybody: no escapes, no steps up, no empty parts."""
    return _PLAIN.fullmatch(path) is not None


def check_pass_through(path: str) -> str:
    """Return a configured path if it may be passed on.

    Raises:
        ValueError: If it is no path of an API, or administers engines.
    """
    if not is_plain_path(path.removesuffix("/*")):
        raise ValueError(f"expected a path such as /v1/pooling or /v1/images/*, got {path!r}")
    if ADMINISTRATION.search(path) or path.startswith(("/admin", "/health", "/console")):
        raise ValueError(f"{path!r} administers engines or this gateway and is never passed on")
    return path
