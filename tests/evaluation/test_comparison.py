"""Comparisons of models on one text, and what they keep in memory."""

import gc
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import make_model
from support.hf_tokenizers import TEXT, byte_level, save

from fastinfer.cli.main import main
from fastinfer.errors import RequestError
from fastinfer.evaluation import comparison, perplexity
from fastinfer.evaluation.perplexity import log_probabilities
from fastinfer.evaluation.text_file import read_sections
from fastinfer.models import load_model

LENGTH = 40
VOCAB = 420
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one vocabulary, of which the second has more rows than the tokenizer and the first has tokens."""
    path = tmp_path_factory.mktemp("comparison")
    for name, size in (("model", VOCAB), ("padded", VOCAB + 28)):
        make_model("llama2", vocab_size=size).save_pretrained(path / name)
        save(path / name, byte_level())
    (path / "text.txt").write_text("\n".join(TEXT * 8), encoding="utf-8")
    return path


def compare(folder: Path, *names: str, speed: bool = False) -> list[comparison.Result]:
    models = [str(folder / name) for name in names]
    return comparison.compare(models, str(folder / "text.txt"), LENGTH, 3 * LENGTH, dtype="float32", speed=speed)


def test_figures_are_those_of_the_predictions_over_the_common_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "ROWS", 16)
    for names in (("model", "padded"), ("padded", "model")):
        whole, common = {}, {}
        for name in names:
            model, tokenizer = load_model(folder / name, "float32")
            sections = read_sections(str(folder / "text.txt"), tokenizer, LENGTH, 3 * LENGTH)
            found = torch.stack(list(log_probabilities(model, sections.ids, torch.float32)))[:, :-1]
            whole[name] = found.gather(2, torch.tensor(sections.ids)[:, 1:, None])
            common[name] = found[..., :VOCAB].log_softmax(-1)
        results = compare(folder, *names)
        for result, name in zip(results, names, strict=True):
            assert result.perplexity == pytest.approx(float((-whole[name].mean()).exp()), rel=1e-5)
        p, q = (common[name] for name in names)
        assert results[1].agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
        assert results[1].divergence == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-2)
        assert (results[0].agreement, results[0].divergence) == (1, 0)


def test_models_with_other_tokens_are_refused_before_one_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = byte_level()
    other = folder / "other"
    make_model("llama2", vocab_size=VOCAB).save_pretrained(other)
    backend.add_special_tokens(["the"])
    values = json.loads(backend.to_str())
    values["model"]["merges"] = values["model"]["merges"][:50]
    save(other, type(backend).from_str(json.dumps(values)))
    monkeypatch.setattr(comparison, "load_model", None)
    with pytest.raises(RequestError, match=r"expected the tokens that .*model makes of .*, got others"):
        compare(folder, "model", "other")


def kept_bytes() -> int:
    """Size of the fp16 distributions that are alive."""
    gc.collect()
    alive = [part for part in gc.get_objects() if isinstance(part, torch.Tensor) and part.dtype == torch.float16]
    return sum(part.nbytes for part in alive if part.shape[-1:] == (VOCAB,))


@pytest.mark.parametrize("names", [("model",), ("model", "padded")])
def test_the_reference_is_kept_while_models_are_compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    sizes: dict[str, list[int]] = {"loading": [], "computing": [], "speed": []}
    load, loss = comparison.load_model, comparison.loss

    def watched(*args: object, **options: object) -> object:
        sizes["loading"].append(kept_bytes())
        return load(*args, **options)  # type: ignore[arg-type]

    def counted(*args: torch.Tensor) -> float:
        sizes["computing"].append(kept_bytes())
        return loss(*args)

    def measure(*args: object) -> float:
        sizes["speed"].append(kept_bytes())
        return 1.0

    monkeypatch.setattr(comparison, "load_model", watched)
    monkeypatch.setattr(comparison, "loss", counted)
    monkeypatch.setattr(comparison, "_measure_speed", measure)
    compare(folder, *names, speed=True)
    whole = 3 * (LENGTH - 1) * VOCAB * 2
    assert sizes["loading"] == [0, whole][: len(names)]
    assert max(sizes["computing"]) == (whole if len(names) > 1 else 0)
    assert sizes["speed"] == [0] * len(names)


def test_only_some_rows_of_logits_are_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "ROWS", 16)
    model, tokenizer = load_model(folder / "model", "float32")
    counts: list[int] = []
    logits = type(model).logits

    def watched(self: object, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        counts.append(len(rows))
        return logits(self, hidden, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(type(model), "logits", watched)
    perplexity.perplexity(model, read_sections(str(folder / "text.txt"), tokenizer, LENGTH, 2 * LENGTH))
    assert counts == [16, 16, 7] * 2


def test_infinite_figures_are_null(folder: Path, capsys: Captured) -> None:
    sharp = folder / "sharp"
    make_model("llama2", vocab_size=VOCAB).save_pretrained(sharp)
    save(sharp, byte_level())
    tensors = load_file(sharp / "model.safetensors")
    tensors["lm_head.weight"] *= 30000
    save_file(tensors, sharp / "model.safetensors", metadata={"format": "pt"})
    text = "--text", str(folder / "text.txt"), "--context", str(LENGTH), "--tokens", "80", "--dtype", "float32"
    assert main(["eval", "perplexity", str(sharp), *text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"perplexity": None, "tokens": 80}
    first, second = comparison.as_json(compare(folder, "sharp", "model"))
    assert first["perplexity"] is None
    assert second["perplexity"] is not None
    assert math.isfinite(second["divergence"])


@pytest.mark.parametrize("what", ["perplexity", "compare"])
def test_a_section_longer_than_the_context_is_refused(
    folder: Path, what: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "load_model", None)
    monkeypatch.setattr("fastinfer.cli.eval.load_model", None)
    text = "--text", str(folder / "text.txt"), "--context", "257", "--tokens", "600"
    assert main(["eval", what, str(folder / "model"), *text]) == 2
    assert "error: context: expected at most the model's 256 positions, got 257" in capsys.readouterr().err


def test_too_few_tokens_name_the_option(folder: Path, capsys: Captured) -> None:
    text = "--text", str(folder / "text.txt"), "--tokens", "100"
    assert main(["eval", "perplexity", str(folder / "model"), *text]) == 2
    expected = "error: --tokens: expected at least 512, those of one section (--context), got 100"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("what", ["perplexity", "compare"])
def test_a_list_of_devices_is_refused(folder: Path, what: str, capsys: Captured) -> None:
    text = "--text", str(folder / "text.txt"), "--device", "cuda+cpu"
    assert main(["eval", what, str(folder / "model"), *text]) == 2
    assert "argument --device: expected auto, cpu, cuda or cuda:N, got 'cuda+cpu'" in capsys.readouterr().err
