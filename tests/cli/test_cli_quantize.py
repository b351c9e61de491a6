"""``fastinfer quantize`` and ``fastinfer eval`` on a folder with a tokenizer: what they write, print and refuse."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.families import make_model
from support.gguf_model_file import write_gguf
from support.hf_tokenizers import TEXT, byte_level, save

from fastinfer.cli.main import main
from fastinfer.errors import ModelNotFoundError, RequestError
from fastinfer.evaluation import comparison
from fastinfer.evaluation.perplexity import perplexity
from fastinfer.evaluation.text_file import read_sections
from fastinfer.models import load_model
from fastinfer.quantize.checkpoint import quantize_checkpoint
from fastinfer.quantize.methods import Method
from fastinfer.tokenizers.tokenizer import Tokenizer

Captured = pytest.CaptureFixture[str]
LENGTHS = ("--tokens", "128", "--context", "32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantize")
    make_model("llama2", vocab_size=420).save_pretrained(path / "model")
    save(path / "model", byte_level())
    (path / "one.txt").write_text("\n".join(TEXT * 8), encoding="utf-8")
    (path / "other.txt").write_text("\n".join(text[::-1] for text in TEXT * 8), encoding="utf-8")
    return path


def test_quantize_then_compare(folder: Path, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    model, out = str(folder / "model"), str(folder / "int8")
    texts = "--calibration", str(folder / "one.txt"), "--evaluation", str(folder / "other.txt")
    assert main(["quantize", model, "--method", "int8", *texts, *LENGTHS, "--out", out]) == 0
    captured = capsys.readouterr()
    assert re.search("int8, 128 tokens: 100%.* 4/4 ", captured.err)
    printed = captured.out.splitlines()
    assert printed[0].split() == ["layer", "relative", "error", "of", "outputs"]
    assert printed[-2].startswith("perplexity ")
    assert printed[-1] == out
    report = json.loads((folder / "int8" / "quantization_report.json").read_text())
    assert report["method"] == {"name": "int8", "bits": 8, "group_size": 64, "symmetric": True}
    assert abs(report["perplexity_after"] / report["perplexity_before"] - 1) < 0.02

    text = "--text", str(folder / "other.txt")
    assert main(["eval", "perplexity", out, *text, *LENGTHS, "--dtype", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"perplexity": pytest.approx(report["perplexity_after"]), "tokens": 128}

    assert main(["eval", "compare", model, out, *text, *LENGTHS, "--dtype", "float32", "--out", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[0] == model
    assert "100.00%" in lines[1]
    first, second = json.loads((folder / "compare.json").read_text())["results"]
    assert second["bytes"] < first["bytes"]
    assert 0 < second["divergence"] < 0.01
    assert first["divergence"] == 0
    assert second["agreement"] > 0.8
    assert second["tokens_per_s"] > 0
    assert (folder / "compare.png").stat().st_size > 1000


def test_the_bar_of_perplexity_follows_the_texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_model(folder / "model", "float32")
    sections = read_sections(str(folder / "one.txt"), tokenizer, 32, 128)
    events: list[str] = []
    forward = type(model).forward

    def watched(*args: Any) -> Any:
        events.append("computed")
        return forward(*args)

    monkeypatch.setattr(type(model), "forward", watched)
    perplexity(model, sections, progress=lambda count: events.append(f"+{count}"))
    assert events == ["computed", "+1"] * 4


@pytest.mark.parametrize("method", [["rtn", "--bits", "3", "--group-size", "32"], ["nf4"], ["int8"]])
def test_a_method_without_inputs_needs_no_text(folder: Path, capsys: Captured, method: list[str]) -> None:
    """The text changes the report alone."""
    widths = {"hidden_size": 64, "intermediate_size": 128}
    make_model("llama2", vocab_size=420, **widths).save_pretrained(folder / "wide")
    save(folder / "wide", byte_level())
    text = ["--calibration", str(folder / "one.txt"), *LENGTHS]
    for name, options in {"without": [], "with": text}.items():
        out = str(folder / f"{method[0]}-{name}")
        assert main(["quantize", str(folder / "wide"), "--method", *method, *options, "--out", out]) == 0
    without, calibrated = (folder / f"{method[0]}-{name}" for name in ("without", "with"))
    files = [path.name for path in without.iterdir() if path.name != "quantization_report.json"]
    assert "model.safetensors" in files
    for name in files:
        assert (without / name).read_bytes() == (calibrated / name).read_bytes(), name
    assert capsys.readouterr().out.splitlines()[0].split() == ["layer", "relative", "error", "of", "weights"]
    reports = [json.loads((path / "quantization_report.json").read_text()) for path in (without, calibrated)]
    assert [report["errors_of"] for report in reports] == ["weights", "outputs"]
    assert reports[0]["errors"].keys() == reports[1]["errors"].keys()
    assert all(0 < error < 0.3 for error in reports[0]["errors"].values())


def test_a_section_longer_than_the_context_is_refused_before_any_work(folder: Path, capsys: Captured) -> None:
    out, text = folder / "long", str(folder / "one.txt")
    arguments = ["--method", "int8", "--context", "257", "--tokens", "600", "--out", str(out)]
    for option in ("--calibration", "--evaluation"):
        assert main(["quantize", str(folder / "model"), option, text, *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.err == "fastinfer: error: context: expected at most the model's 256 positions, got 257\n"
        assert not out.exists()
    with pytest.raises(RequestError, match="at most the model's 256 positions, got 257"):
        quantize_checkpoint(folder / "model", out, Method("int8", 8, symmetric=True), [[5] * 257])


def test_no_tokenizer_is_needed_without_a_text(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert main(["quantize", str(tmp_path / "model"), "--method", "int8", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "gptq"], "--calibration: gptq needs a text, got none"),
        (
            ["--method", "rtn", "--calibration", "one.txt", "--context", "129"],
            "--tokens: expected at least 129, those of one section (--context), got 128",
        ),
        (["--method", "rtn", "--calibration", "nowhere.txt"], "nowhere.txt: No such file or directory"),
        (["--method", "rtn", "--bits", "5"], "bits: expected one of"),
        (
            ["--method", "int8", "--group-size", "128"],
            "group_size: expected none for int8, which has whole rows, got 128",
        ),
        (["--method", "rtn", "--group-size", "33"], "group_size: expected a multiple of 32"),
        (["--method", "rtn", "--group-size", "64"], "64 does not divide 96"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, folder: Path, capsys: Captured) -> None:
    if "64" in arguments:
        arguments = [*arguments, "--calibration", str(folder / "one.txt")]
    out = str(folder / "never")
    assert main(["quantize", str(folder / "model"), *LENGTHS, *arguments, "--out", out]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("fastinfer: error: ")
    assert message in error
    assert not Path(out).exists()


def test_evaluation_in_batches_changes_no_bit(folder: Path, capsys: Captured) -> None:
    """Four sections at once, in batches of one and of three."""
    text = "--text", str(folder / "other.txt"), "--tokens", "150", "--context", "37"
    for kv_cache_dtype in ("float32", "int8"):
        printed = []
        for count in ("1", "3"):
            options = "--max-num-seqs", count, "--kv-cache-dtype", kv_cache_dtype, "--device", "cpu"
            assert main(["eval", "perplexity", str(folder / "model"), *text, *options, "--json"]) == 0
            printed.append(json.loads(capsys.readouterr().out))
        assert printed[0] == printed[1]
        assert printed[0]["tokens"] == 4 * 37


def test_options_of_loading_change_an_evaluation(folder: Path, capsys: Captured) -> None:
    text = "--text", str(folder / "other.txt"), *LENGTHS
    found = set()
    for options in ([], ["--kv-cache-dtype", "int4"], ["--dtype", "float32"], ["--context", "64"]):
        assert main(["eval", "compare", str(folder / "model"), *text, *options, "--no-speed"]) == 0
        printed = capsys.readouterr().out
        assert main(["eval", "perplexity", str(folder / "model"), *text, *options]) == 0
        value = capsys.readouterr().out.strip()
        assert float(printed.splitlines()[1].split()[2]) == pytest.approx(float(value), abs=6e-4)
        found.add(value)
    assert len(found) == 4


def test_compare_looks_for_all_files_before_it_loads_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "load_model", None)
    model, text = str(folder / "model"), str(folder / "one.txt")
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        comparison.compare([model, "nowhere"], text, 32, 128)
    with pytest.raises(RequestError, match=r"nowhere\.txt: No such file"):
        comparison.compare([model, model], "nowhere.txt", 32, 128)


def test_a_text_that_is_too_short(folder: Path, capsys: Captured) -> None:
    short = folder / "short.txt"
    short.write_text("the")
    assert main(["eval", "perplexity", str(folder / "model"), "--text", str(short), "--context", "64"]) == 2
    assert "the text must have at least 63 tokens, got" in capsys.readouterr().err


def test_a_gguf_file_is_a_source(folder: Path, capsys: Captured) -> None:
    """Its tokenizer goes along, and the texts are divided as by the file's."""
    model, source, out = make_model("llama2"), folder / "model.gguf", folder / "from_gguf"
    tokens = ["a", "b", "ab", *(f"<{number}>" for number in range(model.config.vocab_size - 3))]
    write_gguf(source, model, tokens=tokens)
    (folder / "ab.txt").write_text("abba" * 40)
    text = "--evaluation", str(folder / "ab.txt")
    assert main(["quantize", str(source), "--method", "int8", *text, *LENGTHS, "--out", str(out)]) == 0
    report = json.loads((out / "quantization_report.json").read_text())
    assert abs(report["perplexity_after"] / report["perplexity_before"] - 1) < 0.02
    assert report["bytes_before"] == source.stat().st_size
    assert Tokenizer.from_folder(out).encode("abba") == [2, 1, 0]
    assert not list(folder.glob(".*"))
    capsys.readouterr()


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_the_current_folder_is_an_output(
    folder: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    source = folder / "model"
    if kind == "gguf":
        source = tmp_path / "model.gguf"
        write_gguf(source, make_model("llama2"), tokens=["a", "b", "ab", *(f"<{number}>" for number in range(317))])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["quantize", str(source), "--method", "int8", "--out", "."]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "."
    files = {path.name for path in Path().iterdir()}
    assert {"config.json", "model.safetensors", "quantization_report.json"} < files
    assert files == {path.name for path in (tmp_path / "here").iterdir()}


def test_only_the_files_that_are_read_are_counted(folder: Path, tmp_path: Path) -> None:
    """Some folders have a second copy of the weights."""
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(folder / "model", model)
    size = (model / "model.safetensors").stat().st_size
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    report = quantize_checkpoint(model, out, Method("int8", 8, symmetric=True), [])
    assert (report.bytes_before, report.bytes_after) == (size, (out / "model.safetensors").stat().st_size)
    [result] = comparison.compare([str(model)], str(folder / "one.txt"), 32, 64, speed=False)
    assert result.bytes == size


def test_a_quantised_gguf_file_is_no_source(tmp_path: Path, capsys: Captured) -> None:
    write_gguf(
        tmp_path / "model.gguf", make_model("llama2"), matrices=gguf.GGMLQuantizationType.Q4_0, tokens=["a", "b", "ab"]
    )
    assert main(["quantize", str(tmp_path / "model.gguf"), "--method", "rtn", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert (
        "the model is quantised already: tensor 'token_embd.weight' must be of the type F32, F16, BF16, Q8_0" in error
    )
    assert error.startswith("fastinfer: error: ")  # and not by a bar
    assert not (tmp_path / "out").exists()
