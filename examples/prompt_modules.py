"""Answers questions by prompts of modules, and shows how long each first token took, cold and with the modules cached.

    python examples/prompt_modules.py

The schema is in ``prompt_modules.json``: texts about a hotel, one for each season, and a place for what is known of the
guest. The prompts follow the chat template of the default model.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from fastinfer import LLM, PromptSchema, SamplingParams
from fastinfer.hub import DEFAULT_MODEL

SEASONS = ("summer", "winter")
GUESTS = ("The guest is Ada, in room 7.\n", "The guest is Ben, who has a dog.\n")
QUESTIONS = ("When does the last boat return from the island?", "Until when can I have breakfast?")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Answer questions by prompts of modules.")
    parser.add_argument("--schema", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    args = parser.parse_args(argv)
    schema = PromptSchema.from_file(args.schema)
    llm = LLM(args.model, block_size=16)
    params = SamplingParams(temperature=0.0, max_tokens=40, stop="\n")
    for season, guest, question in itertools.product(SEASONS, GUESTS, QUESTIONS):
        prompt = schema.prompt(
            f"{question}<|im_end|>\n<|im_start|>assistant\n",
            modules=["role", "house", season, "rules"],
            parameters={"guest": guest},
        )
        [output] = llm.generate(prompt, params)
        metrics = output.metrics
        assert metrics.first_token_time is not None
        milliseconds = 1e3 * (metrics.first_token_time - metrics.arrival_time)
        cached = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens cached"
        print(f"[{season}, {milliseconds:.0f} ms to the first token, {cached}] {guest.strip()}")
        print(f"{question}\n{output.outputs[0].text.strip()}\n")


if __name__ == "__main__":
    main()
