"""Templates that take time or memory without bound, and a process that is shared, interrupted or forked."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fastinfer.errors import RequestError
from fastinfer.tokenizers import chat_template
from fastinfer.tokenizers.template_process import TemplateProcess

HELLO = [{"role": "user", "content": "Hello"}]
SHARED = "{% set ns = namespace(x=[1]) %}{% for _ in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"

# Each takes minutes or gigabytes without limits.
ENDLESS = [
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'a' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ 10**(10**9) > 1 }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ '\\t'.expandtabs(10**9) }}",
    "{{ 'a\\nb' | indent(10**10) }}",
    "{{ [1] | batch(10**9, 0) | list }}",
    "{{ lipsum(n=10**7) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% set ns = namespace(s='ab') %}{% for _ in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    SHARED + "{{ ns.x }}",
    SHARED + "{{ ns.x | tojson }}",
    SHARED.replace("ns.x", "ns.y") + SHARED + "{{ ns.x == [[ns.x[0], 1], 2] }}" + "{{ ns.x | string | length }}",
    "{{ range(99999) | map('string') | join('a' * 1000000) | length }}",
    "{{ 'a' * 90000000 }}",
]


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(memory=200 << 20, seconds=1)
    yield process
    process.close()


@pytest.mark.parametrize("template", ENDLESS, ids=range(len(ENDLESS)))
def test_limits(process: TemplateProcess, template: str) -> None:
    kind, message = process.render(template, {"messages": HELLO})
    assert kind in ("limit", "failed")
    assert message
    assert process.render("{{ messages[0].content }}", {"messages": HELLO}) == ("text", "Hello")


def test_memory_of_the_calling_process_does_not_grow(process: TemplateProcess) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for template in ENDLESS[:5]:
        process.render(template, {"messages": HELLO})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_the_error_is_the_request_s(monkeypatch: pytest.MonkeyPatch, process: TemplateProcess) -> None:
    monkeypatch.setattr(chat_template, "_process", process)
    message = "failed on them: more than 1 s of processor time, 60 s or 200 MiB"
    with pytest.raises(RequestError, match=message):
        chat_template.render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", HELLO)


def test_time_is_counted_for_each_call() -> None:
    process = TemplateProcess(seconds=1)
    half = "{% for i in range(99999) %}{% for j in range(20) %}{% endfor %}{% endfor %}"
    for _ in range(20):  # together more than a process may take
        assert process.render(half, {}) == ("text", "")
    process.close()


def test_threads_get_their_own_answers(process: TemplateProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda i: process.render("{{ i }}", {"i": i}), range(500))
        assert [text for _, text in answers] == [str(i) for i in range(500)]


def test_an_interrupted_call_leaves_no_answer_behind(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = process._exchange

    def interrupted(request: str) -> str:
        exchange(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.render("first", {})
    monkeypatch.undo()
    assert process.render("second", {}) == ("text", "second")


def test_a_process_that_was_killed_is_started_again(process: TemplateProcess) -> None:
    """Nobody is told of limits that this request did not reach."""
    for _ in range(3):
        assert process.render("a", {}) == ("text", "a")
        assert process._process is not None
        process._process.kill()
        process._process.wait()


def test_a_process_that_is_stopped_ends() -> None:
    process = TemplateProcess(waiting_seconds=1)
    for text in ("a", "b" * 1_000_000):  # more than a pipe holds
        assert process.render("{{ text }}", {"text": "c"}) == ("text", "c")
        assert process._process is not None
        process._process.send_signal(signal.SIGSTOP)
        kind, message = process.render("{{ text }}", {"text": text})
        assert kind == "limit"
        assert "1 s or 512 MiB" in message
    process.close()


def test_a_fork_has_its_own_process(process: TemplateProcess) -> None:
    assert process.render("a", {}) == ("text", "a")
    child = os.fork()
    if child == 0:
        with process._lock:
            pass
        os._exit(0 if process.render("child", {}) == ("text", "child") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process.render("b", {}) == ("text", "b")


def test_the_process_ends_with_its_parent() -> None:
    program = (
        "import os; from fastinfer.tokenizers.template_process import TemplateProcess; p = TemplateProcess();"
        "p.render('a', {}); print(p._process.pid, flush=True); os._exit(0)"
    )
    pid = int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.01)  # the test's own time limit ends this


@pytest.mark.parametrize("text", ["\ud800", "\u2028\n\r", "日本 👍🏽\0", '"\\'])
def test_any_characters(process: TemplateProcess, text: str) -> None:
    assert process.render("{{ t }}" + text.rstrip(), {"t": text}) == ("text", text + text.rstrip())


def test_mappings_of_other_classes(process: TemplateProcess) -> None:
    given: Mapping[str, Any] = MappingProxyType({"a": MappingProxyType({"b": (1, 2)})})
    assert process.render("{{ x.a.b }}", {"x": given}) == ("text", "[1, 2]")


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", 10**5000], ids=range(4))
def test_variables_that_json_does_not_have(process: TemplateProcess, value: object) -> None:
    with pytest.raises(RequestError, match="messages and variables of the chat template: expected JSON"):
        process.render("a", {"x": value})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RequestError, match="expected JSON"):
        process.render("a", {"x": endless})
