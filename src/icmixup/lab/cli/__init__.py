"""The icmixup command: compare, train, report, retrain, predict, export, evaluate, paper, analyse, data.

Arguments in, exit code out.

The flags of all commands are parsed without torch, so that --help and a mistyped flag are answered at once;
each command imports what it needs.
"""

from __future__ import annotations

import errno
import functools
import io
import operator
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

from icmixup._install import install_hint

DESCRIPTION = """Does Infinite Class Mixup help on your data? One command trains several methods with several
seeds and reports, with confidence intervals, which one helps.

  icmixup compare                      on scikit-learn's digits, no download needed: minutes
  icmixup compare path/to/images       on a folder of images, one subfolder per class
  icmixup --version                    which version this is

`icmixup compare --help` explains its flags and has more examples, and so does every other command."""
COMMANDS = (
    "compare",
    "train",
    "report",
    "retrain",
    "predict",
    "export",
    "evaluate",
    "paper",
    "analyse",
    "data",
)
WITH_RECIPE = ("compare", "train")  # their defaults come from a recipe, which depends on data and flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: success, 1: a check failed or runs were lost, 2: error with a message, 129, 130 or 143: ended by
    SIGHUP, Ctrl-C or SIGTERM, 141: the reader of the output has exited.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # Latin-1 has no arrow, for example: a table after hours
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with signals_as_interrupts(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # addressed to developers
            warnings.showwarning = lambda message, *_: show_warning(message)
            try:
                return run_command(args)
            finally:
                sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        code = 128 + getattr(interrupt, "signum", signal.SIGINT)
        return print_error("interrupted; run the same command again to resume", code)
    except BrokenPipeError:  # the reader of our output, for example head or less, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return 141
    except Exception as error:
        message = explain(error)
        if message is None or "--debug" in args:
            raise
        print_error(message, 2, every_rank=True)
        tell_other_ranks(message)
        return 2


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C that asks the process to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def raise_terminated(signum: int, frame: object) -> None:
    raise Terminated(signum)


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Handle SIGTERM, which batch systems send before they end a job, and SIGHUP of a closed terminal like
    Ctrl-C; nohup's wish to ignore SIGHUP is respected."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    wanted = [signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in wanted}
    for number in wanted:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, raise_terminated)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(args: Sequence[str]) -> int:
    if args and args[0] == "--version":
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"icmixup {version('icmixup')}")
        except PackageNotFoundError:  # the source without an installation
            print("icmixup, version unknown")
        return 0
    if args and not args[0].startswith("-") and args[0] not in COMMANDS:
        similar = get_close_matches(args[0], COMMANDS, n=1)
        hint = f"did you mean {similar[0]}? " if similar else ""
        raise ValueError(f"unknown command {args[0]!r}; {hint}the commands are {', '.join(COMMANDS)}")
    from icmixup.lab.cli.pretrained import recipe_for
    from icmixup.lab.cli.shared import default_recipe, given_flags, requested_recipe

    name = requested_recipe(args)
    flags = parse(args or ["--help"], name or "quick")
    command = args[0]
    run = getattr(command_module(command), f"run_{command}")
    if command not in WITH_RECIPE:
        return int(run(flags))
    recipe = name or recipe_for(flags.dataset, flags.pretrained)
    recipe = recipe or default_recipe(flags.dataset, flags.where.device)
    if recipe != (name or "quick"):  # parsed again with the defaults of that recipe
        flags = parse(args, recipe)
    return int(run(flags, recipe, given_flags(args)))


def command_module(name: str) -> Any:
    """The module of a command: SUMMARY, HELP, the class NameFlags of its flags, and run_name."""
    return import_module(f"icmixup.lab.cli.{name}")


def parse(args: Sequence[str], recipe: str) -> Any:
    """The flags of the command that `args` name; the recipe provides the defaults of compare and train."""
    import tyro
    from tyro import conf

    from icmixup.lab.cli.pretrained import start_recipe
    from icmixup.lab.cli.shared import groups_of, join_lines_of_help

    def command(name: str) -> Any:
        module = command_module(name)
        flags = getattr(module, f"{name.capitalize()}Flags")
        text = module.SUMMARY
        if args and args[0] == name:  # only its flags are shown
            text = module.HELP
            join_lines_of_help(flags)
        given = {}
        if name in WITH_RECIPE:
            start = start_recipe(recipe, args)
            given["default"] = flags(model=start.model, **groups_of(start))
        subcommand = conf.subcommand(name=name, description=text, **given)
        return Annotated[flags, subcommand]

    commands = functools.reduce(operator.or_, map(command, COMMANDS))
    config = (conf.OmitArgPrefixes, conf.PositionalMetavarFromFieldName)
    return tyro.cli(commands, args=args, prog="icmixup", description=DESCRIPTION, config=config)


def print_error(message: str, code: int, *, every_rank: bool = False) -> int:
    """Print one line on stderr; under torchrun only from the first rank, unless that would hide an error."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or every_rank:
        print(f"icmixup{'' if rank == '0' else f', rank {rank}'}: {message}", file=sys.stderr, flush=True)
    return code


def tell_other_ranks(message: str) -> None:
    """Under torchrun, end the wait of ranks that have not failed; imports torch only there."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from icmixup.lab.training.ranks import report_error

        report_error(message)


def show_warning(message: Warning | str) -> None:
    """Print a warning as one line, without its position in our code."""
    print_error(str(message), 0)


def explain(error: Exception) -> str | None:
    """A one-line message for errors that a user can fix; None for bugs."""
    if isinstance(error, ModuleNotFoundError):
        return f"this command needs {error.name}, which is not installed: {install_hint('lab')}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f", writing {error.filename}" if error.filename else ""
        return f"the disk is full{where}; free some space and run the same command again to resume"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError):
        return " ".join(str(error).split())
    if isinstance(error, RuntimeError) and os.environ.get("WORLD_SIZE", "1") != "1" and is_lost_rank(error):
        return "another rank failed or was lost; its own message gives the reason"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "out of memory; use a smaller --batch-size, --image-size or --model, or fewer --workers"
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU is out of memory; use a smaller --batch-size or --model, or fewer --workers"
    return None


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether an error of torch.distributed says that another process is gone."""
    return any(word in str(error) for word in ("Connection", "connection", "gloo", "NCCL", "timed out"))
