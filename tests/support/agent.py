"""A model that reasons, calls a tool, and answers with what the tool has returned; for tests of clients."""

from support.scripted import ANSWER, ScriptedModel, ScriptedTokenizer, scripted_model

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{{ tools | tojson if tools }}{# <think> #}" + ANSWER
)
CONTROL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
ARGUMENTS = {"city": 'Zürich "HB"', "days": 3}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich \\"HB\\"", "days": 3}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
RESULT = "It is sunny."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def agent() -> ScriptedModel:
    """Two calls first; the result of a tool is repeated."""

    def answer(prompt: str) -> str:
        if RESULT in prompt:
            return f"<think>\nGood.\n</think>\n\nThe tool says: {RESULT}"
        return f"<think>\nI need a tool.\n</think>\n\nLet me see.\n{CALL}\n{OTHER_CALL}"

    return scripted_model(ScriptedTokenizer(TEMPLATE, control=CONTROL), answer)
