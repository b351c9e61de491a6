"""Prompts as users give them, and their conversion to token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastinfer.engine.engine import Engine
from fastinfer.engine.prompt_images import PromptImages
from fastinfer.engine.prompt_layout import PromptLayout
from fastinfer.errors import PromptTooLongError, RequestError
from fastinfer.models.image_encoder import FAMILIES
from fastinfer.models.image_tokens import ImageLayout
from fastinfer.models.mmproj import ARCHITECTURES
from fastinfer.prompt_schema import ModularPrompt
from fastinfer.serving.images import lay_out_images, place_images, spell_images, take_images
from fastinfer.serving.literal_tokens import LiteralTokens
from fastinfer.serving.modular_prompt import pieces_of
from fastinfer.tokenizers.chat_messages import Message, normalize
from fastinfer.tokenizers.chat_template import render, writes_images
from fastinfer.utils.checks import show

# Text, a prompt of a schema, or a dictionary with either "prompt": str or "prompt_token_ids": list[int]. The dictionary
# may also have a "cache_salt": str, and a "pinned_prompt": the name of a pinned prompt that precedes the prompt.
Prompt = str | Mapping[str, Any] | ModularPrompt

_CONTENTS = {"prompt", "prompt_token_ids"}
_EXTRAS = {"cache_salt", "pinned_prompt"}
# Names of the renderer itself, which no variable of a template may replace, and arguments that are no variables.
RENDERER_NAMES = frozenset(
    {
        *("template", "chat_template", "messages", "bos_token", "eos_token"),
        *("engine", "cache_salt", "continue_final_message"),
    }
)
_FORMS = (
    "a string, a prompt of a schema, {'prompt': string} or {'prompt_token_ids': list}, the latter two perhaps with "
    "'cache_salt' or 'pinned_prompt'"
)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt in the form that the engine takes.

    Attributes:
        text: the text as given, ``None`` if the prompt was given as token ids.
        token_ids: token ids of the whole prompt by slot, including those of its pinned prompt.
        cache_salt: salt of the cached prefixes, see :meth:`fastinfer.engine.engine.Engine.add_request`.
        images: images whose tokens the prompt has; ``None`` for none.
        layout: layout of a prompt with modules; ``None`` for one without.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""
    images: PromptImages | None = None
    layout: PromptLayout | None = None

    @property
    def contents(self) -> list[int]:
        """The token ids, with the contents of images in place of theirs: equal for equal prompts alone."""
        if self.images is None:
            return self.token_ids
        contents = list(self.token_ids)
        self.images.mark(contents, 0)
        return contents

    @property
    def plain_token_ids(self) -> list[int]:
        """The token ids of a prompt without modules.

        Raises:
            RequestError: the prompt has modules.
        """
        if self.layout is not None:
            raise RequestError("beam search, embeddings and scores need prompts without modules, got one with modules")
        return self.token_ids


def prepare(
    engine: Engine,
    prompt: Prompt,
    *,
    cache_salt: str = "",
    add_special_tokens: bool = True,
    parse_special: bool = True,
) -> PreparedPrompt:
    """Tokenise a prompt.

    A pinned prompt and the text after it are tokenised separately and joined, so that the cached blocks of the former
    do not depend on that text. The text after a pinned prompt gets no beginning-of-text token.

    Args:
        engine: engine whose tokenizer and pinned prompts are used.
        prompt: see :data:`Prompt`.
        cache_salt: salt of a prompt that names none itself.
        add_special_tokens: begin with the beginning-of-text token, if the model has one.
        parse_special: whether the spelling of a special token becomes that token.

    Raises:
        RequestError: the prompt has none of these forms or is much too long, or there is no such pinned prompt.
    """
    if isinstance(prompt, ModularPrompt):
        return _prepare_modular(engine, prompt, cache_salt)
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        raise RequestError(f"prompt must be {_FORMS}, got {type(prompt).__name__}")
    if len(prompt.keys() & _CONTENTS) != 1 or prompt.keys() - _CONTENTS - _EXTRAS:
        raise RequestError(f"prompt must be {_FORMS}, got {show(list(prompt))}")
    prompt = {"cache_salt": cache_salt, **prompt}
    for name in _EXTRAS & prompt.keys():
        if not isinstance(prompt[name], str):
            raise RequestError(f"{name} must be a string, got {show(prompt[name])}")
    cache_salt = prompt["cache_salt"]
    before, layout = list[int](), None
    if "pinned_prompt" in prompt:
        pinned = engine.pinned_prompt(prompt["pinned_prompt"])
        if cache_salt not in ("", pinned.cache_salt):
            raise RequestError(f"cache_salt must be the pinned_prompt's own, or empty, got {show(cache_salt)}")
        cache_salt, before, layout, add_special_tokens = pinned.cache_salt, pinned.token_ids, pinned.layout, False
    if "prompt_token_ids" in prompt:
        token_ids = prompt["prompt_token_ids"]
        if not isinstance(token_ids, list):
            raise RequestError(f"prompt_token_ids must be a list, got {type(token_ids).__name__}")
        return PreparedPrompt(None, before + token_ids, cache_salt, layout=layout)
    text = prompt["prompt"]
    if not isinstance(text, str):
        raise RequestError(f"prompt must be {_FORMS}, got 'prompt': {show(text)}")
    _check_length(engine, text)
    token_ids = engine.tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)
    return PreparedPrompt(text, before + token_ids, cache_salt, layout=layout)


def _prepare_modular(engine: Engine, prompt: ModularPrompt, cache_salt: str) -> PreparedPrompt:
    """Tokenise a prompt of modules, and lay it out."""
    for text in (prompt.text, *prompt.parameters.values()):
        _check_length(engine, text)
    pieces = pieces_of(engine.tokenizer, prompt)
    if not pieces:
        return PreparedPrompt(prompt.text, [])
    layout = PromptLayout(pieces, engine.config.block_size, prompt.schema.recomputed_blocks)
    return PreparedPrompt(prompt.text, layout.token_ids, prompt.cache_salt or cache_salt, layout=layout)


def _check_length(engine: Engine, text: str) -> None:
    """Refuse a text that has more characters than the longest sequence; tokenising takes much longer than this check.

    Raises:
        PromptTooLongError: the text is longer.
    """
    limit = engine.max_model_len * engine.tokenizer.max_token_length
    if len(text) > limit:
        raise PromptTooLongError(
            f"prompt must have at most {limit} characters, the most that max_model_len={engine.max_model_len} tokens "
            f"can have, got {len(text)}",
            engine.max_model_len,
        )


def prepare_chat(
    engine: Engine,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
    *,
    cache_salt: str = "",
    continue_final_message: bool = False,
) -> PreparedPrompt:
    """Render a conversation with the model's chat template and tokenise it.

    The spelling of a control token in a message or a variable is plain text: what a user writes cannot end his message.

    Args:
        engine: engine whose tokenizer has the template.
        messages: messages such as ``[{"role": "user", "content": "Hello"}]``; for images see
            :func:`fastinfer.serving.images.take_images`.
        variables: variables of the template, see :func:`fastinfer.tokenizers.chat_template.render`.
        cache_salt: salt of the cached prefixes.
        continue_final_message: end the prompt with the content of the last message, which the answer continues.

    Raises:
        RequestError: the messages or the variables are malformed, or the template refuses them.
        UnsupportedModelError: the model has no chat template, or its encoder of images is not implemented.
        CheckpointFormatError: the encoder of images cannot be loaded.
    """
    names = _checked_variables({} if variables is None else variables)
    tokenizer, encoder, images = engine.tokenizer, engine.image_encoder, list[Any]()
    taken: Any = messages
    if encoder is not None:
        taken, images = take_images(messages)
    spellings = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    literals = LiteralTokens(tokenizer.control_pattern)
    hidden: Any = literals.hide(normalize(taken))
    if encoder is None and any(isinstance(message["content"], list) for message in hidden):
        raise RequestError(
            f"messages: expected text alone, as images need a folder of {', '.join(FAMILIES)}, or a GGUF model of "
            f"{', '.join(ARCHITECTURES)} with an mmproj file, and neither tensor nor pipeline parallelism, got one"
        )
    names = literals.hide(names)  # descriptions of tools come from others, too
    if continue_final_message:
        names["add_generation_prompt"] = False
        if not isinstance(hidden[-1]["content"], str):
            raise RequestError("continue_final_message: the last message must have text alone, got an image")
        hidden[-1]["content"] += literals.end_mark
    template, marker = tokenizer.chat_template, None if encoder is None else encoder.marker
    if images and template is not None and marker is not None and not writes_images(template, marker):
        hidden = spell_images(hidden, marker)
    text = render(template, hidden, **(names | spellings))
    if continue_final_message:
        if literals.end_mark not in text:
            raise RequestError("continue_final_message: the model's chat template leaves out the last message")
        text = text[: text.index(literals.end_mark)]
    pieces, layouts = literals.split(text), list[ImageLayout]()
    if encoder is not None and images:
        pieces, layouts = lay_out_images(encoder, pieces, images)
    # The template writes the special tokens itself.
    prepared = [prepare(engine, piece, add_special_tokens=False, parse_special=special) for piece, special in pieces]
    token_ids = [token_id for piece in prepared for token_id in piece.token_ids]
    placed = None
    if encoder is not None and images:
        token_ids, placed = place_images(encoder, token_ids, images, layouts, engine.max_model_len, cache_salt)
    return PreparedPrompt("".join(piece for piece, _ in pieces), token_ids, cache_salt, placed)


def _checked_variables(variables: object) -> dict[str, Any]:
    """Return the variables of a template as a dict, unless one of them replaces something of the renderer."""
    if not isinstance(variables, Mapping):
        raise RequestError(f"template_variables must be a dict, got {show(variables)}")
    for name in variables:
        if not isinstance(name, str):
            raise RequestError(f"template_variables must have names that are strings, got {show(name)}")
        if name in RENDERER_NAMES:
            raise RequestError(f"template_variables must not have {name}")
    return dict(variables)
