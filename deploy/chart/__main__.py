"""``python -m deploy.chart``: writes the chart's schema and README table anew."""

from __future__ import annotations

from deploy.chart.readme import README, with_table
from deploy.chart.schema import SCHEMA, schema_text


def main() -> None:
    """Write both files in place."""
    SCHEMA.write_text(schema_text(), "utf-8")
    README.write_text(with_table(README.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
