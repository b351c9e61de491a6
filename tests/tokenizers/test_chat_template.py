"""Chat templates against transformers', and templates that do harm."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.models import BPE

from fastinfer.errors import RequestError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.tokenizers.chat_template import render

HELLO = [{"role": "user", "content": "Hello"}]
CONVERSATIONS = [
    HELLO,
    [{"role": "user", "content": ""}],
    [{"role": "system", "content": "Be brief."}, *HELLO],
    [
        *HELLO,
        {"role": "assistant", "content": "Hi!\n"},
        {"role": "user", "content": "  spaces\n\nand 😀 {{ 1 + 1 }} <b>&"},
    ],
    [{"role": "tool", "content": "{% raw %}"}, {"role": "x", "content": "<|im_end|>\x00"}],
]
TEMPLATES = [
    "{% for m in messages %}\n    {% if m.role == 'user' %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\n",
    "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ m.content|tojson(indent=2) }}{% endfor %}{{ eos_token }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m['content'].strip() }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% if tools is not none %}tools{% endif %}{% if not documents %}none{% endif %}{{ add_generation_prompt }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ strftime_now('%Y') }}{{ messages[0].role.startswith('u') }}{{ messages[::-1] | map(attribute='role') | list }}",
    "{% macro line(m) %}{{ m.role }}: {{ m.content }}\n{% endmacro %}{% for m in messages %}{{ line(m) }}{% endfor %}",
    "{{ enable_thinking }}{% if missing is defined %}x{% endif %}{{ missing }}",
]


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(BPE()), bos_token="<s>", eos_token="</s>")


def both(reference: Any, template: str, messages: list[dict[str, str]], prompt: bool) -> tuple[str, str]:
    variables = {"add_generation_prompt": prompt, "enable_thinking": False}
    expected = reference.apply_chat_template(messages, chat_template=template, tokenize=False, **variables)
    return render(template, messages, bos_token="<s>", eos_token="</s>", **variables), expected


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_default_model(
    model_path: Path, reference: Any, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    template = GGUFFile(model_path).get("tokenizer.chat_template", str)
    ours, expected = both(reference, template, messages, add_generation_prompt)
    assert ours == expected
    assert ours.endswith("<|im_start|>assistant\n") == add_generation_prompt


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_features_of_templates(reference: Any, template: str, messages: list[dict[str, str]]) -> None:
    ours, expected = both(reference, template, messages, prompt=True)
    assert ours == expected


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    """A message that calls a tool, as the OpenAI API has it."""
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}], **fields}


TOOL_TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for t in m.tool_calls %}{{ t.id }}{{ t.function.name }}{{ t.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id }};{% endfor %}"
)


@pytest.mark.parametrize(
    "content", [{}, {"content": None}, {"content": ""}, {"content": [{"type": "text", "text": ""}]}]
)
@pytest.mark.parametrize("arguments", ['{"a": [1, "ü"]}', {"a": [1, "ü"]}])
def test_tools(reference: Any, arguments: Any, content: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    result = {"role": "tool", "content": "3", "tool_call_id": "1"}
    ours = render(TOOL_TEMPLATE, [*HELLO, call(arguments, **content), result], tools=tools)
    plain = [*HELLO, call({"a": [1, "ü"]}, content=""), result]
    assert ours == reference.apply_chat_template(plain, tools=tools, chat_template=TOOL_TEMPLATE, tokenize=False)
    assert '1add{"a": [1, "ü"]}' in ours


ONLY_WITHOUT_CONTENT = (
    "{% for m in messages %}{% if m['content'] is not none %}{{ m.role + ':' + m['content'] }}"
    "{% elif m.tool_calls %}{% for t in m.tool_calls %}{{ t.function.name + t.function.arguments }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
JOINS_ARGUMENTS = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}"
    "{% for t in m.tool_calls %}{{ t.function.name + t.function.arguments }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(("template", "header"), [(ONLY_WITHOUT_CONTENT, ""), (JOINS_ARGUMENTS, "assistant:")])
@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", ['{"a": "ü"}', {"a": "ü"}])
def test_templates_that_take_calls_in_one_form_alone(
    template: str, header: str, content: str | None, arguments: Any
) -> None:
    """Those of DeepSeek-R1 write calls beside no content, and their arguments as a text."""
    messages = [*HELLO, call(arguments, content=content), {"role": "tool", "content": "3"}]
    assert render(template, messages) == f'user:Hello{header}add{{"a": "ü"}}tool:3'


def test_a_content_beside_calls_stays() -> None:
    template = ONLY_WITHOUT_CONTENT.replace("elif", "endif %}{% if")
    assert render(template, [*HELLO, call({}, content="So:")]) == "user:Helloassistant:So:add{}"


def test_empty_arguments() -> None:
    for arguments in ("", "{}", {}):
        assert render(TOOL_TEMPLATE, [call(arguments)]).endswith("assistant:1add{};")


@pytest.mark.parametrize("tools", ["x", {}, [1], ["x"]])
def test_malformed_tools(tools: Any) -> None:
    with pytest.raises(RequestError, match="tools: expected a list of dicts, got "):
        render(TOOL_TEMPLATE, HELLO, tools=tools)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
        "{% endfor %}{% endfor %}",
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'][0]['text'] }}{% endfor %}",
    ],
)
def test_templates_that_read_parts_alone(reference: Any, template: str) -> None:
    texts = [("system", "Be brief."), ("user", "Hello")]
    strings = [{"role": role, "content": text} for role, text in texts]
    parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]
    expected = reference.apply_chat_template(parts, chat_template=template, tokenize=False)
    assert render(template, strings) == render(template, parts) == expected == "<system>Be brief.<user>Hello"


def test_parts_of_text_are_joined_and_the_caller_s_messages_stay() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert render("{{ messages[0].content }}", messages) == "a\nb"
    assert messages == [{"role": "user", "content": parts}]


def assert_refused(error: type[Exception], part: str, template: str | None, messages: Any = HELLO) -> None:
    with pytest.raises(error) as caught:
        render(template, messages)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages|attr('__class__') }}",
        "{{ ''['__class__'] }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{{ raise_exception.__globals__ }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
    ],
)
def test_sandbox(template: str) -> None:
    messages = [dict(HELLO[0])]
    assert_refused(UnsupportedModelError, "not safe to run", template, messages)
    assert messages == HELLO


@pytest.mark.parametrize(
    "template", ["{% for", "{{ 1 + }}", "{% endif %}", "{% nonsense %}", "{{ x | no_such_filter }}"]
)
def test_invalid_template(template: str) -> None:
    assert_refused(UnsupportedModelError, "is not valid", template)


def test_template_nested_too_deep() -> None:
    deep = "{% if a %}" * 5000 + "{% endif %}" * 5000
    assert_refused(UnsupportedModelError, "is not valid", deep)
    assert_refused(UnsupportedModelError, "is not valid", "{{ " + "(" * 5000 + ")" * 5000 + " }}")


def test_endless_loop_ends() -> None:
    assert_refused(RequestError, "Range too big", "{% for i in range(10**9) %}{% endfor %}")


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0].name.first }}", "no attribute 'name'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "failed on them"),
        ("{{ messages[0]() }}", "not callable"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% include '/etc/passwd' %}", "failed on them"),
    ],
)
def test_template_that_fails(template: str, part: str) -> None:
    assert_refused(RequestError, part, template)


def test_no_template() -> None:
    assert_refused(UnsupportedModelError, "no chat template", None)


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([], "at least one message"),
        ("Hello", "expected a list"),
        (None, "expected a list"),
        ({"role": "user", "content": "x"}, "expected a list"),
        (["Hello"], "messages[0]: expected a dict, got str"),
        ([*HELLO, {"role": "user"}], "messages[1]: 'content' is missing"),
        ([{"content": "x"}], "messages[0]: 'role' is missing"),
        (
            [{"role": "user", "content": None}],
            "messages[0]['content']: expected a str or a list of parts, got NoneType",
        ),
        ([{"role": 1, "content": "x"}], "messages[0]['role']: expected a str, got int"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 7}]}],
            "['content'][0]: expected a part of type 'text'",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0]['content'][1]: expected a part of type 'text' with a text, got 'image_url'",
        ),
        ([{"role": "user", "content": ["x"]}], "['content'][0]: expected a part of type 'text' with a text, got 'str'"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "messages[0]['tool_calls'][0]: expected a dict"),
        ([{"role": "user", "content": "x", "tool_calls": 1}], "messages[0]['tool_calls']: expected a list, got int"),
        ([{"role": "user", "tool_calls": []}], "messages[0]: 'content' is missing"),
        ([call("[1]")], "messages[0]['tool_calls'][0]['function']['arguments']: expected a JSON object, got list"),
        ([call("{")], "expected a JSON object, got text that is none"),
        ([call(7)], "expected a JSON object, got int"),
    ],
)
def test_malformed_messages(messages: Any, part: str) -> None:
    assert_refused(RequestError, part, "{{ messages }}", messages)
