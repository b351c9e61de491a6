"""The teacher: a model that the engine runs, whose texts and records are what the student learns from."""

from pathlib import Path

from torch import Tensor

from fastinfer import hub
from fastinfer.distill.recorder import Recorder, recorded
from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError
from fastinfer.evaluation.recording import recording_config
from fastinfer.models import load_model, open_checkpoint
from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.fingerprint import fingerprint
from fastinfer.outputs import RequestOutput
from fastinfer.sampling_params import SamplingParams


class Teacher:
    """A loaded model with an engine that records.

    Args:
        name: a name or path that :func:`fastinfer.hub.resolve` knows.
        length: tokens of a text.
        top_k: number of likeliest tokens that are recorded of each position.
        temperature: divisor of the recorded logits.
        num_hidden: number of layers whose outputs are recorded, at equal distances, the last one included.
        with_attention: whether the last layer's queries, keys and values are recorded.
        whole: whether whole distributions are recorded, see :class:`fastinfer.distill.recorder.Recorder`.

    Attributes:
        path: path of the checkpoint.
        fingerprint: identity of what it computes, see :func:`fastinfer.models.fingerprint.fingerprint`.
        model, tokenizer: the model.
        hidden_layers: the layers whose outputs are recorded.
        attention_layer: the layer whose queries, keys and values are recorded; ``None`` for none.

    Raises:
        RequestError: the model cannot be recorded, or its context is shorter than a text.
    """

    def __init__(
        self,
        name: str,
        length: int,
        *,
        top_k: int,
        temperature: float,
        num_hidden: int = 0,
        with_attention: bool = False,
        whole: bool = False,
    ) -> None:
        self.path: Path = hub.resolve(name)
        precision = Precision.of("auto", "cpu")
        checkpoint = open_checkpoint(self.path, precision.exact)
        checkpoint.config.check_length(length)
        self.fingerprint = fingerprint([checkpoint], precision, length)
        model, self.tokenizer = load_model(checkpoint, max_model_len=length)
        assert isinstance(model, Decoder)
        self.model = model
        config = model.config
        if config.num_storing_layers < config.num_layers:
            raise RequestError(f"teacher: expected a model whose layers all have keys and values, got {name}")
        self.hidden_layers = [(i + 1) * config.num_layers // num_hidden - 1 for i in range(num_hidden)]
        self.attention_layer = config.num_layers - 1 if with_attention else None
        self._recorder = Recorder(model, min(top_k, config.vocab_size), temperature, whole)
        recording = recorded(model, self.hidden_layers, self.attention_layer, self._recorder.record)
        with_layers = bool(self.hidden_layers) or with_attention
        self._engine = Engine(recording, self.tokenizer, recording_config(length, with_layers=with_layers))

    def record(self, texts: list[list[int]]) -> list[dict[str, Tensor]]:
        """Compute texts, and return what :meth:`fastinfer.distill.recorder.Recorder.take` does of each."""
        self._engine.worker.on_result = self._recorder.end_step
        names = [self._engine.add_embedding_request(text) for text in texts]
        while self._engine.has_unfinished:
            self._engine.step()
        return [self._recorder.take(name) for name in names]

    def log_probs(self, output: Tensor) -> Tensor:
        """Compute the teacher's log-probabilities from recorded outputs of its last layer.

        Args:
            output: [n, hidden].

        Returns:
            [n, vocab] fp32, of logits that are divided by the temperature.
        """
        return self._recorder.log_probs(output)

    def write(self, prompt: list[int], count: int, length: int, first_seed: int) -> list[list[int]]:
        """Write texts, without recording them.

        Args:
            prompt: tokens with which each begins.
            count: number of texts.
            length: tokens of each, with the prompt.
            first_seed: seed of the first; the others have the next ones.
        """
        self._engine.worker.on_result = None
        return self._generate(prompt, count, length, first_seed)[1]

    def write_and_record(
        self, prompt: list[int], count: int, length: int, first_seed: int
    ) -> tuple[list[list[int]], list[dict[str, Tensor]]]:
        """Write texts as :meth:`write` does, and record the same steps."""
        self._engine.worker.on_result = self._recorder.end_step
        names, texts = self._generate(prompt, count, length, first_seed)
        return texts, [self._recorder.take(name) for name in names]

    def _generate(
        self, prompt: list[int], count: int, length: int, first_seed: int
    ) -> tuple[list[str], list[list[int]]]:
        def params(index: int) -> SamplingParams:
            seed = (first_seed + index) % 2**63
            return SamplingParams(temperature=1.0, max_tokens=length - len(prompt), ignore_eos=True, seed=seed)

        names = [self._engine.add_request(prompt, params(index)) for index in range(count)]
        texts = {}
        while self._engine.has_unfinished:
            for output in self._engine.step():
                assert isinstance(output, RequestOutput)
                if output.finished:
                    texts[output.request_id] = [*prompt, *output.outputs[0].token_ids]
        return names, [texts[name] for name in names]
