"""``generate`` of transformers with the dequantised weights of the file, or those of a folder."""

from pathlib import Path

import torch
import transformers
from clock import now


class FirstToken:
    """Streamer that records the time of the first token; transformers passes the prompt before it."""

    def __init__(self) -> None:
        self.moment: float | None = None
        self._has_prompt = False

    def put(self, tokens: torch.Tensor) -> None:
        if self._has_prompt and self.moment is None:
            self.moment = now()
        self._has_prompt = True

    def end(self) -> None:
        pass


class Transformers:
    def __init__(self, model: str, threads: int, max_tokens: int, max_requests: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        path, folder, options = Path(model), model, {}
        if path.is_file():
            folder, options = str(path.parent), {"gguf_file": path.name}
            packed = getattr(transformers, "GgufConfig", None)  # newer versions unpack in every product by default
            if packed is not None:
                options["quantization_config"] = packed(dequantize=True)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), **options
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    @staticmethod
    def version() -> str:
        return f"transformers {transformers.__version__}, torch {torch.__version__}"

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float | None, list[list[int]]]:
        """Return the time of the first token (only for a single prompt) and the new tokens of every prompt."""
        ids = torch.tensor(prompts)
        streamer = FirstToken() if len(prompts) == 1 else None
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, streamer=streamer
        )
        return streamer and streamer.moment, out[:, ids.shape[1] :].tolist()
