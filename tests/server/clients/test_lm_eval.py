"""lm-eval with its `local-completions` gives the scores that fastinfer computes by itself.

The tasks and their data are written here, because lm-eval's own come from a hub.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.served import Served

from fastinfer import LLM

lm_eval = pytest.importorskip("lm_eval")

QUESTIONS = [
    ("The capital of France is", ["Paris", "London", "green"], 0),
    ("Two plus two is", ["seven", "four", "a river"], 1),
    ("Grass is", ["green", "square", "Tuesday"], 0),
    ("Water freezes at zero degrees", ["Celsius", "bananas", "o'clock"], 0),
    ("The opposite of hot is", ["warm", "cold", "spoon"], 1),
    ("The sun rises in the", ["west", "night", "east"], 2),
    ("A dog is an", ["animal", "number", "ocean"], 0),
    ("Shakespeare wrote", ["Hamlet", "software", "the Iliad"], 0),
]
TEXT = (
    "The kettle had been on the stove since morning, and nobody had thought to take it off. Steam drew pictures on "
    "the window that no one looked at. When the door opened at last, the cat left through it, slowly, like somebody "
    "who has waited for a train and been told that there are no more trains today. Outside it had begun to snow."
)
TASKS = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_text": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{beginning}}",
        "doc_to_target": "{{rest}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity"}],
    },
}


@pytest.fixture(scope="module")
def results(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of `simple_evaluate` for both tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = [dict(zip(("question", "choices", "answer"), row, strict=True)) for row in QUESTIONS]
    (folder / "local_choice.json").write_text(json.dumps(documents))
    (folder / "local_text.json").write_text(json.dumps([{"beginning": "The", "rest": TEXT.removeprefix("The")}]))
    for name, task in TASKS.items():
        fields = {"task": name, "dataset_path": "json", "test_split": "train", **task}
        fields["dataset_kwargs"] = {"data_files": str(folder / f"{name}.json")}
        (folder / f"{name}.yaml").write_text(json.dumps(fields))  # which is YAML
    arguments = {
        "model": served.model,
        "base_url": f"{served.base}/completions",
        "tokenizer_backend": "remote",
        "auth_token": served.key,  # for the tokenizer; requests take OPENAI_API_KEY
        "max_length": 1024,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", served.key)
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        return lm_eval.simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=list(TASKS),
            task_manager=lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
            log_samples=True,
        )


def test_choices(results: Any) -> None:
    llm = LLM(max_model_len=256)
    num_right = 0
    for sample in results["samples"]["local_choice"]:
        question, choices = sample["doc"]["question"], sample["doc"]["choices"]
        scores = [score.logprob for score in llm.score([(question, f" {choice}") for choice in choices])]
        found = [float(answer[0][0]) for answer in sample["resps"]]
        assert found == pytest.approx(scores, abs=1e-3)
        num_right += scores.index(max(scores)) == sample["doc"]["answer"]
    assert results["results"]["local_choice"]["acc,none"] == num_right / len(QUESTIONS)
    assert num_right > len(QUESTIONS) / 2


def test_perplexity(results: Any, served: Served, tmp_path: Path) -> None:
    """The same number as `fastinfer eval perplexity`, where the text is one section."""
    [sample] = results["samples"]["local_text"]
    text = tmp_path / "text"
    text.write_text(TEXT)
    num_tokens = len(LLM(max_model_len=256).tokenizer.encode(TEXT))
    command = [sys.executable, "-m", "fastinfer", "eval", "perplexity", served.model, "--text", str(text), "--json"]
    printed = subprocess.run([*command, "--context", str(num_tokens)], capture_output=True, text=True, check=True)
    expected = json.loads(printed.stdout)
    assert expected["tokens"] == num_tokens
    found = math.exp(-float(sample["resps"][0][0][0]) / (num_tokens - 1))
    assert found == pytest.approx(expected["perplexity"], rel=1e-4)
