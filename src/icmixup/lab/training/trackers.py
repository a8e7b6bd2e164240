"""Logging to TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from icmixup._install import install_hint
from icmixup.lab.training.ranks import rank
from icmixup.lab.training.run_folder import Run

TRACKERS = ("tensorboard", "wandb")
Track = Callable[[int, dict[str, float]], None]


@contextmanager
def open_trackers(names: tuple[str, ...], run: Run) -> Iterator[Track]:
    """Context that opens the named trackers and yields track(epoch, values), which logs to all of them."""
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ValueError(f"no tracker {unknown[0]!r}; there are {' and '.join(TRACKERS)}")
    with ExitStack() as stack:
        openers = {"tensorboard": open_tensorboard, "wandb": open_wandb}
        tracks = [stack.enter_context(openers[name](run)) for name in names if rank() == 0]

        def track(epoch: int, values: dict[str, float]) -> None:
            for log in tracks:
                log(epoch, values)

        yield track


@contextmanager
def open_tensorboard(run: Run) -> Iterator[Track]:
    """Context that logs to run.folder / tensorboard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(f"TensorBoard is not installed: {install_hint('trackers')}") from error
    writer = SummaryWriter(run.folder / "tensorboard")

    def track(epoch: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, epoch)

    try:
        yield track
    finally:
        writer.close()


@contextmanager
def open_wandb(run: Run) -> Iterator[Track]:
    """Context that logs to the project icmixup of Weights & Biases."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"wandb is not installed: {install_hint('trackers')}") from error
    # One id per recipe, so that a resumed run continues the same curve.
    with wandb.init(
        project="icmixup", name=run.folder.name, id=run.key, resume="allow", dir=run.folder
    ) as board:
        board.config.update(run.recipe.fields(), allow_val_change=True)
        yield lambda epoch, values: board.log(values, step=epoch)
