"""The queries of Grafana's dashboard."""

import json
from collections.abc import Iterator

from support.paths import ROOT


def dashboard_queries() -> Iterator[str]:
    """Yield the queries of Grafana's dashboard, with values for its variables."""
    variables = {"$__rate_interval": "1m", "$model_name": ".*", "$instance": ".*"}
    for panel in json.loads((ROOT / "deploy/grafana/fastinfer.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"]
            for name, value in variables.items():
                query = query.replace(name, value)
            yield query
