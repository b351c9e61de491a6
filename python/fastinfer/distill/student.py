"""The student: a transformers model whose layers are trained. transformers is imported when a student is opened."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.utils.checks import show
from fastinfer.utils.file_mode import share_as_new
from fastinfer.utils.machine import has_bf16

# Bytes of a number that is trained, which has a gradient and two means of AdamW, and of one that is not; all in fp32.
TRAINED_BYTES = 16
FROZEN_BYTES = 4
# Bytes of a weight of the output layer where products are in bf16. It is kept in bf16, because autocast would convert
# it again for each product.
HEAD_BYTES = 2
# Fields of transformers' configurations that are lists with an entry for each layer.
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "layer_rope_theta")
PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}


class Student:
    """A model of torch layers, in fp32.

    Args:
        model: transformers' causal language model.
        tokenizer: transformers' tokenizer, which is saved with the model.
        num_teacher_layers: number of layers of the teacher.
        is_cut: whether the layers are the teacher's, all at first.

    Attributes:
        model: see above.
        kept: the teacher's layers that the student has, if they are the teacher's; ``None`` for another model.
    """

    def __init__(self, model: Any, tokenizer: Any, num_teacher_layers: int, is_cut: bool) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._num_teacher_layers = num_teacher_layers
        self.kept = list(range(num_teacher_layers)) if is_cut else None
        # The embedding and the output layer stay as they are: they have a large part of the numbers, and little to
        # learn.
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            part.requires_grad_(False)
        if has_bf16():
            head = model.get_output_embeddings()
            head.weight = nn.Parameter(head.weight.to(torch.bfloat16), requires_grad=False)

    @classmethod
    def open(cls, path: Path, num_teacher_layers: int, is_cut: bool) -> "Student":
        """Load a ``.gguf`` file, whose weights are dequantised, or a folder.

        Raises:
            CheckpointFormatError: config.json is missing or damaged.
            UnsupportedModelError: transformers does not load the folder as a model with all its weights and a
                tokenizer, the weights are quantised, or the layers are not where they are in Llama.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        if path.is_dir():
            if "quantization_config" in JsonFields.read(path / "config.json", CheckpointFormatError).values:
                raise UnsupportedModelError(
                    f"{path}: expected a student or teacher with dense weights, got quantised ones"
                )
            source: tuple[Path, dict[str, str]] = (path, {})
        else:
            source = (path.parent, {"gguf_file": path.name})
        folder, options = source
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        except Exception as error:  # transformers raises errors of many types
            raise UnsupportedModelError(
                f"{path}: expected a model with a tokenizer that transformers loads, got {show(error, 300)}"
            ) from error
        if missing := sorted(found["missing_keys"]):
            raise UnsupportedModelError(
                f"{path}: expected all weights of {type(model).__name__}, got none for {missing[0]}"
            )
        if hasattr(model.config, "quantization_config"):  # of GGUF, whose weights are dense now
            del model.config.quantization_config
            model.hf_quantizer = None
        if not isinstance(getattr(model.base_model, "layers", None), nn.ModuleList):
            raise UnsupportedModelError(f"{path}: expected a model with a list of layers, got {type(model).__name__}")
        return cls(model, tokenizer, num_teacher_layers, is_cut)

    @property
    def layers(self) -> nn.ModuleList:
        """The layers."""
        layers: nn.ModuleList = self.model.base_model.layers
        return layers

    @property
    def vocab_size(self) -> int:
        """Number of columns of the logits."""
        return len(self.model.get_output_embeddings().weight)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all layers but these, by their present numbers in ascending order."""
        self.model.base_model.layers = nn.ModuleList(self.layers[index] for index in indices)
        _keep_layers(self.model.config, indices)
        for index, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            attention.layer_idx = index
        if self.kept is not None:
            self.kept = [self.kept[index] for index in indices]

    def layer_of(self, teacher_layer: int) -> int:
        """Return the layer whose output corresponds to that of a teacher's layer; -1 if there is none before it."""
        if self.kept is not None:
            return sum(layer <= teacher_layer for layer in self.kept) - 1
        return round((teacher_layer + 1) * len(self.layers) / self._num_teacher_layers) - 1

    def logits(self, ids: Tensor) -> Tensor:
        """Compute logits [texts, tokens, vocab] for token ids [texts, tokens] int64."""
        outputs = self.outputs(ids)
        hidden: Tensor = outputs.last_hidden_state
        return self.head(outputs, hidden.flatten(0, 1)).view(*ids.shape, -1)

    def outputs(self, ids: Tensor) -> Any:
        """Compute what the layers do, as transformers returns it: ``last_hidden_state`` [texts, tokens, hidden]."""
        with _products():
            return self.model.base_model(input_ids=ids, use_cache=False)

    def head(self, outputs: Any, hidden: Tensor) -> Tensor:
        """Compute logits of some tokens.

        Args:
            outputs: what :meth:`outputs` returned.
            hidden: [n, hidden], some rows of the last hidden state.

        Returns:
            [n, vocab]: what the output layer returns, and what the model makes of that, such as a soft cap.
        """
        base = self.model.base_model
        given = type(outputs)(**{**outputs, "last_hidden_state": hidden[None]})
        base.forward = lambda *_, **__: given  # so that the model's own code continues behind its layers
        try:
            with _products():
                ids = torch.zeros(1, len(hidden), dtype=torch.int64)  # of which some models ask the shape
                logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        finally:
            del base.forward
        return logits[0]

    @contextmanager
    def recording(self, hidden: dict[str, int], attention_layer: int | None) -> Iterator[dict[str, Tensor]]:
        """Collect tensors, [texts, tokens, size], of each call of :meth:`logits` within the context.

        Args:
            hidden: by name the layer whose output is wanted.
            attention_layer: layer whose queries, keys and values are wanted, as ``q``, ``k`` and ``v``.
        """
        found: dict[str, Tensor] = {}
        modules = {name: self.layers[layer] for name, layer in hidden.items()}
        if attention_layer is not None:
            attention = getattr(self.layers[attention_layer], "self_attn", None)
            for name, module in PROJECTIONS.items():
                if not hasattr(attention, module):
                    raise UnsupportedModelError(
                        f"the attention loss needs a student with {module} in layer {attention_layer}, got none"
                    )
                modules[name] = getattr(attention, module)

        def hook(name: str) -> Any:
            def keep(module: nn.Module, inputs: Any, output: Any) -> None:
                found[name] = output[0] if isinstance(output, tuple) else output

            return keep

        handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def save(self, folder: Path) -> None:
        """Write a folder that transformers and fastinfer load, with weights in bf16."""
        config = self.model.config
        config.dtype = torch.bfloat16
        self.model.tie_weights()
        tensors = self.model.state_dict()
        # Tensors that two layers share stay one, which save_pretrained writes once.
        saved = {(tensor.data_ptr(), tensor.shape): tensor.to(torch.bfloat16) for tensor in tensors.values()}
        state = {name: saved[tensor.data_ptr(), tensor.shape] for name, tensor in tensors.items()}
        self.model.save_pretrained(folder, state_dict=state)
        for path in folder.glob("*.safetensors"):
            share_as_new(path)
        self._tokenizer.save_pretrained(folder)


def _products() -> torch.autocast:
    """bf16 products take a third of the time of fp32's where the CPU has instructions for them."""
    return torch.autocast("cpu", torch.bfloat16, enabled=has_bf16())


def _keep_layers(config: Any, indices: Sequence[int]) -> None:
    """Rewrite what transformers' configuration says of single layers, if only these are kept."""
    for name in PER_LAYER:
        if values := getattr(config, name, None):
            setattr(config, name, [values[index] for index in indices])
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = sum(index < config.first_k_dense_replace for index in indices)
    if hasattr(config, "mlp_only_layers"):
        step, dense = config.decoder_sparse_step, config.mlp_only_layers
        kept = [index in dense or (index + 1) % step != 0 for index in indices]
        config.mlp_only_layers = [layer for layer, is_dense in enumerate(kept) if is_dense]
        config.decoder_sparse_step = 1
    config.num_hidden_layers = len(indices)
