"""The commands of the program ``fastinfer``: their arguments, and how one of them is run."""

import argparse
import errno
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import fastinfer
from fastinfer.cli import arguments, checks, router_arguments, serve_arguments, simulate_arguments
from fastinfer.cli.streams import discard_output
from fastinfer.errors import FastinferError


@dataclass(frozen=True)
class Command:
    """A command of the program.

    Attributes:
        help: its line in ``fastinfer --help``.
        add_arguments: function that declares its arguments.
        module: module whose ``run(args)`` executes it; ``None`` if the arguments decide, as ``args.module``.
        check: function that checks its arguments before the module is imported.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    module: str | None
    check: Callable[[argparse.Namespace], None] = checks.check_nothing


COMMANDS = {
    "generate": Command(
        "continue or answer one prompt", arguments.add_generate, "fastinfer.cli.generate", checks.check_generate
    ),
    "chat": Command(
        "talk with a model; Ctrl-C stops an answer, Ctrl-D ends",
        arguments.add_chat,
        "fastinfer.cli.chat",
        checks.check_chat,
    ),
    "serve": Command(
        "serve a model over HTTP, as OpenAI does",
        serve_arguments.add_serve,
        None,
        serve_arguments.check_serve,
    ),
    "router": Command(
        "share requests among several servers",
        router_arguments.add_router,
        "fastinfer.cli.router",
        router_arguments.check_router,
    ),
    "pull": Command("download a model and print where it is", arguments.add_pull, "fastinfer.cli.pull"),
    "models": Command("list the models known by name", arguments.add_models, "fastinfer.cli.models"),
    "info": Command(
        "describe this installation: versions, CPU, GPUs", arguments.add_info, "fastinfer.cli.info", checks.check_info
    ),
    "bench": Command("measure speed and memory on a model", arguments.add_bench, None, checks.check_bench),
    "simulate": Command(
        "predict latencies and cost of a trace, without a model",
        simulate_arguments.add_simulate,
        "fastinfer.cli.simulate",
        simulate_arguments.check_simulate,
    ),
    "quantize": Command(
        "write a quantised copy of a model", arguments.add_quantize, "fastinfer.cli.quantize", checks.check_quantize
    ),
    "train-head": Command(
        "train a draft head for a model", arguments.add_train_head, "fastinfer.cli.train_head", checks.check_train_head
    ),
    "distill": Command(
        "train a smaller model on what a model says",
        arguments.add_distill,
        "fastinfer.cli.distill",
        checks.check_distill,
    ),
    "eval": Command("evaluate models on a text", arguments.add_eval, "fastinfer.cli.eval", checks.check_eval),
}


class _UsageError(FastinferError):
    """The arguments do not parse."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print the whole usage before it; one line is easier to read and the same for all errors.
        raise _UsageError(f"{message} (see {self.prog} --help)")


def run(argv: Sequence[str] | None) -> int:
    """Run one command, print its error if it fails, and return the exit code.

    Raises:
        BrokenPipeError: the reader of the output has gone.
    """
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        # Commands are imported only when they run: torch alone takes 1.5 s, and a wrong argument needs none of it.
        execute = _import_command(COMMANDS[args.command].module or args.module)
        if getattr(args, "threads", None) is not None:
            from fastinfer.utils.torch_threads import set_num_threads

            set_num_threads(args.threads)
        code = execute(args)
        sys.stdout.flush()
        return code
    except SystemExit:  # argparse has printed the help or the version
        sys.stdout.flush()
        raise
    except BrokenPipeError:
        raise
    except (FastinferError, ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            discard_output()
        print(f"fastinfer: error: {error}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command, whose name comes first, once they have been checked.

    Raises:
        FastinferError: an argument is wrong.
    """
    args = _parser().parse_args(_with_benchmark(argv))
    COMMANDS[args.command].check(args)
    return args


def _import_command(module: str) -> Callable[[argparse.Namespace], int]:
    """Import a command's ``run``, without collecting garbage meanwhile.

    Importing torch makes 160,000 objects that stay. Collections during the import, and the first one after it, take a
    sixth of the time until the first token, so what was imported is also exempted from later ones.
    """
    was_enabled, is_first = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        run: Callable[[argparse.Namespace], int] = importlib.import_module(module).run
    finally:
        if was_enabled:
            gc.enable()
    if is_first:
        gc.freeze()
    return run


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fastinfer", description="Run large language models on this machine.")
    parser.add_argument("--version", action="version", version=f"fastinfer {fastinfer.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help, description=arguments.as_sentence(command.help))
        command.add_arguments(subparser)
    return parser


def _with_benchmark(argv: Sequence[str]) -> Sequence[str]:
    """Insert the default benchmark if ``bench`` is followed by options or by nothing."""
    if argv[:1] == ["bench"] and (len(argv) == 1 or (argv[1].startswith("-") and argv[1] not in ("-h", "--help"))):
        return ["bench", arguments.DEFAULT_BENCHMARK, *argv[1:]]
    return argv
