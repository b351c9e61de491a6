"""OpenVINO GenAI's pipeline with continuous batching, which reads GGUF files itself."""

import numpy as np
import openvino
import openvino_genai
from clock import now


class FirstToken(openvino_genai.StreamerBase):
    """Streamer that records the time of the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.moment: float | None = None

    def write(self, token: int) -> openvino_genai.StreamingStatus:
        self.moment = self.moment or now()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class OpenVino:
    def __init__(self, model: str, threads: int, max_tokens: int, max_requests: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # with it, a repeated prompt would cost nothing
        scheduler.max_num_batched_tokens = 2048
        self._pipeline = openvino_genai.LLMPipeline(
            model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads
        )

    @staticmethod
    def version() -> str:
        return f"openvino-genai {openvino_genai.__version__}"

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float | None, list[list[int]]]:
        """Return the time of the first token (only for a single prompt) and the new tokens of every prompt."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        if len(prompts) > 1:
            return None, self._pipeline.generate(inputs, config).tokens
        streamer = FirstToken()
        tokens = self._pipeline.generate(inputs, config, streamer).tokens
        return streamer.moment, tokens
