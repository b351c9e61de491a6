"""The program: what it prints where, its exit codes, and that every mistake is one line."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.fake_llm import FakeLLM
from support.peft_adapter import write_adapter
from support.tiny_decoder import CONFIG

from fastinfer import _C, LLM, hub
from fastinfer.cli.main import main
from fastinfer.errors import RequestError
from fastinfer.models import open_checkpoint
from fastinfer.sampling_params import SamplingParams
from fastinfer.structured_output import StructuredOutputsParams

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """The models that the program has loaded, all of them fakes that need no file; their class is new for each test."""
    from fastinfer.cli import session

    loaded: list[FakeLLM] = []

    class Recorded(FakeLLM):
        def __init__(self, model: str, *, dtype: str = "auto", **options: object) -> None:
            super().__init__(model, dtype=dtype, **options)
            loaded.append(self)

    monkeypatch.setattr(session, "LLM", Recorded)
    monkeypatch.setattr(hub, "resolve", Path)
    return loaded


@pytest.fixture
def fake(llms: list[FakeLLM]) -> type[FakeLLM]:
    """The class to set answers on."""
    from fastinfer.cli import session

    return session.LLM  # type: ignore[return-value]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the user types, line by line; an exception class is what happens instead of a line."""

    def set_lines(*lines: str | type[BaseException]) -> None:
        remaining = list(lines)

        def read(prompt: str) -> str:
            line = remaining.pop(0) if remaining else EOFError
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)

    return set_lines


def error_line(capsys: Captured) -> str:
    """The one line on stderr, with nothing on stdout."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("fastinfer: error: ")
    return lines[0]


def run_program(*arguments: str | bytes, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastinfer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload]


def test_generate_streams_text_and_then_its_speed(llms: list[FakeLLM], capsys: Captured) -> None:
    assert main(["generate", "Why?"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "The sky is blue.\n"
    pattern = r"3 prompt tokens, first token after \d+ ms, 4 tokens at [\d.]+ tokens/s\n"
    assert re.fullmatch(pattern, captured.err)
    assert (llms[0].model, llms[0].dtype) == (hub.DEFAULT_MODEL, "auto")


def test_generate_of_one_token_has_no_rate(fake: type[FakeLLM], capsys: Captured) -> None:
    fake.pieces = ("Yes",)
    assert main(["generate", "Why?"]) == 0
    assert re.fullmatch(r"3 prompt tokens, first token after \d+ ms, 1 token\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flags", "template", "method"),
    [
        ([], "a template", "stream_chat"),
        (["--raw"], "a template", "stream_outputs"),
        ([], None, "stream_outputs"),
    ],
)
def test_generate_uses_the_chat_template_unless_raw(
    llms: list[FakeLLM], fake: type[FakeLLM], flags: list[str], template: str | None, method: str
) -> None:
    fake.chat_template = template
    assert main(["generate", "Why?", *flags]) == 0
    prompt = [{"role": "user", "content": "Why?"}] if method == "stream_chat" else "Why?"
    assert llms[0].asked[0][:2] == (method, prompt)


def test_generate_with_images(llms: list[FakeLLM], tmp_path: Path, capsys: Captured) -> None:
    """In their order, before the text; files that cannot be read are named before the model is loaded."""
    files = [tmp_path / name for name in ("a.png", "b.jpg")]
    for file in files:
        file.write_bytes(file.name.encode())
    assert main(["generate", "Why?", "--image", str(files[0]), "--image", str(files[1])]) == 0
    images = [{"type": "image", "image": file.name.encode()} for file in files]
    [message] = llms[0].asked[0][1]
    assert message == {"role": "user", "content": [*images, {"type": "text", "text": "Why?"}]}
    capsys.readouterr()
    for arguments, error in (
        (["--image", str(tmp_path / "none.png")], f"--image: {tmp_path / 'none.png'}: No such file or directory"),
        (["--image", str(tmp_path)], f"--image: {tmp_path}: expected a file, got a folder"),
        (["--image", str(files[0]), "--raw"], "--image needs the model's chat template, which --raw leaves out"),
    ):
        assert main(["generate", "Why?", *arguments]) == 2
        assert error in error_line(capsys)
    assert len(llms) == 1


def test_generate_json(llms: list[FakeLLM], capsys: Captured) -> None:
    assert main(["generate", "Why?", "--json", "--model", "some.gguf"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    answer = json.loads(captured.out)
    assert answer.pop("first_token_s") >= 0
    assert answer.pop("tokens_per_s") > 0
    assert answer == {
        "model": "some.gguf",
        "prompt": "Why?",
        "text": "The sky is blue.",
        "token_ids": [0, 1, 2, 3],
        "finish_reason": "length",
        "prompt_tokens": 3,
        "tokens": 4,
    }


def test_options_reach_the_model(llms: list[FakeLLM]) -> None:
    options = (
        "--model m.gguf --dtype float32 --max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 3"
    )
    assert main(["generate", "Why?", *options.split()]) == 0
    assert (llms[0].model, llms[0].dtype) == ("m.gguf", "float32")
    expected = SamplingParams(max_tokens=7, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=3)
    assert llms[0].asked[0][2] == expected


def test_more_options_reach_the_model(llms: list[FakeLLM], tmp_path: Path) -> None:
    options = (
        "--device cuda:1 --speculate 5 --draft-model mtp --kv-cache-dtype int8 --context 900 --max-num-seqs 3 "
        "--mmproj v.gguf "
        "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty -0.3 --min-tokens 2 --stop END --stop ."
    )
    assert main(["generate", "Why?", *options.split()]) == 0
    assert llms[0].options == {
        "device": "cuda:1",
        "num_speculative_tokens": 5,
        "draft_model": "mtp",
        "mmproj": "v.gguf",
        "kv_cache_dtype": "int8",
        "max_model_len": 900,
        "max_num_seqs": 3,
    }
    expected = SamplingParams(
        temperature=0.7,
        top_p=0.95,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        min_tokens=2,
        stop=["END", "."],
    )
    assert llms[0].asked[0][2] == expected
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    forms = {
        f"--json-schema {schema}": StructuredOutputsParams(json={"type": "object"}),
        "--regex [0-9]+": StructuredOutputsParams(regex="[0-9]+"),
        "--choice yes --choice no": StructuredOutputsParams(choice=["yes", "no"]),
    }
    for index, (option, form) in enumerate(forms.items(), start=1):
        assert main(["generate", "Why?", *option.split()]) == 0
        assert llms[index].asked[0][2].structured_outputs == form
        assert llms[index].options == {}


@pytest.mark.parametrize("arguments", [["generate", "Why?"], ["generate", "Why?", "--raw"], ["chat"]])
def test_adapter(llms: list[FakeLLM], typed: Callable[..., None], tmp_path: Path, arguments: list[str]) -> None:
    write_adapter(tmp_path, CONFIG, rank=65)
    typed("Hello")
    assert main([*arguments, "--adapter", str(tmp_path)]) == 0
    assert llms[0].options == {"max_loras": 1, "max_lora_rank": 65}
    assert llms[0].adapters == {str(tmp_path): tmp_path}
    assert llms[0].asked_adapters == [str(tmp_path)]


def test_a_damaged_adapter(llms: list[FakeLLM], tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["generate", "Why?", "--adapter", str(tmp_path)]) == 2
    assert str(tmp_path) in error_line(capsys)
    assert llms == []  # found before the model is loaded


def test_threads(llms: list[FakeLLM]) -> None:
    before, torch_before = _C.get_num_threads(), torch.get_num_threads()
    try:
        assert main(["generate", "Why?", "--threads", "3"]) == 0
        assert (_C.get_num_threads(), torch.get_num_threads()) == (3, 3)
    finally:
        _C.set_num_threads(before)
        torch.set_num_threads(torch_before)
    assert len(llms) == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        (b"\xff", "expected text in UTF-8"),
        (b"[1]", "json must be a JSON schema as an object"),
        (b"{", "json must be a JSON schema"),
        (b"", "json must be a non-empty string"),
    ],
)
def test_a_bad_schema_file(
    content: bytes | None, named: str, tmp_path: Path, llms: list[FakeLLM], capsys: Captured
) -> None:
    path = tmp_path / "schema.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["generate", "x", "--json-schema", str(path)]) == 2
    line = error_line(capsys)
    assert named in line
    assert str(path) in line
    assert llms == []


@pytest.mark.parametrize("prompt", [["-"], []])
def test_prompt_from_standard_input(llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, prompt: list[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Why?\nReally?\n\n"))
    assert main(["generate", *prompt, "--raw"]) == 0
    assert llms[0].asked[0][1] == "Why?\nReally?\n"


def test_no_prompt_in_a_terminal(llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """The program would seem to hang, if it read what nobody knows to type."""
    monkeypatch.setattr(sys, "stdin", Terminal("Why?"))
    assert main(["generate"]) == 2
    assert "PROMPT: expected the text" in error_line(capsys)
    assert main(["generate", "-"]) == 0
    assert llms[0].asked[0][1] == [{"role": "user", "content": "Why?"}]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "-"], ["generate", ""]])
def test_an_empty_prompt(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: Captured, arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert main(arguments) == 2
    assert "PROMPT: expected the text, got nothing" in error_line(capsys)
    assert llms == []


@pytest.mark.parametrize("locale", ["C.UTF-8", "POSIX"])
def test_standard_input_that_is_no_text(locale: str) -> None:
    """It is read before the model is looked up, in locales whose standard input takes any bytes."""
    command = [sys.executable, "-m", "fastinfer", "generate", "--model", "/no/such.gguf"]
    done = subprocess.run(
        command, input=b"Why?\xff\xfe", env=os.environ | {"LC_ALL": locale}, capture_output=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"fastinfer: error: PROMPT: expected UTF-8 on standard input, got "), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "option",
    [
        "--threads",
        "--max-tokens",
        "--temperature",
        "--speculate",
        "--device",
        "--kv-offloading-size",
        "--adapter",
        "--model",
    ],
)
@pytest.mark.parametrize("character", ["9", "x"])
def test_long_values_are_not_repeated(option: str, character: str, capsys: Captured) -> None:
    assert main(["generate", "x", option, character * 5000]) == 2
    line = error_line(capsys)
    assert len(line) < 400
    assert "expected" in line or "must be" in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", "COMMAND"),
        ("nonsense", "nonsense"),
        ("generate x --no-such-option", "--no-such-option"),
        ("generate x --max-tokens many", "--max-tokens"),
        ("generate x --max-tokens 1e3", "--max-tokens"),
        ("generate x --dtype int3", "--dtype"),
        ("generate x --kv-cache-dtype int3", "--kv-cache-dtype"),
        ("generate x --speculate many", "--speculate"),
        ("generate x --regex a --choice b", "--choice"),
        ("pull", "NAME"),
        ("bench --repeats 0", "--repeats"),
        ("bench --new-tokens 1", "--new-tokens"),
        ("bench --prompt-tokens 32,,64", "--prompt-tokens"),
        ("bench --prompt-tokens 32,-1", "--prompt-tokens"),
        ("bench --requests ²", "--requests"),
        ("bench nothing", "nothing"),
        ("bench throughput --only batch,nothing", "nothing"),
        ("bench throughput --rate 0", "--rate"),
        ("bench throughput --rate nan", "--rate"),
        ("bench ablation --rows none,nothing", "nothing"),
        ("bench --repeats 1 end-to-end", "end-to-end"),  # its options come after a benchmark's name
    ],
)
def test_arguments_that_do_not_parse(arguments: str, named: str, capsys: Captured) -> None:
    assert main(arguments.split()) == 2
    assert named in error_line(capsys)


@pytest.mark.parametrize(
    "options",
    [
        "--max-tokens 0",
        "--max-tokens -1",
        "--max-tokens 2147483648",
        "--temperature -0.1",
        "--temperature nan",
        "--temperature 1e308",
        "--top-p 0",
        "--top-p 1.1",
        "--top-k -2",
        "--min-p inf",
        "--repetition-penalty 0",
        "--presence-penalty 3",
        "--frequency-penalty nan",
        "--min-tokens 257",
        "--stop=",
        "--choice=",
        "--regex=",
        "--seed -1",
        "--seed 9223372036854775808",
    ],
)
@pytest.mark.parametrize("command", ["generate x", "chat"])
def test_parameters_out_of_range(command: str, options: str, llms: list[FakeLLM], capsys: Captured) -> None:
    assert main([*command.split(), *options.split()]) == 2
    field = options.split()[0].removeprefix("--").rstrip("=").replace("-", "_")
    assert f"{field} must be" in error_line(capsys)
    assert llms == []  # found before anything was loaded


def test_request_that_fails_half_way(fake: type[FakeLLM], capsys: Captured) -> None:
    fake.finish_reason, fake.stop_reason = "error", "it broke"
    assert main(["generate", "x", "--json"]) == 2
    assert "it broke" in error_line(capsys)


def test_interrupted_generate(llms: list[FakeLLM], fake: type[FakeLLM], capsys: Captured) -> None:
    def interrupt(index: int) -> None:
        if index == 2:
            raise KeyboardInterrupt

    fake.before_piece = staticmethod(interrupt)
    assert main(["generate", "Why?"]) == 130
    assert capsys.readouterr().out == "The sky "
    assert llms[0].num_closed == 1


def test_chat_remembers_the_conversation(llms: list[FakeLLM], typed: Callable[..., None], capsys: Captured) -> None:
    typed("Hello", "   ", "And?", "/quit", "not reached")
    assert main(["chat"]) == 0
    first = [{"role": "user", "content": "Hello"}]
    second = [*first, {"role": "assistant", "content": "The sky is blue."}, {"role": "user", "content": "And?"}]
    assert [messages for _, messages, _ in llms[0].asked] == [first, second]
    assert capsys.readouterr().out == "The sky is blue.\n" * 2


def test_chat_system_message_outlives_a_reset(llms: list[FakeLLM], typed: Callable[..., None]) -> None:
    typed("Hello", "/reset", "Again")
    assert main(["chat", "--system", "Be brief."]) == 0
    system = {"role": "system", "content": "Be brief."}
    assert [messages for _, messages, _ in llms[0].asked] == [
        [system, {"role": "user", "content": "Hello"}],
        [system, {"role": "user", "content": "Again"}],
    ]


def test_chat_help(llms: list[FakeLLM], typed: Callable[..., None], capsys: Captured) -> None:
    typed("/help")
    assert main(["chat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} >= {"/help", "/system", "/save", "/load", "/reset", "/quit", "Ctrl-C"}
    assert llms[0].asked == []


def test_chat_system_message_can_be_changed(llms: list[FakeLLM], typed: Callable[..., None]) -> None:
    typed("/system  Be  brief. ", "Hello", "/system Be rude.", "And?", "/system", "/reset", "Why?")
    assert main(["chat", "--system", "Be kind."]) == 0
    hello, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The sky is blue."}
    assert [messages for _, messages, _ in llms[0].asked] == [
        [{"role": "system", "content": "Be  brief."}, hello],
        [{"role": "system", "content": "Be rude."}, hello, answer, {"role": "user", "content": "And?"}],
        [{"role": "user", "content": "Why?"}],
    ]


def test_chat_is_saved_and_loaded(
    llms: list[FakeLLM], typed: Callable[..., None], tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "my chat.json"
    typed("Grüße", f"/save {file}", f"/save {file}")  # a conversation may be saved again
    assert main(["chat", "--system", "Be brief."]) == 0
    typed("forgotten", f"/load {file}", "And?", "/reset", "Why?")
    assert main(["chat"]) == 0
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße"}
    answer = {"role": "assistant", "content": "The sky is blue."}
    assert json.loads(file.read_text(encoding="utf-8")) == [system, question, answer]
    assert [messages for _, messages, _ in llms[1].asked[1:]] == [
        [system, question, answer, {"role": "user", "content": "And?"}],
        [system, {"role": "user", "content": "Why?"}],
    ]
    assert capsys.readouterr().err == ""


def test_a_chat_is_not_read_from_a_fifo(tmp_path: Path) -> None:
    """The program would wait for a writer, so another process tries it."""
    os.mkfifo(tmp_path / "fifo")
    code = """
import sys
from pathlib import Path
from fastinfer.cli.conversation import Conversation
from fastinfer.errors import RequestError
for method in (Conversation().load, Conversation().save):
    try:
        method(Path(sys.argv[1]))
    except RequestError as error:
        print(error)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "fifo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"{tmp_path / 'fifo'}: expected a file, got a FIFO"] * 2, done.stderr


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("/nonsense", "unknown command /nonsense: /help lists them"),
        ("/quit now", "/quit takes no argument, got 'now'"),
        ("/save", "/save needs a FILE"),
        ("/load", "/load needs a FILE"),
        ("/load nowhere.json", "nowhere.json: No such file"),
        ("/save nowhere/chat.json", "nowhere/chat.json: No such file"),
        ("/save a\0b", "embedded null"),
        ("/load a\0b", "expected a conversation"),
        ("/load ~nobody-here/x", "~nobody-here/x: No such file"),
        ("/load binary", "binary: expected a conversation as /save writes it"),
        ("/load text", "text: expected a conversation as /save writes it"),
        ("/load object", "object: expected a conversation as /save writes it"),
        ("/load wrong", "wrong: expected a conversation as /save writes it"),
        ("/load deep", "deep: expected a conversation as /save writes it"),
        ("/save binary", "binary: expected a conversation as /save writes it"),  # what else it is stays
    ],
)
def test_mistakes_in_a_chat_do_not_end_it(
    llms: list[FakeLLM],
    typed: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    command: str,
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"\xff")
    Path("text").write_text("Hello")
    Path("object").write_text('{"role": "user", "content": "Hello"}')
    Path("wrong").write_text('[{"role": "user", "content": 1}]')
    Path("deep").write_text("[" * 100_000)
    typed(command, "Hello")
    assert main(["chat"]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"fastinfer: error: {captured.err.removeprefix('fastinfer: error: ').rstrip()}\n"
    assert named in captured.err
    assert [messages for _, messages, _ in llms[0].asked] == [[{"role": "user", "content": "Hello"}]]
    assert Path("binary").read_bytes() == b"\xff"


def test_a_message_may_begin_with_a_slash(llms: list[FakeLLM], typed: Callable[..., None]) -> None:
    typed("/etc/passwd is what?", "/ is what?")
    assert main(["chat"]) == 0
    assert [messages[-1]["content"] for _, messages, _ in llms[0].asked] == ["/etc/passwd is what?", "/ is what?"]


def test_interrupt_stops_the_answer_and_not_the_chat(
    llms: list[FakeLLM], fake: type[FakeLLM], typed: Callable[..., None], capsys: Captured
) -> None:
    before = signal.getsignal(signal.SIGINT)
    fake.before_piece = staticmethod(lambda index: signal.raise_signal(signal.SIGINT) if index == 1 else None)
    typed("Hello", KeyboardInterrupt, "And?")
    assert main(["chat"]) == 0
    assert capsys.readouterr().out.startswith("The sky  [stopped]\n")
    assert llms[0].num_closed == 2  # aborted, not left running
    assert llms[0].asked[1][1][1] == {"role": "assistant", "content": "The sky "}
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """As in a terminal: a program that a shell starts in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_second_interrupt_ends_the_program(fake: type[FakeLLM], typed: Callable[..., None]) -> None:
    def interrupt_twice(index: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    fake.before_piece = staticmethod(interrupt_twice)
    typed("Hello")
    assert main(["chat"]) == 130


def test_chat_goes_on_after_a_refused_request(
    llms: list[FakeLLM], fake: type[FakeLLM], typed: Callable[..., None], capsys: Captured
) -> None:
    def refuse_the_first(index: int) -> None:
        if len(llms[0].asked) == 1:
            raise RequestError("prompt must be shorter")

    fake.before_piece = staticmethod(refuse_the_first)
    typed("Much too long", "Short")
    assert main(["chat"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "fastinfer: error: prompt must be shorter; /reset starts over\n"
    assert captured.out == "The sky is blue.\n"
    assert llms[0].asked[1][1] == [{"role": "user", "content": "Short"}]


def test_chat_needs_a_template(fake: type[FakeLLM], capsys: Captured) -> None:
    fake.chat_template = None
    assert main(["chat", "--model", "base.gguf"]) == 2
    assert "base.gguf" in error_line(capsys)


def test_models_and_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(hub, "pull", lambda name: tmp_path / name)
    assert main(["pull", "any"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'any'}\n"
    monkeypatch.setenv("FASTINFER_CACHE", str(tmp_path))
    assert main(["models"]) == 0
    assert f"{hub.DEFAULT_MODEL} (default)\n" in capsys.readouterr().out


def test_pull_of_an_unknown_name(capsys: Captured) -> None:
    assert main(["pull", "nonsense"]) == 2
    assert hub.DEFAULT_MODEL in error_line(capsys)


def test_info_of_a_broken_installation(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setitem(sys.modules, "fastinfer._C", None)  # import of it fails
    monkeypatch.delattr("fastinfer._C", raising=False)
    assert main(["info"]) == 1
    assert "does not load" in capsys.readouterr().out
    assert main(["info", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["extension"].keys() == {"error"}


def test_info(capsys: Captured) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    cpu = found["cpu"]
    assert cpu["isa"] in cpu["isas_built"]
    assert cpu["num_threads"] == _C.get_num_threads()
    assert cpu["cores"] == len(os.sched_getaffinity(0))
    assert found["extension"]["torch_target"] == "2.11"
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("fastinfer", "torch", "python", "cpu", "features", "kernels", "threads", "extension", "cuda", "gpus")
    ]
    assert cpu["isa_reason"] in lines[5]


def test_help_and_light_commands_do_not_import_torch() -> None:
    code = (
        "import contextlib, sys\n"
        "from fastinfer.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "main(['models'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("module", ["argparse", "fastinfer.cli.commands", "fastinfer.hub", "fastinfer.version"])
def test_interrupted_while_it_starts(module: str) -> None:
    code = """
import signal, sys
from fastinfer.cli.main import main

class Interrupting:
    @staticmethod
    def find_spec(name, *rest):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting)
sys.exit(main(["models"]))
"""
    done = subprocess.run([sys.executable, "-c", code, module], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("arguments", [["models"], ["--help"], ["generate", "--help"], ["info"]])
def test_reader_of_the_output_has_gone(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # argparse ignores the error if the text is written at once
    command = [sys.executable, "-m", "fastinfer", *arguments]
    program = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(write)
    assert (program.returncode, program.stderr) == (141, "")


def test_reader_of_output_and_errors_has_gone() -> None:
    read, write = os.pipe()
    os.close(read)
    program = subprocess.run([sys.executable, "-m", "fastinfer", "nonsense"], stdout=write, stderr=write)
    os.close(write)
    assert program.returncode == 141


@pytest.mark.parametrize(
    ("arguments", "redirection", "expected"),
    [
        ("models", ">&-", (0, "", "")),
        ("--help", ">&-", (0, "", "")),
        ("nonsense", "2>&-", (2, "", "")),  # not on stdout instead
        ("nonsense", ">&- 2>&-", (2, "", "")),
    ],
)
def test_closed_streams(arguments: str, redirection: str, expected: tuple[int, str, str]) -> None:
    command = f"exec {sys.executable} -m fastinfer {arguments} {redirection}"
    program = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert (program.returncode, program.stdout, program.stderr) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("redirection", "codes"), [(">&-", "0"), ("| true", "141 0")])
def test_generate_without_a_reader(model_path: Path, redirection: str, codes: str) -> None:
    program = f"{sys.executable} -m fastinfer generate Hello --max-tokens 20 --model {model_path} {redirection}"
    command = ["bash", "-c", f"{program}; echo ${{PIPESTATUS[@]}}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == codes
    assert "Traceback" not in ended.stderr
    assert "Exception" not in ended.stderr


@pytest.mark.slow
def test_program_generates_with_the_real_model(model_path: Path) -> None:
    # float32, because the first token is nearly a tie: computing in less may rightly begin differently.
    options = ["--dtype", "float32", "--temperature", "0", "--max-tokens", "7"]
    arguments = ["generate", "-", "--model", str(model_path), *options]
    streamed = run_program(*arguments, input="What is the capital of France?\n")
    assert (streamed.returncode, streamed.stdout) == (0, "The capital of France is Paris.\n")
    assert re.fullmatch(r"\d+ prompt tokens, first token after \d+ ms, 7 tokens at [\d.]+ tokens/s\n", streamed.stderr)
    answer = json.loads(run_program(*arguments, "--json", input="What is the capital of France?").stdout)
    assert f"{answer['text']}\n" == streamed.stdout
    assert len(answer["token_ids"]) == answer["tokens"] == 7


@pytest.mark.slow
def test_an_adapter_changes_the_answer(model_path: Path, tmp_path: Path, capsys: Captured) -> None:
    write_adapter(tmp_path, open_checkpoint(model_path).config, rank=3, size=0.2)
    options = ["--model", str(model_path), "--dtype=float32", "--temperature=0", "--max-tokens=5"]
    assert main(["generate", "Hello", *options]) == 0
    plain = capsys.readouterr().out
    assert main(["generate", "Hello", *options, "--adapter", str(tmp_path)]) == 0
    adapted = capsys.readouterr().out
    llm = LLM(str(model_path), dtype="float32", max_loras=1, max_model_len=256)
    llm.load_adapter("any", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=5)
    expected = llm.chat([{"role": "user", "content": "Hello"}], params, adapter="any").outputs[0].text
    assert adapted == f"{expected}\n" != plain


@pytest.mark.slow
def test_program_chats_with_the_real_model(model_path: Path) -> None:
    """The first answer is what a single prompt gives."""
    options = ["--model", str(model_path), "--temperature=0", "--max-tokens=8"]
    chat = run_program("chat", *options, input="Hello\n/quit\n")
    assert (chat.returncode, chat.stderr) == (0, "")
    assert chat.stdout == run_program("generate", "Hello", *options).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "x", "--model", "/no/such.gguf"], "/no/such.gguf"),
        (["generate", "x", "--top-p", "2"], "top_p"),
        (["generate", "x", "--regex", "("], "regex cannot be enforced"),
        (["generate", "a " * 20_000], "prompt"),  # longer than the context
        (["generate", ""], "PROMPT"),
        (["generate", "x", "--model", __file__], "GGUF"),
        (["bench", "--model", "/no/such.gguf"], "/no/such.gguf"),
    ],
    ids=["model", "parameter", "regex", "context", "empty", "format", "bench"],
)
def test_program_ends_with_one_line(arguments: list[str], named: str) -> None:
    program = run_program(*arguments, *(["--raw"] if arguments[0] == "generate" else []))
    assert (program.returncode, program.stdout) == (2, "")
    assert len(program.stderr.splitlines()) == 1, program.stderr
    assert program.stderr.startswith("fastinfer: error: ")
    assert named in program.stderr


@pytest.mark.slow
def test_an_instruction_set_that_is_none() -> None:
    program = run_program("info", env=os.environ | {"FASTINFER_CPU_ISA": "foo"})
    assert (program.returncode, program.stderr) == (1, "")
    [line] = [line for line in program.stdout.splitlines() if line.startswith("extension")]
    assert re.fullmatch("extension  does not load: FASTINFER_CPU_ISA must be one of portable, .*, got 'foo'", line)


@pytest.mark.slow
@pytest.mark.usefixtures("model_path")
def test_a_folder_in_which_no_file_can_be_made() -> None:
    sizes = ["--prompt-tokens", "8", "--new-tokens", "2", "--requests", "1", "--repeats", "1"]
    program = run_program("bench", *sizes, "--out", "/proc")
    assert program.returncode == 2
    assert re.search(r"run/s\]\nfastinfer: error: \[Errno \d+\] [A-Za-z ]+: '/proc/end_to_end.json'\n$", program.stderr)


@pytest.mark.slow
def test_closed_standard_input_and_a_narrow_terminal() -> None:
    command = f"exec {sys.executable} -m fastinfer generate -"
    program = subprocess.run(["sh", "-c", f"{command} <&-"], capture_output=True, text=True, timeout=120)
    assert (program.returncode, len(program.stderr.splitlines())) == (2, 1), program.stderr
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    path = "/no/such/\u00e9.gguf".encode()  # whatever the locale is
    program = run_program("generate", "x", "--model", path, env=ascii_only)
    assert (program.returncode, len(program.stderr.splitlines())) == (2, 1), program.stderr
    assert program.stderr.startswith("fastinfer: error: model '/no/such/")
