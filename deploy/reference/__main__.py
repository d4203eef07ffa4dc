"""Write the pages anew: ``python -m deploy.reference``."""

from __future__ import annotations

from deploy.reference.pages import FOLDER, rendered


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (FOLDER / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
