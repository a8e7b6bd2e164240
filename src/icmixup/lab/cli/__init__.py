"""icmixup compare | train | paper | analyse | data: command-line arguments in, exit code out.

The flags of all commands are parsed without torch, so that --help and a mistyped flag are answered at once;
each command imports what it needs.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Annotated, Any

DESCRIPTION = """Does Infinite Class Mixup help on your data? One command trains several methods with several
seeds and reports, with confidence intervals, which one helps.

  icmixup compare                      on scikit-learn's digits, no download needed: minutes
  icmixup compare path/to/images       on a folder of images, one subfolder per class
  icmixup train                        one run; with no flags, the paper's on CIFAR-100
  icmixup paper                        the paper's tables and figures, our results beside them
  icmixup analyse RUN_FOLDER           what a trained run does with mixed images, as in the paper's last
  figure icmixup data list                    datasets, and where they are icmixup data get cifar100
  download a dataset icmixup data check cifar100          validate a dataset

`icmixup compare --help` and `icmixup train --help` explain every flag."""
COMMANDS = ("compare", "train", "paper", "analyse", "data")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit code 0: success, 2: error with a message, 130: interrupted, 141: broken pipe."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        with sigterm_as_interrupt(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # addressed to developers
            warnings.showwarning = lambda message, *_: show_warning(message)
            try:
                return run_command(args)
            finally:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return print_error("interrupted; run the same command again to resume", 130)
    except BrokenPipeError:  # the reader of our output, for example head or less, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return 141
    except Exception as error:
        message = explain(error)
        if message is None or "--debug" in args:
            raise
        return print_error(message, 2)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM, which batch systems send before they end a job, like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_command(args: Sequence[str]) -> int:
    if args and args[0] == "--version":
        from importlib.metadata import version

        print(f"icmixup {version('icmixup')}")
        return 0
    if args and not args[0].startswith("-") and args[0] not in COMMANDS:
        similar = get_close_matches(args[0], COMMANDS, n=1)
        hint = f"did you mean {similar[0]}? " if similar else ""
        raise ValueError(f"unknown command {args[0]!r}; {hint}the commands are {', '.join(COMMANDS)}")
    from icmixup.lab.cli import analyse, compare, data, paper, train
    from icmixup.lab.cli.pretrained import recipe_for
    from icmixup.lab.cli.shared import requested_recipe

    name = requested_recipe(args)
    flags = parse(args or ["--help"], name or "quick", name or "paper")
    if isinstance(flags, compare.CompareFlags):
        recipe = name or compare.default_recipe(flags)
        if recipe != (name or "quick"):  # parsed again with the defaults of that recipe
            flags = parse(args, recipe, "paper")
        return compare.run_compare(flags, recipe)
    if isinstance(flags, train.TrainFlags):
        recipe = name or recipe_for(flags.dataset, flags.pretrained) or "paper"
        flags = flags if recipe == (name or "paper") else parse(args, "quick", recipe)
        return train.run_train(flags, recipe)
    if isinstance(flags, paper.PaperFlags):
        return paper.run_paper(flags)
    return analyse.run_analyse(flags) if isinstance(flags, analyse.AnalyseFlags) else data.run_data(flags)


def parse(args: Sequence[str], compare_recipe: str, train_recipe: str) -> Any:
    """The flags of the command that `args` name; the recipes provide the defaults of compare and train."""
    import tyro
    from tyro import conf

    from icmixup.lab.cli import analyse, compare, data, paper, train
    from icmixup.lab.cli.pretrained import start_recipe

    def command(kind: type, module: Any, default: Any = None) -> Any:
        name = module.__name__.rpartition(".")[2]
        text = module.HELP if args and args[0] == name else module.SUMMARY
        given = {} if default is None else {"default": default}
        return Annotated[kind, conf.subcommand(name=name, description=text, **given)]

    commands = (
        command(compare.CompareFlags, compare, compare.compare_defaults(start_recipe(compare_recipe, args)))
        | command(train.TrainFlags, train, train.train_defaults(start_recipe(train_recipe, args)))
        | command(paper.PaperFlags, paper)
        | command(analyse.AnalyseFlags, analyse)
        | command(data.DataFlags, data)
    )
    config = (conf.OmitArgPrefixes, conf.PositionalMetavarFromFieldName)
    return tyro.cli(commands, args=args, prog="icmixup", description=DESCRIPTION, config=config)


def print_error(message: str, code: int) -> int:
    """Print one line on stderr; under torchrun only the first rank prints."""
    if os.environ.get("RANK", "0") == "0":
        print(f"icmixup: {message}", file=sys.stderr)
    return code


def show_warning(message: Warning | str) -> None:
    """Print a warning as one line, without its position in our code."""
    print_error(str(message), 0)


def explain(error: Exception) -> str | None:
    """A one-line message for errors that a user can fix; None for bugs."""
    if isinstance(error, ModuleNotFoundError):
        return (
            f"this command needs {error.name}, which is not installed: pip install 'icmixup[lab]', "
            "or pip install '.[lab]' in a clone"
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f", writing {error.filename}" if error.filename else ""
        return f"the disk is full{where}; free some space and run the same command again to resume"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError):
        return " ".join(str(error).split())
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU is out of memory; use a smaller --batch-size or --model, or fewer --workers"
    return None
