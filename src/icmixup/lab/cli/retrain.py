"""icmixup retrain: another classifier for a trained run on a long tail."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tyro import conf

from icmixup.lab.cli.shared import Machine
from icmixup.lab.cli.terminal import print_note
from icmixup.lab.wording import count

SUMMARY = "Change the classifier of a trained run for a long tail; all other weights stay as they are."
HELP = f"""{SUMMARY}

  adjust      logit adjustment after training: biases minus tau log class frequency
  tau-norm    class weights divided by their norm to the power of tau, without biases
  crt         a new classifier, trained on frozen features with class-balanced sampling

Without --tau, it is chosen on training images that the run held out; the test images take
no part. The result is a run of its own, in a folder beside the first.

  icmixup train digits --per-class 100 --imbalance 0.02 --method erm --held-out 0.2
  icmixup retrain runs/digits-100each-lt0.02.small-cnn.erm.s0.* --how adjust
  icmixup retrain runs/digits-100each-lt0.02.small-cnn.erm.s0.* --how crt --epochs 10"""


@dataclass(frozen=True, kw_only=True)
class RetrainFlags:
    """Change the classifier of a trained run for a long tail; all other weights stay as they are."""

    runs: conf.Positional[tuple[Path, ...]]
    """Folders of finished runs."""
    how: Literal["adjust", "tau-norm", "crt"]
    """What is done with the classifier."""
    tau: float | None = None
    """Strength of adjust and tau-norm, 0 or more; chosen on held-out images by default."""
    epochs: int | None = None
    """Epochs of crt; a tenth of the run's by default."""
    where: Machine = field(default_factory=Machine)


def run_retrain(flags: RetrainFlags) -> int:
    """Change the classifier of every run, print one line each."""
    if not flags.runs:
        raise ValueError("no runs to change; pass the folders of one or more finished runs")
    if flags.tau is not None and not 0 <= flags.tau < float("inf"):
        raise ValueError(f"--tau must be 0 or more and finite, got {flags.tau:g}")
    if flags.epochs is not None and flags.epochs < 1:
        raise ValueError(f"--epochs must be at least 1, got {flags.epochs}")
    from icmixup.lab.training.execution import Execution
    from icmixup.lab.training.retrain import retrain

    for path in flags.runs:
        execution = Execution(out=path.parent, data_dir=flags.where.data_dir, device=flags.where.device)
        row = retrain(path, flags.how, execution, tau=flags.tau, epochs=flags.epochs)
        tau = "" if row["tau_used"] is None else f"  tau {row['tau_used']:g}"
        print(f"{path.parent / row['folder']}{tau}  accuracy {row['accuracy']:.1f}")
        if flags.how == "crt" and (note := describe_short_training(row)):
            print_note(note)
    return 0


def describe_short_training(row: dict[str, Any]) -> str:
    """A warning if a new classifier was trained for too few steps to be compared, otherwise "" """
    from icmixup.lab.training.recipe import FEWEST_STEPS

    steps = row["after_epochs"] * math.ceil(row["train_images"] / row["batch_size"])
    if steps >= FEWEST_STEPS:
        return ""
    return (
        f"{count(row['after_epochs'], 'epoch')} of {row['train_images']:,} images: {steps} steps of the "
        f"optimizer, fewer than {FEWEST_STEPS}: the new classifier looks worse than it is; use more --epochs"
    )
