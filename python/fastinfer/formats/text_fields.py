"""The fields of ``config.json`` that describe the language model within a model of text and images or sound."""

from fastinfer.formats.json_fields import JsonFields


def text_fields(config: JsonFields) -> JsonFields | None:
    """Return these fields; ``None`` if ``config`` has none, because it describes a language model alone.

    Models that also speak have those of the part that writes in ``thinker_config``.

    Raises:
        FastinferError: a value that should be an object is none; the class is that of ``config``'s errors.
    """
    return (config.object("thinker_config") or config).object("text_config")
