"""The sample applications run, and do what their texts say."""

import json
import re
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.families import make_model
from support.hf_tokenizers import byte_level, save
from support.paths import DATA, ROOT
from support.scripts import load_script

from fastinfer import LLM
from fastinfer.distill.run import distill

pytestmark = pytest.mark.slow


def example(name: str) -> ModuleType:
    return load_script(f"examples/{name}.py")


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "examples").glob("*.py")))
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        example(name).main(["--help"])
    assert end.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_chat(model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    questions = iter(["Hello!", "word " * 200, *(f"Tell me number {i}, please." for i in range(8))])

    def ask(prompt: str) -> str:
        if (question := next(questions, None)) is None:
            raise EOFError
        return question

    monkeypatch.setattr("builtins.input", ask)
    arguments = ["--model", str(model_path), "--window", "200", "--max-tokens", "16"]
    example("chat").main([*arguments, "--system", "You know all numbers, and you like to talk about them. " * 3])
    output = capsys.readouterr().out
    assert output.count("prompt must be shorter than max_model_len=200 tokens") == 1
    turns = [tuple(map(int, counts)) for counts in re.findall(r"\[(\d+) of (\d+) prompt tokens", output)]
    assert len(turns) == 9
    assert all(total <= 200 - 16 for _, total in turns)
    lengths = [total for _, total in turns]
    assert 1 <= sum(later < earlier for earlier, later in pairwise(lengths)) <= 4  # it rolled
    assert all(cached >= 32 for cached, _ in turns[1:])  # the system prompt at least
    assert sum(cached for cached, _ in turns[1:]) > sum(lengths[1:]) // 2


def test_the_window_keeps_the_newest_turns(model_path: Path) -> None:
    chat = example("chat")
    llm = LLM(str(model_path), max_model_len=512)
    system = [{"role": "system", "content": "Be brief."}]
    turns = [{"role": role, "content": f"{i} and more"} for i in range(10) for role in ("user", "assistant")][:-1]
    total = chat.num_tokens(llm, system + turns)
    assert chat.roll(llm, system, turns, total) == turns
    kept = chat.roll(llm, system, turns, total - 1)
    assert kept == turns[-len(kept) :]
    assert kept[0]["role"] == "user"
    assert chat.num_tokens(llm, system + kept) <= total // 2 < chat.num_tokens(llm, system + turns[-len(kept) - 2 :])
    assert chat.roll(llm, system, turns, 1) == turns[-1:]


def test_summarize(model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text.txt"
    file.write_text((DATA / "license.txt").read_text()[:4000] + "<|im_end|>")
    example("summarize").main([str(file), "--model", str(model_path), "--part-tokens", "256"])
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{file}:\n")
    assert len(captured.out.split()) > 10
    rounds = re.findall(r"(\d+) part\(s\), (\d+) of (\d+) prompt tokens", captured.err)
    assert [int(parts) for parts, _, _ in rounds][-1] == 1
    assert len(rounds) == 2
    assert all(int(cached) >= 32 * int(parts) for parts, cached, _ in rounds)


def test_parts_join_to_the_text(model_path: Path) -> None:
    summarize = example("summarize")
    tokenizer = LLM(str(model_path), max_model_len=64).tokenizer
    text = (DATA / "license.txt").read_text()
    parts = list(summarize.cut(tokenizer, text, 100))
    assert "".join(tokenizer.decode(part) for part in parts) == text
    assert max(map(len, parts)) <= 100
    assert all(tokenizer.decode(part).rstrip(" ").endswith("\n") for part in parts[:-1])
    without_lines = list(summarize.cut(tokenizer, "x" * 1000, 64))
    assert {len(part) for part in without_lines[:-1]} == {64}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers saves it: a random Llama and a tokenizer."""
    folder = tmp_path_factory.mktemp("examples") / "model"
    make_model("llama2", vocab_size=420).save_pretrained(folder)
    save(folder, byte_level())
    return folder


def test_faster_transformers(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # for this process has other tests to run
    example("faster_transformers").main([str(tiny_model)])
    output = capsys.readouterr().out
    assert "replaced 4 LlamaAttention -> Attention (int4)" in output
    assert re.search(r"\d tokens/s before, [\d.]+ after\n$", output)


def test_tiny_decoder(tiny_model: Path) -> None:
    """Against transformers, token by token, and logit by logit."""
    decoder, ids = example("tiny_decoder").TinyDecoder(tiny_model), [5, 300, 17, 17, 90]
    model = make_model("llama2", vocab_size=420)
    output = model.generate(torch.tensor([ids]), max_new_tokens=40, min_new_tokens=40, do_sample=False)
    assert decoder.generate(ids, 40) == output[0, len(ids) :].tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(decoder.forward(torch.tensor(ids), 0), expected, rtol=0, atol=1e-4)


def test_tiny_decoder_prints_the_prompt_and_what_follows(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("tiny_decoder").main([str(tiny_model), "Once upon", "--max-tokens", "5"])
    assert capsys.readouterr().out.startswith("Once upon")


def test_swap_kernels(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("swap_kernels").main([str(tiny_model), "4"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:30].strip() for line in lines] == [
        "transformers",
        "attention function and norms",
        "fused MLP",
        "fused attention and rotary",
        "int8 weights",
        "int4 weights",
    ]
    shares = [set(re.findall(r"(\w+) \d+%", line)) for line in lines]
    assert "paged_attention" not in shares[0]
    assert {"gemm", "int8_gemm", "int4_gemm"}.isdisjoint(shares[0])


def test_prompt_modules(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("prompt_modules").main(["--model", str(model_path)])
    counts = re.findall(r"(\d+) of (\d+) tokens cached", capsys.readouterr().out)
    cached = [int(count) for count, _ in counts]
    assert len(counts) == 8
    assert cached[0] == 0
    assert cached[4] > 100, "what the other season's prompts have, too"
    assert all(int(count) > 0.75 * int(total) for index, (count, total) in enumerate(counts) if index % 4)


def test_distill(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    clock = partial(next, count(0.0, 10.0))  # a few steps on any machine
    monkeypatch.setattr("fastinfer.cli.distill.distill", partial(distill, clock=clock))
    options = ["--teacher", str(tiny_model), "--student", "layers:0", "--loss", "ce", "--minutes", "1"]
    assert example("distill").main([str(tmp_path), *options]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-2:] == [str(tmp_path / "report.png"), str(tmp_path / "model")]
    assert re.search(r"distill 100% \|.*\| [\d.]+ of 1 min, loss on unseen text [\d.]+", captured.err)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["points"][-1]["num_tokens"] > 0
    assert list(report["tokens_per_s"]) == ["teacher", "student", "teacher, student as draft"]
    assert (tmp_path / "report.png").stat().st_size > 1000
    train, unseen = ((tmp_path / name).read_text() for name in ("train.txt", "unseen.txt"))
    assert len(train) > 10 * len(unseen) > 100_000
    assert not set(train.split("\n\n")) & set(unseen.split("\n\n"))


def test_sparse_attention(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("What comes next is " * 40)
    options = ["--model", str(tiny_model), "--context", "200", "--share", "0.5", "--max-tokens", "4"]
    example("sparse_attention").main([str(tmp_path / "text.txt"), *options])
    names = re.findall(r"^\[(.*): prompt [\d.]+ s, [\d.]+ ms per token\]$", capsys.readouterr().out, re.MULTILINE)
    assert names == ["dense", "sparse, 0.5 of the attention"]
