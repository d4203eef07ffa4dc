"""Grafana dashboards as typed code; ``python -m deploy.dashboards`` writes them into the chart.

Nothing here is shipped in the package: the chart and compose mount the JSON files. Conventions of
all panels (units, legends, links, what an empty divisor shows) are in ``panels.py`` and
``board.py``, the PromQL in ``queries.py``, one file per dashboard holds the content.
"""
