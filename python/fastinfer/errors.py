"""Errors that a user's input can cause. Each message is one line that says what was expected and what came."""


class FastinferError(ValueError):
    """Base of all errors below; the command line prints its message and exits with code 2."""


def reason(error: Exception) -> str:
    """What is told of an error that ended a request: of ours the message, of others their class as well."""
    return str(error) if isinstance(error, FastinferError) else f"{type(error).__name__}: {error}"


class ModelNotFoundError(FastinferError):
    """No model under this name or path, or its download failed."""


class UnsupportedModelError(FastinferError):
    """The file is sound, but holds an architecture, tokenizer or quantisation that is not implemented."""


class GGUFFormatError(FastinferError):
    """The file is not a sound GGUF file."""


class CheckpointFormatError(FastinferError):
    """A folder of safetensors files, or its configuration, is not sound."""


class AdapterError(FastinferError):
    """A LoRA adapter that is damaged, does not fit the model, or needs what is not implemented."""


class QuantizationError(FastinferError):
    """A weight that a format cannot hold, or a folder that a quantised checkpoint cannot be made from or written to."""


class RequestError(FastinferError):
    """A prompt or a sampling parameter that cannot be served."""


class QueueFullError(RequestError):
    """Too many requests wait already; a later try may succeed."""
