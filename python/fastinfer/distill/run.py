"""A whole run: teacher, texts, student, training, and the folder that it leaves."""

import math
import time
from collections.abc import Callable
from pathlib import Path

from fastinfer import hub
from fastinfer.distill.judge import Judge
from fastinfer.distill.objective import HIDDEN_LAYERS, Objective
from fastinfer.distill.report import Report, measure_speeds
from fastinfer.distill.settings import Settings
from fastinfer.distill.shards import Shards
from fastinfer.distill.student import Student
from fastinfer.distill.teacher import Teacher
from fastinfer.distill.texts import read_texts
from fastinfer.distill.trainer import Trainer
from fastinfer.errors import RequestError, UnsupportedModelError
from fastinfer.models import open_checkpoint, read_tokenizer
from fastinfer.tokenizers.tokenizer import Tokenizer


def distill(
    settings: Settings,
    out: Path,
    *,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: Callable[[float, str], None] = lambda seconds, text: None,
) -> Report:
    """Distill a student and write it to ``out/model``, the records to ``out/shards``.

    Args:
        settings: what to do.
        out: folder to write.
        clock: clock of the time limit, in seconds.
        on_progress: function that is called with the seconds since the start and what was done last.

    Raises:
        ModelNotFoundError, CheckpointFormatError, UnsupportedModelError, RequestError: a model or a text is not there,
            is damaged, or does not fit.
    """
    start = clock()
    uses = {loss: loss in settings.losses for loss in ("hidden", "attention")}
    teacher = Teacher(
        settings.teacher,
        settings.context,
        top_k=settings.num_top,
        temperature=settings.temperature,
        num_hidden=HIDDEN_LAYERS if uses["hidden"] else 0,
        with_attention=uses["attention"],
        whole=settings.records_whole,
    )
    student = _open_student(settings, teacher)
    texts = read_texts(settings.data, settings.evaluation, teacher, settings.context)
    judge = Judge(teacher, texts.evaluation, texts.evaluation_given)
    stages = settings.stages or (len(student.layers),)
    options: dict[str, object] = {"temperature": settings.temperature, "whole": settings.records_whole}
    if not settings.records_whole:
        options["top_k"] = settings.num_top
    shards = Shards(out / "shards", teacher, texts, options, with_records=set(settings.losses) != {"ce"})
    objective = Objective(
        settings.losses,
        settings.divergence,
        settings.temperature,
        teacher.hidden_layers,
        teacher.attention_layer,
        _relation_heads(teacher, student),
        texts.given,
        teacher.log_probs,
    )
    trainer = Trainer(
        student,
        objective,
        shards,
        judge,
        settings.learning_rate,
        clock,
        start,
        60 * settings.minutes,
        on_progress,
    )
    trainer.train(stages)
    student.save(out / "model")
    report = Report(settings, judge.teacher_loss, student.kept, trainer.points, shards.num_recorded, shards.num_read)
    report.speeds = measure_speeds(settings.teacher, out / "model", texts.evaluation)
    return report


def _relation_heads(teacher: Teacher, student: Student) -> int:
    """Return a number of heads that divides the queries, keys and values of both, if they are compared."""
    if teacher.attention_layer is None:
        return 1
    try:
        heads: int = student.model.config.num_key_value_heads
    except (AttributeError, RuntimeError):  # of transformers, if layers have different numbers
        raise UnsupportedModelError(
            "the attention loss needs a student whose layers have one number of heads of keys, got "
            f"{type(student.model).__name__}"
        ) from None
    return math.gcd(teacher.model.config.kv_shape(teacher.attention_layer).num_heads, heads)


def _check_tokens(teacher: Tokenizer, student: Tokenizer, vocab_size: int) -> None:
    """Check that tokens with text have the same one in both; control and unused tokens may differ."""
    student.pad(vocab_size)
    for token in range(vocab_size):
        expected, found = teacher.token_bytes(token), student.token_bytes(token)
        if expected != found and expected and found:
            raise RequestError(
                f"student: expected the teacher's vocabulary, whose token {token} is {expected!r:.80}, "
                f"got {found!r:.80}"
            )


def _open_student(settings: Settings, teacher: Teacher) -> Student:
    num_layers, kept = teacher.model.config.num_layers, settings.kept_layers
    if settings.student is not None and kept is None:
        path = hub.resolve(settings.student)
        student = Student.open(path, num_layers, is_cut=False)
        if student.vocab_size != teacher.model.config.vocab_size:
            raise RequestError(
                f"student: expected the teacher's vocabulary of {teacher.model.config.vocab_size} tokens, "
                f"got {student.vocab_size}"
            )
        _check_tokens(teacher.tokenizer, read_tokenizer(open_checkpoint(path)), student.vocab_size)
        return student
    if kept is not None and kept[-1] >= num_layers:
        raise RequestError(f"student: expected layers below {num_layers}, got {kept[-1]}")
    if settings.stages and settings.stages[0] > num_layers:
        raise RequestError(f"stages: expected at most the teacher's {num_layers} layers, got {settings.stages[0]}")
    config = teacher.model.config
    if config.kv_shapes or any(map(config.has_state, range(num_layers))):
        # Some layers may not be dropped: Gemma 4 must end with one without a window, others need a layer of each kind.
        raise UnsupportedModelError(
            "teacher: layers with states and those of Gemma 4 are not dropped: expected another teacher or "
            f"--student FOLDER, got {teacher.path}"
        )
    student = Student.open(teacher.path, num_layers, is_cut=True)
    if kept is not None:
        student.keep(kept)
    return student
