"""Bar chart of the results of bench_peers.py: ``python plot.py RESULTS.json CHART.png``."""

import json
import sys
from pathlib import Path
from typing import Any

PANELS = {
    "decode": "Decode, 1 request",
    "prefill": "Prompt of {prompt_tokens:,} tokens",
    "long_prefill": "Prompt of {prompt_tokens:,} tokens",
    "batch": "{requests} requests at once",
}
OURS, PEER = "C0", "0.75"


def plot(results: dict[str, Any], path: Path) -> Path:
    """Draw bars of every engine, ours first and in colour; results are as in the JSON file."""
    from matplotlib.figure import Figure

    names = list(results["engines"])[::-1]  # horizontal bars are drawn from the bottom
    figure = Figure(figsize=(9, 1.4 + 0.3 * len(names)), layout="constrained")
    cpu, settings = results["machine"]["cpu"], results["settings"]
    threads = f"{settings['threads']} thread{'s' * (settings['threads'] > 1)}"
    cpu_name = cpu["name"].replace("(R)", "").replace(" Processor", "")
    figure.suptitle(f"{Path(settings['model']).name} on {cpu_name} ({cpu['isa']}), {threads}", fontsize="medium")
    medians = f"medians of {settings['rounds']} rounds"
    command = f"bench/bench_peers.py --threads {settings['threads']}, {medians}, {results['date'][:10]}"
    figure.supxlabel(command, fontsize="small", color="0.4")
    for axes, (workload, title) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        speeds = [results["engines"][name]["tokens_per_s"][workload] for name in names]
        bars = axes.barh(names, speeds, color=[OURS if name == "fastinfer" else PEER for name in names])
        axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3)
        axes.set_title(title.format(**settings["workloads"][workload]), fontsize="medium")
        axes.set_xlabel("tokens/s")
        axes.set_xticks([])  # the bars have their values
        axes.set_xlim(0, 1.5 * max(speeds))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    print(plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])))
