"""icmixup compare | train | paper | analyse | data: words in, exit code out.

Nothing heavy is imported before it is needed, so that --help answers at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import version

HELP = """usage: icmixup {compare,train,paper,analyse,data} ...  |  icmixup --version

Does Infinite Class Mixup help on your data? One command trains several methods with several seeds and says,
with intervals, which one helps.

  icmixup compare                      on scikit-learn's digits, which are installed already: minutes
  icmixup compare path/to/images       on a folder of images, one subfolder a class
  icmixup train                        one run; with no flags, the paper's on CIFAR-100
  icmixup paper                        the paper's tables and figures, our numbers beside its own
  icmixup analyse RUN_FOLDER           what a trained run makes of mixed images, as in the paper's last figure
  icmixup data list                    datasets, and where they are
  icmixup data get cifar100            bring one here
  icmixup data check cifar100          read one, and test what must be true of it

`icmixup compare --help` and `icmixup train --help` explain every flag."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it went well, 2 with one sentence if not, 130 if it was stopped, 141 if unheard."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        with terminated_as_interrupted(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # meant for those who write programs
            warnings.showwarning = lambda message, *_: show_warning(message)
            try:
                return find_command(args)(args[1:])
            finally:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return complain("stopped; the same command goes on from there", 130)
    except BrokenPipeError:  # who reads our output, head or less, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is buffered still
        return 141
    except Exception as error:
        sentence = explain(error)
        if sentence is None or "--debug" in args:
            raise
        return complain(sentence, 2)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, by which batch systems take a machine back, ends a command as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say what a signal does
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


Command = Callable[[Sequence[str]], int]


def find_command(args: Sequence[str]) -> Command:
    commands: dict[str, Command] = {
        "compare": compare,
        "train": train,
        "paper": paper,
        "analyse": analyse,
        "data": data,
    }
    name = args[0] if args else "--help"
    if name in ("-h", "--help"):
        return lambda _: say(HELP)
    if name == "--version":
        return lambda _: say(f"icmixup {version('icmixup')}")
    if name not in commands:
        near = get_close_matches(name, commands, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"no command {name!r}; {hint}the commands are {', '.join(commands)}")
    return commands[name]


def compare(args: Sequence[str]) -> int:
    from icmixup.lab.cli.flags import parse_compare

    flags, start = parse_compare(args)
    from icmixup.lab.cli.commands import run_compare

    return run_compare(flags, start)


def train(args: Sequence[str]) -> int:
    from icmixup.lab.cli.flags import parse_train

    flags = parse_train(args)
    from icmixup.lab.cli.commands import run_train

    return run_train(flags)


def paper(args: Sequence[str]) -> int:
    from icmixup.lab.cli.paper import parse_paper, run_paper

    return run_paper(parse_paper(args))


def analyse(args: Sequence[str]) -> int:
    from icmixup.lab.cli.analyse import parse_analyse, run_analyse

    return run_analyse(parse_analyse(args))


def data(args: Sequence[str]) -> int:
    from icmixup.lab.cli.flags import parse_data

    flags = parse_data(args)
    from icmixup.lab.cli.commands import run_data

    return run_data(flags)


def say(text: str) -> int:
    print(text)
    return 0


def complain(sentence: str, code: int) -> int:
    """One line on stderr; under torchrun the first rank speaks for all."""
    if os.environ.get("RANK", "0") == "0":
        print(f"icmixup: {sentence}", file=sys.stderr)
    return code


def show_warning(message: Warning | str) -> None:
    """A warning as one line: where in our files it was raised is nothing to a user."""
    complain(str(message), 0)


def explain(error: Exception) -> str | None:
    """One sentence for what a user can mend; None for what is our mistake."""
    if isinstance(error, ModuleNotFoundError):
        return f"the laboratory needs {error.name}, which is not installed; pip install icmixup[lab]"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f", writing {error.filename}" if error.filename else ""
        return (
            f"the disk is full{where}; free some room and give the same command again, it goes on from there"
        )
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError):
        return " ".join(str(error).split())
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU's memory is full; give a smaller --batch-size or --model, or fewer --workers"
    return None
