"""Program that renders chat templates: ``python template_worker.py MEMORY SECONDS PATH...``; see template_process.py.

A line of standard input is a request, a line of standard output its answer, both JSON. The program imports nothing of
this project, so that it starts in a tenth of a second and stays small.

A template is untrusted code: it runs in jinja2's sandbox, without access to Python's internals. The conventions
(whitespace, filters, names) are those of https://huggingface.co/docs/transformers/chat_templating.
"""

import functools
import json
import resource
import sys
import time
from datetime import datetime
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path += sys.argv[3:]

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MESSAGE_CHARS = 500
MAX_CHARS = 1 << 24  # of a rendered text; also what the calling process must hold


class InvalidTemplateError(Exception):
    """The template is not valid Jinja."""


class Environment(ImmutableSandboxedEnvironment):
    """Sandbox that raises an error at the first forbidden attribute; it also limits ``range`` to 100,000."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is not allowed")


class Generation(Extension):
    """Support of ``{% generation %}``, which marks the assistant's words for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a plain class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Compiling takes longer than rendering, and a program has one or two templates.
@functools.lru_cache(maxsize=8)
def compiled(template: str) -> jinja2.Template:
    """Compile a template.

    Raises:
        InvalidTemplateError: it is not valid Jinja.
    """
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(template)
    except MemoryError:
        raise
    except Exception as error:  # jinja2's errors, and Python's own for code that is nested too deeply
        raise InvalidTemplateError(error) from None


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Print plain JSON; jinja2's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def raise_exception(message: str) -> NoReturn:
    """Refuse the messages, as templates do that want another order of roles."""
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    """Print the present date and time."""
    return datetime.now().strftime(format)


def answer(template: str, variables: dict[str, Any]) -> tuple[str, str]:
    """Render a template; return "text" and the text, or the kind of an error and its message."""
    try:
        text = compiled(template).render(**variables)
        return ("text", text) if len(text) <= MAX_CHARS else ("limit", f"more than {MAX_CHARS} characters")
    except InvalidTemplateError as error:
        return "invalid", str(error)[:MAX_MESSAGE_CHARS]
    except SecurityError as error:
        return "unsafe", str(error)[:MAX_MESSAGE_CHARS]
    except MemoryError:
        return "limit", "too much memory"
    except Exception as error:  # a template can raise any Python error
        return "failed", str(error)[:MAX_MESSAGE_CHARS]


def limit(kind: int, value: int) -> None:
    """Limit a resource of this process; a lower limit that it has already stays."""
    _, highest = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if highest == resource.RLIM_INFINITY else min(value, highest), highest))


def main() -> None:
    """Answer requests until standard input ends."""
    memory, seconds = map(int, sys.argv[1:3])
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, memory)
    for line in sys.stdin:
        # The kernel ends the process at this limit, whatever it is doing.
        limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + seconds)
        print(json.dumps(answer(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
