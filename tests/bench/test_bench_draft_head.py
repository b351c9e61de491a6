"""The benchmark of draft heads, on a random one."""

from argparse import Namespace
from pathlib import Path

from bench_draft_head import DRAFTS, measure
from support.eagle_heads import random_head, write_speculators
from support.tiny_folder import write_tiny_folder


def test_all_numbers_of_drafts_are_measured_on_the_held_out_prompts(tmp_path: Path) -> None:
    model = write_tiny_folder(
        tmp_path / "model", "llama2", sizes={"num_hidden_layers": 7, "max_position_embeddings": 512}
    )
    head = write_speculators(tmp_path / "head", random_head())
    data = tmp_path / "prompts.txt"
    data.write_text("".join(f"message {number}\n" for number in range(32)))
    results = measure(Namespace(model=str(model), head=head, data=data, prompts=24, max_tokens=4, clock="cpu"))
    assert [case["drafts"] for case in results] == [0, *DRAFTS]
    assert all(len(case["seconds"]) == 2 for case in results)
