"""Model, sampling parameters and adapter from the arguments of ``generate`` and ``chat``."""

import argparse
import contextlib
import dataclasses
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastinfer.cli.checks import sampling_fields
from fastinfer.cli.conversation import Piece
from fastinfer.errors import RequestError
from fastinfer.formats.peft import read_adapter
from fastinfer.llm import LLM
from fastinfer.outputs import RequestOutput
from fastinfer.sampling_params import SamplingParams


@dataclass(frozen=True, eq=False)
class Session:
    """A loaded model, and how it answers.

    Attributes:
        llm: the model.
        params: sampling parameters of every request.
        adapter: name of the LoRA adapter of every request; ``None`` for the model alone.
    """

    llm: LLM
    params: SamplingParams
    adapter: str | None

    @classmethod
    def load(cls, args: argparse.Namespace) -> "Session":
        """Load the model and the adapter.

        The model's own sampling parameters are the defaults of those that the arguments do not give.

        Raises:
            FastinferError: the model or the adapter cannot be loaded.
        """
        options: dict[str, Any] = dict(args.engine_options)
        if args.adapter is not None:
            # Read before the model is loaded, which takes longer; its rank decides the size of the slots.
            options |= {"max_loras": 1, "max_lora_rank": read_adapter(Path(args.adapter)).max_rank}
        llm = LLM(args.model, **options)
        if args.adapter is not None:
            llm.load_adapter(args.adapter, args.adapter)
        return cls(llm, dataclasses.replace(llm.default_params, **sampling_fields(args)), args.adapter)

    def complete(self, prompt: str) -> Generator[RequestOutput, None, None]:
        """Complete a text, see :meth:`LLM.stream_outputs`."""
        return self.llm.stream_outputs(prompt, self.params, adapter=self.adapter)

    def answer(self, messages: list[Any]) -> Generator[RequestOutput, None, None]:
        """Answer a conversation, see :meth:`LLM.stream_chat`."""
        return self.llm.stream_chat(messages, self.params, adapter=self.adapter)

    def chat(self, messages: list[dict[str, str]]) -> Generator[Piece, None, None]:
        """Answer a conversation in pieces of text.

        Raises:
            RequestError: the request is not valid, or failed.
        """
        with contextlib.closing(self.answer(messages)) as outputs:
            for output in outputs:
                completion = output.outputs[0]
                yield Piece(completion.delta)
                if completion.finish_reason == "error":
                    raise RequestError(f"the request failed: {completion.stop_reason}")
