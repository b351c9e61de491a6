"""Validation of new requests against the limits of the engine and its model."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastinfer.engine.adapters import Adapters
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.grammar_source import check_installed
from fastinfer.engine.prompt_images import PromptImages
from fastinfer.engine.prompt_layout import PromptLayout
from fastinfer.engine.sequence import SequenceOptions
from fastinfer.errors import PromptTooLongError, RequestError
from fastinfer.sampling_params import BeamSearchParams, SamplingParams
from fastinfer.utils.checks import INT64_MAX, check_choice, check_float, check_int, check_text

POOLINGS = ("last", "mean")
MAX_TIMEOUT_S = 1e6


@dataclass(frozen=True, slots=True)
class ValidPrompt:
    """A prompt that has been checked, so that it need not be checked again.

    Attributes:
        token_ids: the prompt's token ids.
        images: images of the prompt; ``None`` for none.
        layout: layout of a prompt with modules; ``None`` for one without.
    """

    token_ids: list[int]
    images: PromptImages | None = None
    layout: PromptLayout | None = None


class RequestValidator:
    """Checks new requests; every mistake raises a RequestError that names the field.

    Args:
        config: limits of the engine.
        max_model_len: longest sequence in tokens.
        vocab_size: number of token ids of the model.
        adapters: the registered LoRA adapters.
        modules_obstacle: why the engine takes no prompts with modules; empty if it does.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        vocab_size: int,
        adapters: Adapters,
        modules_obstacle: str = "",
    ) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._adapters = adapters
        self._modules_obstacle = modules_obstacle

    def check_prompt(
        self,
        prompt: list[int] | ValidPrompt,
        *,
        generates: bool = True,
        images: PromptImages | None = None,
        layout: PromptLayout | None = None,
    ) -> ValidPrompt:
        """Check a prompt's type, length and token ids.

        Args:
            prompt: token ids, or a checked prompt, which is returned as it is.
            generates: whether there must be room for at least one generated token.
            images: images of the prompt.
            layout: layout of a prompt with modules.

        Raises:
            RequestError: the prompt can never be served.
        """
        if isinstance(prompt, ValidPrompt):
            return prompt
        if not isinstance(prompt, list):
            raise RequestError(f"prompt_token_ids must be a list, got {type(prompt).__name__}")
        if not prompt:
            raise RequestError("prompt must have at least 1 token, got 0")
        length = len(prompt) if layout is None else len(prompt) + max(layout.shift, 0)
        if length + generates > self._max_model_len:
            limit = "shorter than" if generates else "at most"
            raise PromptTooLongError(
                f"prompt must be {limit} max_model_len={self._max_model_len} tokens, got {length}",
                self._max_model_len,
            )
        for token_id in prompt:
            check_int("prompt_token_ids", token_id, 0, self._vocab_size - 1)
        return ValidPrompt(prompt, images, layout)

    def truncate(self, prompt: list[int] | ValidPrompt, params: SamplingParams | None) -> list[int] | ValidPrompt:
        """Cut a prompt that has not been checked yet as ``truncate_prompt_tokens`` says."""
        limit = params.truncate_prompt_tokens if isinstance(params, SamplingParams) else None
        if limit is None or not isinstance(prompt, list):
            return prompt
        return prompt[-(self._max_model_len - 1 if limit == -1 else limit) :]

    def check_sampling_params(self, params: SamplingParams) -> None:
        """Check the parameters against the model and the engine; SamplingParams itself has checked the rest.

        Raises:
            RequestError: the parameters do not fit this engine, or a package is missing that they need.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}")
        if params.structured_outputs is not None:
            check_installed()
        check_int("n", params.n, 1, self._config.max_num_seqs)
        self._check_stop_strings(params.stop or ())
        for name, limit in (("stop_token_ids", "max_stop_token_ids"), ("logit_bias", "max_logit_bias")):
            self._check_count(name, len(getattr(params, name)), "token ids", limit)
        self._check_count("bad_words", len(params.bad_words or ()), "words", "max_bad_words")
        for index, word in enumerate(params.bad_words or ()):
            self._check_count(f"bad_words[{index}]", len(word), "characters", "max_stop_string_length")
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(params, name) or ():
                check_int(name, token_id, 0, self._vocab_size - 1)

    def check_images(self, images: PromptImages, params: SamplingParams | None) -> None:
        """Check that a prompt with images is not cut, and that a step can compute each image that must not be divided.

        Raises:
            RequestError: it is cut, or the engine's configuration does not fit the images.
        """
        if params is not None and params.truncate_prompt_tokens is not None:
            raise RequestError(
                f"truncate_prompt_tokens must be None for a prompt with images, got {params.truncate_prompt_tokens}"
            )
        config, count = self._config, images.max_together
        if count and config.has_offloading:
            raise RequestError("this model's images need an engine without kv_offloading_size and kv_offloading_dir")
        num_decoded = config.max_num_seqs * (1 + config.num_speculative_tokens)
        limit = config.max_num_batched_tokens
        if count > max(limit - num_decoded, limit // 4):  # what a step leaves to prompts
            raise RequestError(
                f"max_num_batched_tokens must be at least {count + num_decoded} for images of {count} tokens beside "
                f"{num_decoded} generated ones, got {limit}"
            )

    def check_modules(self, params: SamplingParams | None) -> None:
        """Check that the engine takes prompts with modules, and that these parameters fit them.

        Raises:
            RequestError: it does not, or the prompt is to be cut or scored.
        """
        if self._modules_obstacle:
            raise RequestError(f"prompt modules need {self._modules_obstacle}")
        for name in ("truncate_prompt_tokens", "prompt_logprobs"):
            if (value := getattr(params, name, None)) is not None:
                raise RequestError(f"{name} must be None for a prompt with modules, got {value}")

    def check_beam_search_params(self, params: BeamSearchParams) -> None:
        """Check that the engine can run this many beams at the same time.

        Raises:
            RequestError: the parameters do not fit this engine.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {type(params).__name__}")
        check_int("beam_width", params.beam_width, 1, self._config.max_num_seqs)

    def check_adapter(self, adapter: str | None) -> None:
        """Check that an adapter of this name is registered.

        Raises:
            RequestError: no adapter of this name is registered.
        """
        if adapter is not None:
            self._adapters.key(adapter)

    def check_pooling(self, pooling: str) -> None:
        """Check the name of a pooling method.

        Raises:
            RequestError: there is no such method.
        """
        check_choice("pooling", pooling, POOLINGS)

    def sequence_options(
        self, priority: int, cache_salt: str, adapter: str | None, valid: ValidPrompt | None = None
    ) -> SequenceOptions:
        """Return the arguments that all sequences of a request share.

        Without ``valid`` they are those of a prompt of text.

        Raises:
            RequestError: the priority is not a 64-bit integer, the salt is not a string, or no adapter of this name is
                registered.
        """
        check_int("priority", priority, -INT64_MAX, INT64_MAX)
        check_text("cache_salt", cache_salt)
        return {
            "priority": priority,
            "cache_salt": cache_salt,
            "adapter_key": "" if adapter is None else self._adapters.key(adapter),
            "images": None if valid is None else valid.images,
            "layout": None if valid is None else valid.layout,
        }

    def check_timeouts(self, timeout: float | None, queue_timeout: float | None) -> None:
        """Check the limits on a request's time.

        Raises:
            RequestError: a limit is neither ``None`` nor a positive number of seconds.
        """
        for name, seconds in (("timeout", timeout), ("queue_timeout", queue_timeout)):
            if seconds is not None:
                check_float(name, seconds, 0.0, MAX_TIMEOUT_S, low_open=True)

    def _check_stop_strings(self, stop: str | Sequence[str]) -> None:
        """Check the number of stop strings and their lengths."""
        self._check_count("stop", len(stop), "strings", "max_stop_strings")
        for index, string in enumerate(stop):
            self._check_count(f"stop[{index}]", len(string), "characters", "max_stop_string_length")

    def _check_count(self, name: str, count: int, unit: str, limit: str) -> None:
        """Check a count against the limit of this name in the configuration."""
        maximum = getattr(self._config, limit)
        if count > maximum:
            raise RequestError(f"{name} must have at most {limit}={maximum} {unit}, got {count}")
