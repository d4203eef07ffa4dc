from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warmup.fake_gateway import FakeGateway

FRAME = """
frame:
  system: "Answer from this document:\\n\\n{document}"
  messages:
    - {role: user, content: "{question}"}
"""


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    fake = FakeGateway()
    yield fake
    fake.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a manifest of four documents, ``a.md`` to ``d.md``."""
    for name in "abcd":
        (tmp_path / f"{name}.md").write_text(f"All about {name}.\n" * 20)
    (tmp_path / "warm.yaml").write_text('model: m\ndocuments:\n  - glob: "*.md"\n' + FRAME)
    return tmp_path


@pytest.fixture(autouse=True)
def _handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands take SIGTERM for themselves; and no variable of the developer's counts."""
    for name in ("WARMLANE_ADMIN_TOKEN", "WARMLANE_GATEWAY"):
        monkeypatch.delenv(name, raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
