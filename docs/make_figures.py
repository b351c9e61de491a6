"""Draws every figure of the documentation: ``make figures``, or ``python docs/make_figures.py [KIND ...]``.

plots     charts of the measurements in bench/results (matplotlib)
diagrams  the Mermaid blocks of the pages as SVG, for pages that are read offline (npx and a Chromium)
demo      the terminal pictures: runs ``fastinfer`` on this machine and records what it prints
page      pictures of the chat page, with an answer of tests/support/fake_openai.py (Debian's chromium-driver)
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from terminal_picture import Recording, draw

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "bench/results"
FIGURES = DOCS / "figures"
sys.path[:0] = [str(DOCS.parent / "bench"), str(DOCS.parent / "tests")]

Results = dict[str, Any]
BLUE, GREY, ORANGE = "#1f77b4", "0.75", "#ff7f0e"

DEMO = [["generate", "Give me three tips for staying healthy.", "--temperature", "0"], ["info"]]
DIAGRAM = re.compile(r"^```mermaid\n(?P<source>.*?)^```$", re.MULTILINE | re.DOTALL)
MERMAID_CONFIG = {"theme": "neutral", "htmlLabels": False, "flowchart": {"wrappingWidth": 440, "rankSpacing": 30}}


def load(name: str) -> Results:
    return json.loads((RESULTS / name).read_text())


def describe_machine(results: Results) -> str:
    """Return CPU, instruction set, threads and date of a measurement, for the footer of its figure."""
    cpu = results["machine"]["cpu"]
    name = cpu["name"].replace("(R)", "").replace(" Processor", "")
    return f"{name}, {cpu['isa']}, {cpu['num_threads']} threads, {results['date'][:10]}"


# ---- plots ----


def plot_peers(path: Path) -> None:
    from peers.plot import plot

    plot(load("avx512/peers_again.json"), path)


def plot_throughput(path: Path) -> None:
    results = load("avx512/throughput_others.json")
    batch = results["results"]["batch"]
    sizes = batch["sizes"]
    labels = [str(size["batch_size"]) for size in sizes]
    figure, (rate, latency) = make_figure(2, results, "fastinfer bench throughput --only batch")
    rate.plot(labels, [median(size["tokens_per_s"]) for size in sizes], "o-", label="prefill included")
    rate.plot(labels, [median(size["decode_tokens_per_s"]) for size in sizes], "o-", label="while all requests decode")
    rate.set_ylabel("generated tokens/s")
    for percentile in ("50", "95", "99"):
        milliseconds = [1e3 * size["inter_token_s"][percentile] for size in sizes]
        latency.plot(labels, milliseconds, "o-", label=f"p{percentile}")
    latency.set_ylabel("time between tokens, ms")
    latency.set_yscale("log")
    for axes in (rate, latency):
        axes.set_xlabel("requests at once")
        axes.legend(frameon=False)
    rate.set_ylim(bottom=0)
    figure.suptitle(f"Requests of {batch['prompt_tokens']} prompt and {batch['new_tokens']} new tokens")
    figure.savefig(path, dpi=120)


def plot_speculation(path: Path) -> None:
    results = load("avx512/throughput_others.json")
    runs = results["results"]["ngram"]["alone"]
    names = [f"{'copies' if run['kind'] == 'copy-heavy' else 'new text'}, {run['name'].split()[1]}" for run in runs]
    pairs = [zip(run["plain_s"], run["speculative_s"], strict=True) for run in runs]
    gains = [median(plain / speculative for plain, speculative in pair) for pair in pairs]
    figure, (axes,) = make_figure(1, results, "fastinfer bench throughput --only ngram", height=3.4)
    colours = [BLUE if run["kind"] == "copy-heavy" else GREY for run in runs]
    bars = axes.bar(names, gains, color=colours)
    axes.bar_label(bars, [f"{gain:.2f}" for gain in gains], padding=2)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_ylabel("decode speed,\ntimes that without speculation")
    axes.set_ylim(0, 1.15 * max(gains))
    axes.set_xlabel("prompt")
    figure.savefig(path, dpi=120)


def plot_transformers(path: Path) -> None:
    names = {
        "transformers": "transformers",
        "attention": "attention only",
        "modules": "replace(model)",
        "int8": "int8 weights",
        "int4": "int4 weights",
    }
    both = {dtype: load(f"transformers_{dtype}.json") for dtype in ("bf16", "fp32")}
    figure, panels = make_figure(2, both["bf16"], "python bench/bench_transformers.py --rounds 3")
    titles = {"decode": "Decode, 1 sequence", "prefill": "Prompt of 512 tokens"}
    for axes, (workload, title) in zip(panels, titles.items(), strict=True):
        for index, (dtype, results) in enumerate(both.items()):
            speeds = [median(s[workload] for s in results["samples"][f"{dtype} {name}"]) for name in names]
            places = [place + 0.4 * index - 0.2 for place in range(len(names))]
            bars = axes.barh(places, speeds, height=0.38, color=(BLUE, ORANGE)[index], label=dtype)
            axes.bar_label(bars, [f"{speed:.0f}" for speed in speeds], padding=3)
        axes.set_yticks(range(len(names)), names.values() if workload == "decode" else [])
        axes.invert_yaxis()
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("tokens/s")
        axes.margins(x=0.15)
    panels[1].legend(frameon=False, loc="center right")
    figure.savefig(path, dpi=120)


def plot_ablation(path: Path) -> None:
    names = {
        "none": "no KV cache, fp32",
        "batch": "static batch, no KV cache",
        "kv": "KV cache",
        "kv+batch": "KV cache, static batch",
        "continuous": "continuous batch",
        "int8": "+ int8 weights",
        "int4": "+ int4 weights",
        "prefix": "+ prefix cache",
        "speculation": "+ speculation",
    }
    results = load("ablation.json")
    runs = {key: results["rows"][key]["runs"] for key in names}
    speeds = [median(run["num_tokens"] / run["seconds"] for run in rows) for rows in runs.values()]
    memory = [max(run["peak_memory"] for run in rows) / 1e6 for rows in runs.values()]
    command = "fastinfer bench ablation --requests 12 --new-tokens 64 --repeats 1 --limit-seconds 30"
    figure, (rate, peak) = make_figure(2, results, command, height=4.2)
    draw_bars(rate, list(names.values()), speeds, "tokens/s", "{:.1f}", BLUE)
    draw_bars(peak, ["" for _ in names], memory, "peak memory, MB", "{:,.0f}", GREY)
    figure.savefig(path, dpi=120)


def plot_quantization(path: Path) -> None:
    results = load("quantization.json")
    command = "python bench/bench_quantization.py --methods rtn,gptq,awq,int8"
    figure, (axes,) = make_figure(1, results, command, height=4)
    nudges = {"gptq": (8, -12), "awq": (8, 4)}  # the two nearly coincide
    for result in results["results"]:
        name, place = result["model"], (result["bytes"] / 2**20, result["perplexity"])
        axes.plot(*place, "o", color=GREY if name == "bf16" else BLUE)
        axes.annotate(name, place, xytext=nudges.get(name, (8, 4)), textcoords="offset points")
    axes.set_xlabel("weight files, MiB")
    axes.set_ylabel("perplexity (lower is better)")
    axes.set_xlim(90, 290)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def plot_sparse_attention(path: Path) -> None:
    results = load("amx/sparse_attention.json")
    figure, (quality, speed) = make_figure(2, results, "python bench/bench_sparse_attention.py")
    cases = [case for case in results["quality"] if (case["block_size"], case["dtype"]) == (16, "float32")]
    labels = {"estimates and codes": "estimates, other pages by codes", "estimates": "estimates alone"}
    methods = (("estimates and codes", BLUE, "o-"), ("estimates", BLUE, "o--"), ("window", ORANGE, "o-"))
    for method, colour, style in (*methods, ("random", GREY, "o-")):
        own = sorted((100 * case["pages_read"], case["kl"]) for case in cases if case["method"] == method)
        quality.plot(*zip(*own, strict=True), style, color=colour, label=labels.get(method, method))
    quality.set_xlabel(f"pages read, % of {results['context']:,} tokens")
    quality.set_ylabel("KL from dense attention, nats (fp32)")
    quality.set_yscale("log")
    quality.set_ylim(bottom=1e-6)
    quality.legend(frameon=False)
    for name, cases, colour in (("decoding", results["steps"], BLUE), ("prompt", results["whole_prompts"], ORANGE)):
        for share, style in ((0.9, "o-"), (0.95, "o--")):
            chosen = [case for case in cases if (case["block_size"], case["share"]) == (16, share)]
            contexts, gains = [f"{case['context']:,}" for case in chosen], [case["speedup"] for case in chosen]
            speed.plot(contexts, gains, style, color=colour, label=f"{name}, {share} of the attention")
    speed.axhline(1, color="black", linewidth=0.8, linestyle=":")
    speed.set_xlabel("tokens before, or of the prompt")
    speed.set_ylabel("times dense")
    speed.legend(frameon=False)
    speed.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)


def plot_sparse_attention_settings(path: Path) -> None:
    results = load("amx/sparse_attention.json")
    figure, (axes,) = make_figure(1, results, "python bench/bench_sparse_attention.py")
    longest = max(case["context"] for case in results["steps"])
    speeds = {(c["block_size"], c["share"]): c["speedup"] for c in results["steps"] if c["context"] == longest}
    for block_size, colour in ((8, BLUE), (16, ORANGE), (32, GREY)):
        wanted = block_size, "estimates and codes", "float32"
        cases = [c for c in results["quality"] if (c["block_size"], c["method"], c["dtype"]) == wanted]
        places = sorted((speeds[block_size, case["share"]], case["kl"], case["share"]) for case in cases)
        axes.plot([gain for gain, *_ in places], [kl for _, kl, _ in places], "o-", color=colour)
        for gain, kl, share in places if block_size == 16 else ():
            axes.annotate(f"{share} of the attention", (gain, kl), (8, -10), textcoords="offset points")
        axes.plot([], [], "o-", color=colour, label=f"{block_size} tokens a page")
    axes.axhline(0.02, color="black", linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    axes.set_ylim(5e-5, 0.2)
    axes.set_xlim(1.6, 2.6)
    axes.set_xlabel(f"decode speed with {longest:,} tokens before, times dense")
    axes.set_ylabel(f"KL from dense attention, nats\n({results['context']:,} tokens, fp32)")
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=120)


def plot_draft_head(path: Path) -> None:
    results = load("draft_head.json")
    figure, (speed, drafts) = make_figure(2, results, "python bench/bench_draft_head.py")
    cases, training = results["results"], results["training"]
    bars = speed.bar([str(case["drafts"]) for case in cases], [case["speedup"] for case in cases], color=BLUE)
    labels = [f"{case['speedup']:.2f}" + (f"\n{case['accepted']:.0%}" if case["drafts"] else "") for case in cases]
    speed.bar_label(bars, labels, padding=2)
    speed.axhline(1, color="black", linewidth=0.8, linestyle="--")
    speed.set_ylim(0, 1.3 * max(case["speedup"] for case in cases))
    speed.set_xlabel("drafts at most (below the speed: accepted)")
    speed.set_ylabel("speed of greedy answers,\ntimes that without drafts")
    for index, (name, colour) in enumerate({"before": GREY, "after": BLUE}.items()):
        shares = [100 * share for share in training[name]]
        places = [place + 0.4 * index for place in range(len(shares))]
        bars = drafts.bar(places, shares, width=0.4, color=colour, label=f"{name} training")
        drafts.bar_label(bars, [f"{share:.0f}" for share in shares], padding=2)
    drafts.set_xticks(
        [place + 0.2 for place in range(len(training["after"]))], ["first draft", "second after a right one"]
    )
    drafts.set_ylabel("right on held-out prompts, %")
    drafts.set_ylim(0, 80)
    drafts.legend(frameon=False, loc="upper center", ncols=2)
    figure.savefig(path, dpi=120)


def plot_prompt_modules(path: Path) -> None:
    results = load("prompt_modules.json")
    figure, (quality, speed) = make_figure(2, results, "python bench/bench_prompt_modules.py")
    for block_size, colour in ((16, BLUE), (32, ORANGE)):
        own = [case for case in results["quality"] if case["block_size"] == block_size]
        cases = [(case["recomputed"], case["kl"]) for case in own if case["recomputed"].isdigit()]
        label = f"blocks of {block_size} tokens"
        quality.plot([name for name, _ in cases], [kl for _, kl in cases], "o-", color=colour, label=label)
        for new, style in (("text", "o-"), ("parameter", "o--")):
            times = [case for case in results["time"] if case["block_size"] == block_size and case["new"] == new]
            names = {"text": "text is new", "parameter": "parameter is new"}
            lengths, ratios = [str(case["module"]) for case in times], [case["ratio"] for case in times]
            speed.plot(lengths, ratios, style, color=colour, label=f"{block_size} tokens, {names[new]}")
    quality.set_xlabel("blocks of each module that are recomputed")
    quality.set_ylabel("KL from the whole prompt, nats")
    speed.axhline(0.1, color="black", linewidth=0.8, linestyle="--")
    speed.set_xlabel("tokens of each of three modules")
    speed.set_ylabel("time to first token, of the whole prompt")
    for axes in (quality, speed):
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def plot_distillation(path: Path) -> None:
    runs = [load(f"distillation/{file.name}") for file in sorted((RESULTS / "distillation").glob("*.json"))]
    command = "texts and layers of examples/distill.py, --minutes 6 of CPU time, --loss NAME"
    figure, (gap, accepted) = make_figure(2, runs[0], command)
    for results in runs:
        name = ",".join(results["settings"]["losses"])
        minutes = [point["seconds"] / 60 for point in results["points"]]
        gap.plot(minutes, [100 * point["gap_closed"] for point in results["points"]], "o-", label=name)
        accepted.plot(
            minutes, [100 * point["judgement"]["acceptance"] for point in results["points"]], "o-", label=name
        )
    gap.set_ylabel("loss gap to the teacher closed, %")
    accepted.set_ylabel("accepted as a draft, %")
    for axes in (gap, accepted):
        axes.set_xlabel("minutes of one thread's CPU time, loading included")
        axes.set_ylim(bottom=0)
        axes.legend(title="loss", frameon=False)
    figure.suptitle("SmolLM2 135M cut from 30 to 20 layers, on unseen text")
    figure.savefig(path, dpi=120)


def make_figure(panels: int, results: Results, command: str, height: float = 3.8) -> tuple[Any, Any]:
    """Make a figure with panels side by side, and the machine and command of its measurement at the bottom."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    figure.supxlabel(f"{describe_machine(results)}\n{command}", fontsize="small", color="0.4")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_bars(axes: Any, names: list[str], values: list[float], label: str, form: str, colour: str) -> None:
    """Draw horizontal bars in the order given, each with its value."""
    bars = axes.barh(range(len(names)), values, color=colour)
    axes.bar_label(bars, [form.format(value) for value in values], padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.margins(x=0.2)


PLOTS: dict[str, Callable[[Path], None]] = {
    "peers": plot_peers,
    "throughput": plot_throughput,
    "speculation": plot_speculation,
    "transformers": plot_transformers,
    "ablation": plot_ablation,
    "quantization": plot_quantization,
    "sparse-attention": plot_sparse_attention,
    "sparse-attention-settings": plot_sparse_attention_settings,
    "draft-heads": plot_draft_head,
    "prompt-modules": plot_prompt_modules,
    "distillation": plot_distillation,
}


def make_plots() -> None:
    for name, plot in PLOTS.items():
        plot(FIGURES / f"{name}.png")
        print(FIGURES / f"{name}.png")


# ---- diagrams ----


def diagram_title(source: str) -> str:
    """Return the ``accTitle`` of a Mermaid source, which also names its file."""
    match = re.search(r"^\s*accTitle: (.+)$", source, re.MULTILINE)
    if match is None:
        raise ValueError(f"a Mermaid diagram must have an accTitle, got {source[:60]!r}")
    return match[1].strip()


def diagram_path(source: str) -> Path:
    return FIGURES / (re.sub(r"\W+", "-", diagram_title(source).lower()) + ".svg")


def diagram_mark(source: str) -> str:
    """Return the comment at the end of a picture that says which source it was made from."""
    return f"<!-- source {hashlib.sha256(source.encode()).hexdigest()} -->"


def make_diagrams() -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    environment = (
        os.environ | {"PUPPETEER_SKIP_DOWNLOAD": "1"} | ({"PUPPETEER_EXECUTABLE_PATH": browser} if browser else {})
    )
    for page in sorted(DOCS.glob("*.md")):
        for match in DIAGRAM.finditer(page.read_text()):
            source, path = match["source"], diagram_path(match["source"])
            with tempfile.TemporaryDirectory() as folder:
                files = {name: Path(folder) / name for name in ("in.mmd", "config.json", "browser.json")}
                files["in.mmd"].write_text(source)
                files["config.json"].write_text(json.dumps(MERMAID_CONFIG))
                files["browser.json"].write_text(json.dumps({"args": ["--no-sandbox", "--disable-gpu"]}))
                command = ["npx", "--yes", "@mermaid-js/mermaid-cli", "--quiet", "-i", files["in.mmd"], "-o", path]
                command += ["-c", files["config.json"], "-p", files["browser.json"], "-b", "white"]
                subprocess.run(command, env=environment, check=True)
            path.write_text(path.read_text().rstrip() + diagram_mark(source) + "\n")
            print(path)


# ---- demo ----


def make_demo() -> None:
    recordings = []
    for arguments in DEMO:
        for _ in range(2):  # the first run warms the file cache
            done = subprocess.run(
                [sys.executable, "-m", "fastinfer", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
            )
        shown = " ".join(f'"{argument}"' if " " in argument else argument for argument in ["fastinfer", *arguments])
        recordings.append(Recording(shown, done.stdout))
    (FIGURES / "demo.svg").write_text(draw(recordings))
    print(FIGURES / "demo.svg")


PAGE_QUESTIONS = ["Plan three days in Lisbon", "Why is the sky blue?", "Proofread my cover letter"]
PAGE_REASONING = "Sorting the letters of a word gives the same key for all its anagrams. A dictionary collects them."
PAGE_ANSWER = '''This function groups words by their **sorted letters**:

```python
from collections import defaultdict

def anagrams(words: list[str]) -> list[list[str]]:
    """Group words that are made of the same letters."""
    groups = defaultdict(list)
    for word in words:  # O(n · k log k)
        groups["".join(sorted(word.lower()))].append(word)
    return [group for group in groups.values() if len(group) > 1]
```

1. `sorted(word)` is the same for all anagrams, so it is a good *key*.
2. Groups of one word are dropped.

| words | time | memory |
|---|--:|--:|
| 1,000 | 1.2 ms | 0.3 MB |
| 100,000 | 140 ms | 31 MB |
'''


def make_page() -> None:
    from support.browser import Browser
    from support.fake_openai import FakeOpenAI, text_answer

    server, browser = FakeOpenAI(), Browser(1280, 860)
    reasoning = {"delta": {"reasoning_content": PAGE_REASONING}}
    server.answer = lambda _: [0.3, reasoning, 0.8, *text_answer(PAGE_ANSWER, 12, 0.02, completion_tokens=231)]
    try:
        browser.open(server.url)
        browser.wait("document.querySelector('#model').options.length")
        for question in [*PAGE_QUESTIONS, "Write a Python function that finds anagrams"]:
            browser.click("#new")
            browser.type("#input", question)
            browser.press("Enter")
            browser.wait("document.querySelector('#stop').hidden && document.querySelector('.stats')")
        for name, width, height, scheme in (
            ("light", 1280, 860, "light"),
            ("dark", 1280, 860, "dark"),
            ("phone", 375, 760, "light"),
        ):
            browser.resize(width, height, scheme)
            browser.run("document.querySelector('#scroll').scrollTop = arguments[0]", 0 if name == "phone" else 1e6)
            browser.wait("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
            browser.screenshot(FIGURES / f"page-{name}.png")
            print(FIGURES / f"page-{name}.png")
    finally:
        browser.close()
        server.close()


KINDS = {"plots": make_plots, "diagrams": make_diagrams, "demo": make_demo, "page": make_page}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; default: all")
    kinds = parser.parse_args().kinds or [*KINDS]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"KIND must be one of {', '.join(KINDS)}, got {', '.join(unknown)}")
    FIGURES.mkdir(exist_ok=True)
    for kind in kinds:
        KINDS[kind]()


if __name__ == "__main__":
    main()
