"""``fastinfer bench step-cost``: the time of the engine's steps by their work, for ``fastinfer simulate``.

Method: random prompts of mixed lengths are decoded greedily, one request at once, then two, four and so on up to
``max_num_seqs``, and end-of-sequence is ignored. So prompts are computed with and without decoding sequences beside
them, and sequences decode in batches of all sizes, with short and long contexts. Prompts that arrive together share
steps, so short ones are also computed alone. The first pass is a warm-up. Times are those of the engine's statistics
of its steps.
"""

import argparse
import math
import random
from dataclasses import asdict
from pathlib import Path

from fastinfer.benchmarks.progress import Progress, show_progress, silent
from fastinfer.benchmarks.replay import Job, replay
from fastinfer.benchmarks.report import write_json
from fastinfer.engine.engine import Engine
from fastinfer.engine.stats import StepStats, StepWork
from fastinfer.errors import RequestError
from fastinfer.llm import LLM
from fastinfer.sampling_params import SamplingParams
from fastinfer.simulation.cost_file import CostFile, EngineLimits
from fastinfer.simulation.fit import Fit, fit
from fastinfer.simulation.generator import Lengths
from fastinfer.utils.table import format_table

MIN_PROMPT_TOKENS = 16
MAX_PROMPT_TOKENS = 2048
# Upper bound of a batch's prompt tokens, so that large batches take no longer than small ones.
BATCH_TOKENS = 4096
NEW_TOKENS = Lengths(8, 48)
ROUNDS = 2  # batches of each size in a pass
NUM_SHORT_PROMPTS = 8  # in a pass
SHORT_PROMPT_TOKENS = 128  # the longest of them
MAX_GAP_S = 0.002  # a longer time between two steps means that there was nothing to compute

Sample = tuple[StepWork, float]


class StepTimes:
    """Observer of an engine's steps: collects their work, and the time that each of them added.

    Attributes:
        samples: pairs of work and seconds.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._last_end = -math.inf

    def __call__(self, step: StepStats) -> None:
        # On a GPU a step begins before the last one ends; only the rest of its time counts. Otherwise the time between
        # them, in which outputs are delivered, belongs to the later one.
        end = step.start_time + step.seconds
        follows = step.start_time - self._last_end < MAX_GAP_S
        self.samples.append((step.work, end - self._last_end if follows else step.seconds))
        self._last_end = end


def run(args: argparse.Namespace) -> int:
    """Measure steps, print the fitted coefficients, and write the file if ``--out`` is given."""
    llm = LLM(args.model, **args.engine_options)
    limits = limits_of(llm.engine)
    with show_progress("step-cost") as progress:
        samples = measure(llm.engine, args.repeats, progress)
    fitted = fit(samples)
    print(f"{args.model}: {fitted.num_steps} steps, median error of the formula {fitted.median_error:.1%}")
    print(format_table(_rows(fitted)))
    if args.out is not None:
        costs = CostFile("measured", args.model, fitted.cost, limits)
        facts = {"num_steps": fitted.num_steps, "median_error": fitted.median_error, "repeats": args.repeats}
        print(write_json(Path(args.out) / "step_cost.json", {**costs.as_dict(), "fit": facts}))
    return 0


def limits_of(engine: Engine) -> EngineLimits:
    """Return the limits of an engine.

    Raises:
        RequestError: the model has layers with states, whose slots are not simulated.
    """
    config, manager = engine.config, engine.block_manager
    if manager.states is not None:
        raise RequestError("a simulation needs a model without layers that have states, such as linear attention")
    return EngineLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        block_size=config.block_size,
        num_blocks=tuple(pool.num_blocks for pool in manager.pools),
        windows=tuple(pool.window for pool in manager.pools),
        enable_prefix_caching=config.enable_prefix_caching,
        separates_roles=engine.scheduler.separates_roles,
    )


def measure(engine: Engine, repeats: int, progress: Progress = silent) -> list[Sample]:
    """Return the work and seconds of the steps of ``repeats`` passes. The module's docstring describes the method."""
    times, rng = StepTimes(), random.Random(0)
    for number in range(1 + repeats):
        engine.on_step = times if number else None
        run_pass(engine, rng, progress if number else _warm_up(progress))
    engine.on_step = None
    return times.samples


def _warm_up(progress: Progress) -> Progress:
    return lambda text: progress(f"{text}: warm-up")


def run_pass(engine: Engine, rng: random.Random, progress: Progress = silent) -> None:
    """Run the requests of one pass.

    Args:
        engine: engine without requests.
        rng: source of the prompts and their lengths, which are new in every pass: on a CPU a step with prompts is
            faster when its size occurs for the fourth time, which it rarely does in real traffic.
        progress: function that is called before each size of batches.

    Raises:
        RequestError: the engine's context is too short.
    """
    longest = min(MAX_PROMPT_TOKENS, engine.max_model_len - NEW_TOKENS.high)
    if longest < MIN_PROMPT_TOKENS:
        least = MIN_PROMPT_TOKENS + NEW_TOKENS.high
        raise RequestError(f"--context must be at least {least} to measure steps, got {engine.max_model_len}")
    progress("single requests")
    replay(engine, _jobs(engine, 1, Lengths(longest, longest), NEW_TOKENS, rng))
    for _ in range(NUM_SHORT_PROMPTS):
        short = Lengths(MIN_PROMPT_TOKENS, min(longest, SHORT_PROMPT_TOKENS))
        replay(engine, _jobs(engine, 1, short, Lengths(2, 2), rng))
    for batch in _batch_sizes(engine.config.max_num_seqs):
        progress(f"{batch} requests")
        prompts = Lengths(MIN_PROMPT_TOKENS, max(MIN_PROMPT_TOKENS, min(longest, BATCH_TOKENS // batch)))
        for _ in range(ROUNDS):
            replay(engine, _jobs(engine, batch, prompts, NEW_TOKENS, rng))


def _batch_sizes(max_num_seqs: int) -> list[int]:
    """Return 1, 2, 4 and so on up to ``max_num_seqs``."""
    sizes = [1]
    while sizes[-1] < max_num_seqs:
        sizes.append(min(2 * sizes[-1], max_num_seqs))
    return sizes


def _jobs(engine: Engine, count: int, prompts: Lengths, outputs: Lengths, rng: random.Random) -> list[Job]:
    """Return requests that arrive at once, with random prompts."""
    vocab = range(min(100, engine.vocab_size // 2), min(1000, engine.vocab_size))
    jobs = []
    for _ in range(count):
        params = SamplingParams(temperature=0, max_tokens=outputs.draw(rng), ignore_eos=True)
        jobs.append(Job(rng.choices(vocab, k=prompts.draw(rng)), params))
    return jobs


def _rows(fitted: Fit) -> list[list[str]]:
    """Return the table of coefficients, with its head."""
    units = {
        "step": "per step",
        "decode_sequence": "per decoding sequence",
        "prompt_sequence": "per chunk of a prompt",
        "prompt_token": "per token of a prompt",
        "decode_context": "per position that a decoding sequence attends to",
        "prompt_context": "per pair of a prompt's token and a position",
    }
    return [["", "µs"], *([units[name], f"{value * 1e6:.4g}"] for name, value in asdict(fitted.cost).items())]
