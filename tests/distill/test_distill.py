"""Distillation of a tiny model: records against the model alone, shards, stages, and the folder that a run leaves."""

import random
import re
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_folder import write_tiny_folder

from fastinfer.cli.added_memory import distillation_memory
from fastinfer.cli.main import main
from fastinfer.cli.memory_bounds import Weights
from fastinfer.distill import layers
from fastinfer.distill.judge import Judgement
from fastinfer.distill.objective import Objective
from fastinfer.distill.recorder import record_bytes
from fastinfer.distill.report import Report, plot
from fastinfer.distill.run import distill
from fastinfer.distill.settings import TOP_K, Settings
from fastinfer.distill.shards import Shards
from fastinfer.distill.student import Student
from fastinfer.distill.teacher import Teacher
from fastinfer.distill.texts import read_texts
from fastinfer.distill.trainer import Point
from fastinfer.errors import RequestError
from fastinfer.evaluation.perplexity import log_probabilities
from fastinfer.models import load_model, open_checkpoint

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
SIZES = {"num_hidden_layers": 4}
LENGTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distill")
    write_tiny_folder(path / "teacher", sizes=SIZES)
    words, draw = ("tea", "for", "two", "and", "more"), random.Random(1)
    (path / "text.txt").write_text(" ".join(draw.choice(words) for _ in range(10 * LENGTH)))
    return path


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("shards", "texts"):
        monkeypatch.setattr(f"fastinfer.distill.{module}.SHARD_SECTIONS", 8)


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Teacher:
    return Teacher(str(folder / "teacher"), LENGTH, top_k=16, temperature=2.0, num_hidden=2, with_attention=True)


def expected(folder: Path, text: list[int]) -> dict[str, torch.Tensor]:
    """The tensors that transformers computes in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    found: dict[str, torch.Tensor] = {}
    attention = model.model.layers[-1].self_attn
    for name in "qkv":
        getattr(attention, f"{name}_proj").register_forward_hook(
            lambda module, inputs, output, name=name: found.__setitem__(name, output[0])
        )
    with torch.inference_mode():
        # transformers' last hidden state has gone through the last norm.
        model.model.layers[-1].register_forward_hook(
            lambda module, inputs, output: found.__setitem__("hidden.3", output[0] if output.dim() == 3 else output)
        )
        outputs = model(torch.tensor([text]), output_hidden_states=True)
    found["hidden.1"] = outputs.hidden_states[2][0]
    found["logits"] = outputs.logits[0]
    return found


def check(records: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    rows = len(records["tokens"])
    for name in ("hidden.1", "hidden.3", "q", "k", "v"):
        ours, theirs = records[name].float(), wanted[name][:rows].float()
        assert (ours - theirs).norm() / theirs.norm() < 0.05, name  # of 8-bit activations and bf16
    log_probs = (wanted["logits"][:rows] / 2.0).log_softmax(-1)
    ours = log_probs.gather(1, records["tokens"].long())
    torch.testing.assert_close(records["log_probs"].float(), ours, rtol=0, atol=0.1)
    total = records["log_probs"].float().exp().sum(-1) + records["tail"].float().exp()
    torch.testing.assert_close(total, torch.ones(rows), rtol=0, atol=5e-3)


def test_records_of_a_prompt_and_of_written_texts(folder: Path, teacher: Teacher) -> None:
    texts = read_texts(str(folder / "text.txt"), None, teacher, LENGTH)
    assert texts.sections is not None
    assert not {tuple(text) for text in texts.sections} & {tuple(text) for text in texts.evaluation}
    for text, records in zip(texts.sections[:3], teacher.record(texts.sections[:3]), strict=True):
        assert len(records["tokens"]) == LENGTH
        check(records, expected(folder, text))
    written, recorded = teacher.write_and_record([7, 8], 3, LENGTH, first_seed=5)
    assert written == teacher.write([7, 8], 3, LENGTH, first_seed=5)
    assert len({tuple(text) for text in written}) == 3
    for text, records in zip(written, recorded, strict=True):
        assert len(records["tokens"]) == LENGTH - 1
        check(records, expected(folder, text))


def test_whole_distributions_follow_from_records(folder: Path) -> None:
    whole = Teacher(str(folder / "teacher"), LENGTH, top_k=16, temperature=2.0, whole=True)
    [text], recorded = whole.write_and_record([7, 8], 1, LENGTH, first_seed=5)
    for records in (*recorded, *whole.record([text])):
        assert list(records) == ["output"]
        wanted = (expected(folder, text)["logits"][: LENGTH - 1] / 2.0).log_softmax(-1)
        ours = whole.log_probs(records["output"])[: LENGTH - 1]
        torch.testing.assert_close(ours, wanted, rtol=0, atol=0.1)


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_hidden_states_are_those_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    """The engine's residual stream is smaller in models that scale the embedding or what layers add."""
    write_tiny_folder(tmp_path / "teacher", family, SIZES)
    scaling = Teacher(str(tmp_path / "teacher"), LENGTH, top_k=16, temperature=1.0, num_hidden=4)
    student = Student.open(tmp_path / "teacher", 4, is_cut=True)
    [records] = scaling.record([list(range(60, 60 + LENGTH))])
    shard = {"ids": torch.arange(60, 60 + LENGTH)[None], **{name: row[None, :-1] for name, row in records.items()}}
    objective = Objective(("hidden",), "fkl", 1.0, scaling.hidden_layers, None, 1, 1, scaling.log_probs)
    student.model.eval()
    assert objective(student, shard).item() < 5e-3


def test_memory_is_what_a_training_allocates(folder: Path, teacher: Teacher) -> None:
    checkpoint = open_checkpoint(folder / "teacher")
    found = distillation_memory(checkpoint, Weights.of(checkpoint))
    student = Student.open(folder / "teacher", 4, is_cut=True)
    trained = [parameter for parameter in student.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    student.logits(torch.tensor([[5, 6, 7]])).sum().backward()
    optimizer.step()
    tensors = [*student.model.parameters(), *(parameter.grad for parameter in trained)]
    tensors += [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert 4 * found["layer_bytes"] + found["vocabulary_bytes"] == pytest.approx(
        sum(tensor.nbytes for tensor in tensors), rel=0.01
    )
    [records] = teacher.record([list(range(60, 60 + LENGTH))])
    size = sum(records[name][0].nbytes for name in ("tokens", "log_probs", "tail"))
    assert record_bytes(records["tokens"].shape[1]) == size + 4  # with the token itself, int32
    assert found["record_bytes"] == record_bytes(TOP_K)


def test_shards_are_read_again_but_not_those_of_another_run(folder: Path, teacher: Teacher, tmp_path: Path) -> None:
    texts = read_texts("self", None, teacher, LENGTH)
    first = Shards(tmp_path, teacher, texts, {"top_k": 16})
    shard = first[1]
    again = Shards(tmp_path, teacher, texts, {"top_k": 16})
    assert all(torch.equal(again[1][name], tensor) for name, tensor in shard.items())
    assert (first.num_recorded, again.num_recorded, again.num_read) == (8 * LENGTH, 0, 8 * LENGTH * len(shard))
    with pytest.raises(RequestError, match="expected records of this teacher"):
        Shards(tmp_path, teacher, texts, {"top_k": 17})[1]
    (tmp_path / "00001.safetensors").write_bytes(b"damaged")
    with pytest.raises(RequestError, match="damaged file"):
        again[1]


def test_records_of_other_weights_in_files_of_the_same_size_are_refused(folder: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("first", "second")):
        copy = shutil.copytree(folder / "teacher", tmp_path / name)
        weights = load_file(copy / "model.safetensors")
        weights["model.norm.weight"] += seed
        save_file(weights, copy / "model.safetensors", {"format": "pt"})
    teachers = [Teacher(str(tmp_path / name), LENGTH, top_k=16, temperature=1.0) for name in ("first", "second")]
    texts = read_texts(str(folder / "text.txt"), None, teachers[0], LENGTH)
    Shards(tmp_path / "shards", teachers[0], texts, {})[0]
    with pytest.raises(RequestError, match="expected records of this teacher"):
        Shards(tmp_path / "shards", teachers[1], texts, {})[0]


def ticks(minutes: float = 1.0) -> Any:
    """A clock that makes runs take the same number of steps on any machine."""
    times = count(0.0, minutes / 2)
    return lambda: next(times)


def check_gaps(report: Report) -> None:
    """Each stage has a gap of its own, from its first point to the teacher."""
    for num_layers in {point.num_layers for point in report.points}:
        first, *_, last = (point for point in report.points if point.num_layers == num_layers)
        closed = first.judgement.loss - last.judgement.loss
        gap = first.judgement.loss - report.teacher_loss
        expected = [0.0, pytest.approx(closed / gap)] if gap > 0 else [None, None]
        assert [report.gap_closed(first), report.gap_closed(last)] == expected
        assert re.search(rf"student, before +{num_layers} ", str(report))


@pytest.mark.parametrize(
    "options",
    [
        {"stages": (3, 2), "losses": ("logit", "hidden", "attention"), "divergence": "jsd"},
        {"student": "layers:0,3", "losses": ("logit", "ce"), "divergence": "rkl"},
        pytest.param({"student": "layers:0,3", "losses": ("ce",)}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    teacher, data = str(folder / "teacher"), str(folder / "text.txt")
    settings = Settings(teacher, data, minutes=1.0, context=LENGTH, learning_rate=3e-3, **options)
    report = distill(settings, tmp_path, clock=ticks())
    assert report.points[-1].judgement.loss < report.points[0].judgement.loss
    check_gaps(report)
    model, _ = load_model(tmp_path / "model", "float32")
    assert model.config.num_layers == 2
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = list(range(60, 60 + LENGTH))
    (ours,) = log_probabilities(model, [ids], torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(ours, theirs(torch.tensor([ids])).logits[0].log_softmax(-1), rtol=0, atol=1e-3)


def test_no_text_is_written_twice(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    write = Teacher.write

    def noted(teacher: Teacher, prompt: list[int], count: int, length: int, first_seed: int) -> list[list[int]]:
        seeds.append(first_seed)
        return write(teacher, prompt, count, length, first_seed)

    monkeypatch.setattr(Teacher, "write", noted)
    options: dict[str, Any] = {"student": "layers:0,3", "losses": ("ce",), "context": LENGTH}
    distill(Settings(str(folder / "teacher"), "self", 1.0, **options), tmp_path, clock=ticks())
    assert len(seeds) == len(set(seeds)) > 1


def test_a_student_that_begins_without_a_gap(folder: Path, tmp_path: Path) -> None:
    """Its loss may even be smaller than the teacher's, whose products have 8-bit activations."""
    pytest.importorskip("matplotlib")
    points = [Point(60.0 * i, 4, 100 * i, Judgement(loss, 0.1, 0.9)) for i, loss in enumerate((3.0, 2.5))]
    for teacher_loss in (3.0, 3.1):
        settings = Settings(str(folder / "teacher"), str(folder / "text.txt"), 1.0, stages=(4,))
        report = Report(settings, teacher_loss, [0, 1, 2, 3], points, 0, 0, {"teacher": 1.0})
        assert [report.gap_closed(point) for point in points] == [None, None]
        assert "none to close" in str(report)
        assert plot(report.as_json(), tmp_path / "report.png").exists()


@pytest.mark.parametrize("setting", [{"learning_rate": 1e9}, {"temperature": 1e30}])
def test_a_training_that_diverges_leaves_no_model(folder: Path, tmp_path: Path, setting: dict[str, float]) -> None:
    options: dict[str, Any] = {"student": "layers:0,3", "context": LENGTH, **setting}
    settings = Settings(str(folder / "teacher"), str(folder / "text.txt"), 1.0, **options)
    with pytest.raises(RequestError, match=r"learning_rate, temperature: expected .* or gradients are not finite"):
        distill(settings, tmp_path, clock=ticks())
    assert not (tmp_path / "model").exists()


def test_progress(folder: Path, tmp_path: Path) -> None:
    told = []
    settings = Settings(str(folder / "teacher"), str(folder / "text.txt"), 1.0, stages=(2,), context=LENGTH)
    distill(settings, tmp_path, clock=ticks(0.5), on_progress=lambda seconds, text: told.append((seconds, text)))
    assert told == sorted(told)
    kinds = [re.sub(r" [\d.]+$", "", text) for _, text in told]
    assert kinds[:2] == ["choosing 2 layers"] * 2
    assert list(dict.fromkeys(kinds)) == ["choosing 2 layers", "loss on unseen text", "loss"]
    assert kinds[-1] == "loss on unseen text"


def test_a_run_without_time_for_a_step_leaves_no_model(folder: Path, tmp_path: Path) -> None:
    """The first stage ends a little after the whole time."""
    settings = Settings(str(folder / "teacher"), str(folder / "text.txt"), 1.0, stages=(3, 2), context=LENGTH)
    with pytest.raises(
        RequestError, match="minutes: expected more time for the stage of 2 layers, got 1: none was left"
    ):
        distill(settings, tmp_path, clock=ticks(8))
    with pytest.raises(RequestError, match="for the stage of 3 layers"):
        distill(settings, tmp_path, clock=ticks(120))
    assert not (tmp_path / "model").exists()


def test_the_choice_of_layers_ends_with_the_time(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes dozens of times through a large student."""
    trials = []
    without = layers._loss_without
    monkeypatch.setattr(layers, "_loss_without", lambda *args: trials.append(args) or without(*args))
    settings = Settings(str(folder / "teacher"), str(folder / "text.txt"), 1.0, stages=(2,), context=LENGTH)
    with pytest.raises(RequestError, match="minutes: expected more time for the stage of 2 layers"):
        distill(settings, tmp_path, clock=ticks(120))
    assert not trials


def test_a_stage_that_takes_too_long_leaves_the_others_what_is_left(folder: Path, tmp_path: Path) -> None:
    """The first one ends after what would be the end of the second one."""
    settings = Settings(str(folder / "teacher"), str(folder / "text.txt"), 1.0, stages=(3, 2, 1), context=LENGTH)
    times = (tick + (40.0 if tick > 3 else 0.0) for tick in count(0.0, 0.25))
    report = distill(settings, tmp_path, clock=lambda: next(times))
    tokens = {point.num_layers: point.num_tokens for point in report.points}
    assert 0 < tokens[3] < tokens[2] < tokens[1]


def test_a_student_of_another_width(folder: Path, tmp_path: Path) -> None:
    write_tiny_folder(tmp_path / "student", sizes={"hidden_size": 32, "num_hidden_layers": 1})
    options = {"student": str(tmp_path / "student"), "context": LENGTH, "minutes": 1.0}
    teacher, data = str(folder / "teacher"), "self"
    report = distill(Settings(teacher, data, losses=("logit", "attention"), **options), tmp_path, clock=ticks())
    assert report.kept is None
    with pytest.raises(RequestError, match="needs a student as wide as the teacher"):
        distill(Settings(teacher, data, losses=("hidden",), **options), tmp_path / "other", clock=ticks())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--student", "layers:3,1"], "student: expected ascending numbers such as layers:0,1,4, got 'layers:3,1'"),
        (["--stages", "2,3"], "stages: expected descending numbers, got 2,3"),
        (
            ["--stages", "2", "--divergence", "rkl", "--top-k", "32"],
            "top_k: expected none with the divergence rkl, which needs whole distributions, got 32",
        ),
        (
            ["--stages", "2", "--loss", "ce", "--divergence", "rkl"],
            "divergence: expected none without the loss logit, got rkl with ce",
        ),
        (
            ["--stages", "2", "--loss", "hidden,ce", "--temperature", "2"],
            "temperature: expected none without the loss logit, got 2.0 with hidden,ce",
        ),
        (["--stages", "2", "--context", "999"], "context: expected at most the model's 256 positions, got 999"),
        (["--stages", "9"], "stages: expected at most the teacher's 4 layers, got 9"),
        (["--student", "layers:0,4"], "student: expected layers below 4, got 4"),
        (["--stages", "2", "--evaluation", "short.txt"], "the text must have at least 32 tokens, got 5"),
    ],
)
def test_mistakes(
    folder: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("short")
    teacher, data = str(folder / "teacher"), str(folder / "text.txt")
    common = ["--teacher", teacher, "--data", data, "--context", str(LENGTH), "--out", str(tmp_path)]
    assert main(["distill", *common, *arguments]) == 2
    assert message in capsys.readouterr().err
