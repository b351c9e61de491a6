"""Errors caused by a user's input. Each message is one line that says what was expected and what came instead."""

MAX_MESSAGE_CHARS = 1000


class FastinferError(ValueError):
    """Base class of the errors below; the command line prints the message and exits with code 2."""

    def __str__(self) -> str:
        """Return the message in one line of at most ``MAX_MESSAGE_CHARS``.

        Messages quote files and requests. What cannot be printed (line breaks, escape sequences of terminals, lone
        surrogates) is escaped, and a long message is cut in the middle.
        """
        message = super().__str__()
        if not message.isprintable():
            message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[: MAX_MESSAGE_CHARS - 205]} ... {message[-200:]}"
        return message


# Errors that end the program rather than one request.
FATAL_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit)


def describe_error(error: BaseException) -> str:
    """Return an error's message for an output, preceded by its class if it is not a :class:`FastinferError`."""
    return str(error) if isinstance(error, FastinferError) else f"{type(error).__name__}: {error}"


class ModelNotFoundError(FastinferError):
    """No model has this name or path, or its download failed."""


class UnsupportedModelError(FastinferError):
    """The model is valid, but its architecture, tokenizer or quantisation is not implemented."""


class GGUFFormatError(FastinferError):
    """The file is not a valid GGUF file."""


class CheckpointFormatError(FastinferError):
    """A folder of safetensors files, or its configuration, is not valid."""


class AdapterError(FastinferError):
    """A LoRA adapter is damaged, does not fit the model, or needs a feature that is not implemented."""


class QuantizationError(FastinferError):
    """A format cannot hold a weight, or a quantised checkpoint cannot be written."""


class RequestError(FastinferError):
    """A prompt, a parameter or an option is not valid, or cannot be served with this model."""


class PromptTooLongError(RequestError):
    """A prompt does not fit into the model's context.

    Args:
        message: what was expected and what came.
        max_model_len: longest sequence in tokens.
    """

    def __init__(self, message: str, max_model_len: int) -> None:
        super().__init__(message)
        self.max_model_len = max_model_len


class ServerError(FastinferError):
    """A server cannot be reached, reports an error, or answers what the API does not allow."""


class UnavailableError(RuntimeError):
    """The engine takes no more requests: it is draining, shut down, or dead."""


class QueueFullError(RequestError):
    """Too many requests are waiting; trying again later may succeed."""
