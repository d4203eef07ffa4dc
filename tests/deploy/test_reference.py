"""The generated pages are current, and leave no key or command out."""

import pytest

from deploy.reference.pages import FOLDER, rendered
from gateway.config import Settings
from warmlane import OWNERS

PAGES = rendered()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_page_is_what_the_code_says(name: str) -> None:
    assert (FOLDER / name).read_text("utf-8") == PAGES[name], "run python -m deploy.reference"


def test_every_key_of_the_configuration_has_a_meaning() -> None:
    schema = Settings.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for key, value in section["properties"].items():
            row = next(line for line in PAGES["config.md"].splitlines() if f"| `{key}` |" in line)
            is_section = "$ref" in value
            assert value.get("description") or is_section, key
            assert row.rsplit("|", 2)[1].strip(), key


def test_every_command_is_there() -> None:
    for command in OWNERS:
        assert f"## warmlane {command}" in PAGES["cli.md"], command
