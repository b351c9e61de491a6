"""Prompt schemas: texts that many prompts are made of, each with a place of its own.

A schema lays out its parts one after the other. Each begins at a fixed position, so that what was computed of a module
serves every prompt that has it, whatever precedes it there. The method is that of Prompt Cache (Gim et al., 2024,
https://arxiv.org/abs/2311.04934).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastinfer.errors import RequestError
from fastinfer.utils.checks import INT32_MAX, check_int, check_path, check_text, show


@dataclass(frozen=True, slots=True)
class PromptModule:
    """A text that is computed once.

    Attributes:
        name: name by which prompts choose it.
        text: the text, in which the spelling of a special token is that token.
    """

    name: str
    text: str

    def __post_init__(self) -> None:
        check_text("module", self.name)
        check_text(f"text of module {show(self.name)}", self.text)


@dataclass(frozen=True, slots=True)
class PromptParameter:
    """A place for a short text that each prompt fills in.

    Attributes:
        name: name by which prompts give a value, which is plain text: it has no special tokens.
        max_tokens: number of positions that are kept for the value.
    """

    name: str
    max_tokens: int

    def __post_init__(self) -> None:
        check_text("parameter", self.name)
        check_int(f"max_tokens of parameter {show(self.name)}", self.max_tokens, 1, INT32_MAX)


@dataclass(frozen=True, slots=True)
class PromptUnion:
    """Modules of which a prompt has at most one; all begin at the same position.

    Attributes:
        modules: the modules.
    """

    modules: tuple[PromptModule, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.modules, tuple) or not all(isinstance(each, PromptModule) for each in self.modules):
            raise RequestError(f"modules of a union must be a tuple of PromptModule, got {show(self.modules)}")


@dataclass(frozen=True, slots=True)
class PromptSchema:
    """The parts of which prompts are made, in the order in which they are read.

    Attributes:
        parts: the parts. No two have the same name.
        recomputed_blocks: number of blocks of the KV cache at the beginning of each module that are computed again as a
            part of each prompt, see :mod:`fastinfer.engine.prompt_layout`. With 0 the first token comes sooner, and the
            text differs more from that of the whole prompt.

    Raises:
        RequestError: a part is not one, or a name occurs twice.
    """

    parts: tuple[PromptModule | PromptParameter | PromptUnion, ...]
    recomputed_blocks: int = 1

    def __post_init__(self) -> None:
        kinds = PromptModule | PromptParameter | PromptUnion
        if not isinstance(self.parts, tuple) or not all(isinstance(part, kinds) for part in self.parts):
            raise RequestError(f"parts must be a tuple of modules, parameters and unions, got {show(self.parts)}")
        check_int("recomputed_blocks", self.recomputed_blocks, 0, INT32_MAX)
        names = [each.name for part in self.parts for each in _named(part)]
        for name in names:
            if names.count(name) > 1:
                raise RequestError(f"names of a schema must differ, got {show(name)} twice")

    @classmethod
    def from_file(cls, path: str | Path) -> "PromptSchema":
        """Read a schema from a JSON file, see :meth:`from_dict`.

        Raises:
            RequestError: the file cannot be read or has no schema.
        """
        check_path("path", path)
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RequestError(f"schema must be a JSON file, got {show(str(path), 200)}: {error}") from None
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PromptSchema":
        """Make a schema of JSON values.

        Args:
            values: ``{"parts": [...], "recomputed_blocks": 1}``, of which the latter may be missing. A part is one of
                ``{"module": name, "text": text}``, ``{"parameter": name, "max_tokens": n}`` and ``{"union": [...]}``,
                where a union lists modules.

        Raises:
            RequestError: the values are no schema.
        """
        if not isinstance(values, Mapping) or not {"parts"} <= values.keys() <= {"parts", "recomputed_blocks"}:
            raise RequestError(f"schema must have parts, and may have recomputed_blocks, got {show(values)}")
        parts = tuple(_part(part) for part in _list("parts", values["parts"]))
        return cls(parts, values.get("recomputed_blocks", 1))

    def prompt(
        self,
        text: str,
        *,
        modules: Iterable[str] | None = None,
        parameters: Mapping[str, str] | None = None,
        cache_salt: str = "",
    ) -> "ModularPrompt":
        """Make a prompt, which methods that generate text take like any other.

        Args:
            text: text after all parts.
            modules: names of the modules that the prompt has, in any order; by default all that are in no union.
            parameters: values of the parameters that the prompt has, by name.
            cache_salt: name of a group, such as a tenant; only prompts with the same salt share what is computed.

        Raises:
            RequestError: the schema has no such module or parameter, one union has two of the modules, or an argument
                has another type.
        """
        every = [(part, module) for part in self.parts for module in _named(part) if isinstance(module, PromptModule)]
        if modules is None:
            modules = [module.name for part, module in every if part is module]
        if isinstance(modules, str) or not isinstance(modules, Iterable):
            raise RequestError(f"modules must be a list of names, got {show(modules)}")
        if not isinstance(parameters, Mapping | None):
            raise RequestError(f"parameters must be a dict of values by name, got {show(parameters)}")
        listed, values = list(modules), dict(parameters or {})
        for name in listed:
            check_text("a name in modules", name)
        chosen = frozenset(listed)
        _check_known("modules", chosen, {module.name for _, module in every})
        _check_known("parameters", values, {part.name for part in self.parts if isinstance(part, PromptParameter)})
        for part in self.parts:
            if (
                isinstance(part, PromptUnion)
                and len(names := sorted(chosen & {each.name for each in part.modules})) > 1
            ):
                raise RequestError(f"modules must have at most one of a union, got {', '.join(names)}")
        for name, value in [("text", text), ("cache_salt", cache_salt), *values.items()]:
            check_text(name, value)
        return ModularPrompt(self, text, chosen, values, cache_salt)


@dataclass(frozen=True, slots=True)
class ModularPrompt:
    """A prompt of modules, made by :meth:`PromptSchema.prompt`.

    Attributes:
        schema: the schema.
        text: text after all parts.
        modules: names of the modules that the prompt has.
        parameters: values of the parameters that it has.
        cache_salt: name of the group of prompts that may share what is computed.
    """

    schema: PromptSchema
    text: str
    modules: frozenset[str]
    parameters: Mapping[str, str]
    cache_salt: str


def _named(part: PromptModule | PromptParameter | PromptUnion) -> tuple[PromptModule | PromptParameter, ...]:
    """Return what has a name: the modules of a union, and any other part itself."""
    return part.modules if isinstance(part, PromptUnion) else (part,)


def _check_known(what: str, names: Iterable[object], known: set[str]) -> None:
    for name in names:
        if name not in known:
            raise RequestError(f"{what} must be among {', '.join(sorted(known)) or 'none'}, got {show(name)}")


def _part(values: Any) -> PromptModule | PromptParameter | PromptUnion:
    """Make a part of JSON values."""
    keys = set(values) if isinstance(values, Mapping) else set[str]()
    if keys == {"module", "text"}:
        return PromptModule(values["module"], values["text"])
    if keys == {"parameter", "max_tokens"}:
        return PromptParameter(values["parameter"], values["max_tokens"])
    if keys == {"union"}:
        modules = [_part(each) for each in _list("union", values["union"])]
        return PromptUnion(tuple(modules))  # type: ignore[arg-type]  # it checks them
    raise RequestError(f"a part must have module and text, parameter and max_tokens, or union, got {show(values)}")


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list, got {show(value)}")
    return value
