"""Write the dashboards into the chart: ``python -m deploy.dashboards``."""

from __future__ import annotations

from deploy.dashboards.files import FOLDER, rendered


def main() -> None:
    """Write every file anew."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
