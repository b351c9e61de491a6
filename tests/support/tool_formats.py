"""Small chat templates that write tool calls in the public formats of well-known models, and the same calls as data."""

from dataclasses import dataclass
from typing import Any

from fastinfer.tokenizers.chat_template import render

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Zürich "HB" <b>&amp;</b>\n\\x', "days": 3}),
    ("search", {"query": "{not json}", "tags": ["a", "b's"], "options": {"safe": True, "depth": None, "rate": -1.5}}),
    ("now", {}),
]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "options": {"type": "object"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@dataclass(frozen=True)
class ToolFormat:
    """A format.

    Attributes:
        name: name of its spec.
        template: Jinja source, from the header of the assistant's turn to its end.
        header: how the assistant's turn begins.
        footer: how it ends; the engine does not generate that.
    """

    name: str
    template: str
    header: str
    footer: str


_TOOL_CALLS = "{%- for call in message.tool_calls %}{%- set f = call.function %}"
_HEAD = "{%- for message in messages if message.role == 'assistant' %}"

FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(
        "hermes",
        _HEAD + "{{- '<|im_start|>assistant\\n' + message.content }}" + _TOOL_CALLS + "{{- '\\n<tool_call>\\n' }}"
        "{{- {'name': f.name, 'arguments': f.arguments} | tojson }}{{- '\\n</tool_call>' }}"
        "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}",
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
    ),
    "qwen3_coder": ToolFormat(
        "qwen3_coder",
        _HEAD
        + "{{- '<|im_start|>assistant\\n' + message.content }}"
        + _TOOL_CALLS
        + "{{- '\\n<tool_call>\\n<function=' + f.name + '>\\n' }}"
        "{%- for key, value in f.arguments.items() %}{{- '<parameter=' + key + '>\\n' }}"
        "{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}"
        "{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}",
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
    ),
    "llama3_json": ToolFormat(
        "llama3_json",
        '{#- Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. #}'
        + _HEAD
        + "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
        + _TOOL_CALLS
        + "{{- {'name': f.name, 'parameters': f.arguments} | tojson }}{{- '; ' if not loop.last }}"
        "{%- endfor %}{{- '<|eot_id|>' }}{%- endfor %}",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "mistral": ToolFormat(
        "mistral",
        _HEAD
        + "{{- '[/INST]' + message.content + '[TOOL_CALLS][' }}"
        + _TOOL_CALLS
        + "{{- {'name': f.name, 'arguments': f.arguments, 'id': 'abcdefghi'} | tojson }}{{- ', ' if not loop.last }}"
        "{%- endfor %}{{- ']</s>' }}{%- endfor %}",
        "[/INST]",
        "</s>",
    ),
    "mistral_v11": ToolFormat(
        "mistral",
        _HEAD
        + "{{- '[/INST]' + message.content }}"
        + _TOOL_CALLS
        + "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' }}{{- f.arguments | tojson }}{%- endfor %}{{- '</s>' }}{%- endfor %}",
        "[/INST]",
        "</s>",
    ),
    "gemma": ToolFormat(
        "gemma",
        "{%- macro write(value) %}{%- if value is string %}{{- '<|\"|>' + value + '<|\"|>' }}"
        "{%- elif value is mapping %}{{- '{' }}{%- for key, item in value.items() %}{{- key + ':' }}{{- write(item) }}"
        "{{- ',' if not loop.last }}{%- endfor %}{{- '}' }}"
        "{%- elif value is sequence %}{{- '[' }}{%- for item in value %}{{- write(item) }}{{- ',' if not loop.last }}"
        "{%- endfor %}{{- ']' }}{%- else %}{{- value | tojson }}{%- endif %}{%- endmacro %}"
        + _HEAD
        + "{{- '<|turn>model\\n' + message.content }}"
        + _TOOL_CALLS
        + "{{- '<|tool_call>call:' + f.name }}{{- write(f.arguments) }}{{- '<tool_call|>' }}{%- endfor %}"
        "{{- '<turn|>\\n' }}{%- endfor %}",
        "<|turn>model\n",
        "<turn|>\n",
    ),
    "deepseek_v3": ToolFormat(
        "deepseek",
        _HEAD
        + "{{- '<｜Assistant｜>' + message.content + '<｜tool▁calls▁begin｜>' }}"
        + _TOOL_CALLS
        + "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\\n```json\\n' }}{{- f.arguments | tojson }}"
        "{{- '\\n```<｜tool▁call▁end｜>' }}{{- '\\n' if not loop.last }}{%- endfor %}"
        "{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- endfor %}",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "deepseek_v3_1": ToolFormat(
        "deepseek",
        _HEAD
        + "{{- '<｜Assistant｜>' + message.content + '<｜tool▁calls▁begin｜>' }}"
        + _TOOL_CALLS
        + "{{- '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' }}{{- f.arguments | tojson }}"
        "{{- '<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- endfor %}",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "pythonic": ToolFormat(
        "pythonic",
        "{#- [func_name1(params_name1=params_value1)] -#}{%- macro write(value) %}"
        "{%- if value is string %}{%- set value = value.replace('\\\\', '\\\\\\\\').replace('\\n', '\\\\n') %}"
        '{{- "\'" + value.replace("\'", "\\\\\'") + "\'" }}'
        "{%- elif value is mapping %}{{- '{' }}{%- for key, item in value.items() %}"
        '{{- "\'" + key + "\': " }}{{- write(item) }}'
        "{{- ', ' if not loop.last }}{%- endfor %}{{- '}' }}"
        "{%- elif value is sequence %}{{- '[' }}{%- for item in value %}{{- write(item) }}{{- ', ' if not loop.last }}"
        "{%- endfor %}{{- ']' }}{%- else %}{{- value }}{%- endif %}{%- endmacro %}"
        + _HEAD
        + "{{- '<|header_start|>assistant<|header_end|>\\n\\n[' }}"
        + _TOOL_CALLS
        + "{{- f.name + '(' }}{%- for key, value in f.arguments.items() %}{{- key + '=' }}{{- write(value) }}"
        "{{- ', ' if not loop.last }}{%- endfor %}{{- ')' }}{{- ', ' if not loop.last }}{%- endfor %}"
        "{{- ']<|eot|>' }}{%- endfor %}",
        "<|header_start|>assistant<|header_end|>\n\n",
        "<|eot|>",
    ),
    "harmony": ToolFormat(
        "harmony",
        "{#- <|channel|>analysis #}"
        + _HEAD
        + "{{- '<|start|>assistant' }}"
        + _TOOL_CALLS
        + "{{- '<|channel|>commentary to=functions.' + f.name + ' <|constrain|>json<|message|>' }}"
        "{{- f.arguments | tojson }}{{- '<|call|>' }}{%- endfor %}{%- endfor %}",
        "<|start|>assistant",
        "",
    ),
}


def written(name: str, content: str = "") -> str:
    """The calls of ``CALLS`` as the template of a format writes them, without the turn's header and footer."""
    tool_calls = [{"function": {"name": tool, "arguments": arguments}} for tool, arguments in CALLS]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    form = FORMATS[name]
    text = render(form.template, [{"role": "user", "content": "?"}, message])
    assert text.startswith(form.header)
    assert text.endswith(form.footer)
    return text[len(form.header) : len(text) - len(form.footer)]
