"""Bar chart of the results of bench_peers.py: ``python plot.py RESULTS.json CHART.png``."""

import json
import sys
from pathlib import Path
from typing import Any

PANELS = {
    "decode": "Decode, 1 request, tokens/s",
    "prefill": "Prefill of {prompt_tokens:,}, tokens/s",
    "long_prefill": "Prefill of {prompt_tokens:,}, tokens/s",
    "batch": "{requests} requests at once, tokens/s",
}
OURS, PEER = "C0", "0.75"


def plot(results: dict[str, Any], path: Path) -> Path:
    """Draw bars of every engine, ours first and in colour; results are as in the JSON file."""
    from matplotlib.figure import Figure

    names = list(results["engines"])[::-1]  # horizontal bars are drawn from the bottom
    figure = Figure(figsize=(12, 1.2 + 0.33 * len(names)), layout="constrained")
    cpu, threads = results["machine"]["cpu"]["name"], results["settings"]["threads"]
    figure.suptitle(f"{Path(results['settings']['model']).name} on {cpu}, {threads} thread{'s' * (threads > 1)}")
    for axes, (workload, title) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        speeds = [results["engines"][name]["tokens_per_s"][workload] for name in names]
        bars = axes.barh(names, speeds, color=[OURS if name == "fastinfer" else PEER for name in names])
        axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3)
        axes.set_title(title.format(**results["settings"]["workloads"][workload]), fontsize="medium")
        axes.set_xlim(0, 1.25 * max(speeds))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    print(plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])))
