"""Rows appended to a CSV, for every benchmark; those of bench/loss.py read back, and made into ratios, a fit
and a picture."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

COLUMNS = (
    *("form", "batch", "classes", "dtype", "ms", "peak_mb", "loss_error", "grad_error"),
    *("device", "torch", "triton", "commit", "date"),
)
EXPONENTIALS_PER_SECOND = 4.2e12  # of an H200, on paper: 132 multiprocessors x 16 a cycle x 1.98 GHz


def choose_layers(form: str) -> None:
    """Networks that are built from now on have torch's own layers in the form "graph", else fused ones."""
    from icmixup.lab.models.fused import SWITCH  # here, since the loss alone is measured without the lab

    os.environ[SWITCH] = "0" if form == "graph" else "1"


def text(value: object, form: str) -> str:
    return "" if value is None else format(value, form)


def write_row(row: dict[str, object], path: Path | None) -> None:
    print(
        f"{row['form']:11} B {row['batch']:6} C {row['classes']:5}  {row['ms']:10.3f} ms  "
        f"{text(row['peak_mb'], '10.1f')} MB  error {text(row['loss_error'], '.1e')} "
        f"{text(row['grad_error'], '.1e')}",
        flush=True,
    )
    append_row(row, COLUMNS, path)


def append_row(row: dict[str, object], columns: Sequence[str], path: Path | None) -> None:
    """Add a row to a CSV, with a header if the file is new; floats with six digits.

    Args:
        row: values by column; those that are not in `columns` are left out.
        path: None for no file.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        file.seek(0)
        header = next(csv.reader(file), None)
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if header is None:
            writer.writeheader()
        elif header != list(columns):  # values would silently be in columns of other names
            raise ValueError(f"{path} has the columns {', '.join(header)}, not {', '.join(columns)}")
        values = {key: row.get(key) for key in columns}
        writer.writerow({k: text(v, ".6g") if isinstance(v, float) else v for k, v in values.items()})


def read_rows(path: Path) -> list[dict[str, object]]:
    """Rows with numbers as numbers; of equal measurements the last."""
    numbers = {"batch": int, "classes": int, "ms": float, "peak_mb": float}
    rows = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found = {**row, **{key: make(row[key]) for key, make in numbers.items() if row[key]}}
            rows[row["form"], row["batch"], row["classes"], row["dtype"], row["device"]] = found
    return list(rows.values())


def print_ratios(rows: list[dict[str, object]]) -> None:
    """Each form against the plain product at the same size, graphs against its graph."""
    plain = {(row["form"], row["batch"], row["classes"]): row for row in rows}
    for row in rows:
        against = "plain_graph" if str(row["form"]).endswith("graph") else "plain"
        other = plain.get((against, row["batch"], row["classes"]))
        if other is None or row is other:
            continue
        known = row["peak_mb"] and other["peak_mb"]
        memory = f", 1/{other['peak_mb'] / row['peak_mb']:.1f} of the memory" if known else ""
        print(
            f"{row['form']:11} B {row['batch']:6} C {row['classes']:5}  "
            f"{other['ms'] / row['ms']:8.2f} x as fast{memory}, against {against}"
        )


def print_floor(rows: list[dict[str, object]], rate: float | None) -> None:
    """Ours against its exponentials alone: B^2 forward, and 2 B^2 backward, one for each entry of Y~."""
    measured = "measured" if rate else "on paper"
    rate = rate or EXPONENTIALS_PER_SECOND
    print(f"exponentials: {rate / 1e12:.2f} x 10^12 a second, {measured}")
    for row in rows:
        if row["form"] == "fused" and row["batch"] >= 32768:
            one, three = (1e3 * n * row["batch"] ** 2 / rate for n in (1, 3))
            print(
                f"B {row['batch']} C {row['classes']}: {row['ms']:.2f} ms, {row['ms'] / three:.1f} times its "
                f"exponentials alone: {one:.2f} ms forward + {three - one:.2f} ms backward"
            )


def print_fit(rows: list[dict[str, object]]) -> None:
    """Peak memory of ours as a line in B, for each C."""
    import numpy as np

    for classes in sorted({row["classes"] for row in rows}):
        ours = [
            row for row in rows if row["form"] == "fused" and row["classes"] == classes and row["peak_mb"]
        ]
        if len(ours) < 3:
            continue
        batch, memory = (np.array([row[key] for row in ours], dtype=float) for key in ("batch", "peak_mb"))
        slope, start = np.polyfit(batch, memory, 1)
        worst = np.abs(slope * batch + start - memory).max() / memory.max()
        print(
            f"C {classes}: peak = {start:.1f} MB + {1e3 * slope:.2f} kB x B, "
            f"furthest point {100 * worst:.1f} % "
            f"of the largest off the line; {1e3 * slope / (4e-3 * classes):.1f} times the scores"
        )


def plot_loss(rows: list[dict[str, object]], forms: list[str], path: Path, classes: int = 1000) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for form in forms:
        mine = sorted(
            (r for r in rows if r["form"] == form and r["classes"] == classes), key=lambda r: r["batch"]
        )
        for axis, key in zip(axes, ("ms", "peak_mb"), strict=True):
            points = [(row["batch"], row[key]) for row in mine if row[key]]
            if points:
                axis.loglog(*zip(*points, strict=True), marker="o", label=form, base=2)
                axis.set_yscale("log", base=10)
    for axis, name in zip(axes, ("milliseconds", "peak memory beyond the inputs, MB"), strict=True):
        axis.set(xlabel="pairs in the batch", ylabel=name, title=f"forward + backward, C = {classes:,}")
        axis.grid(alpha=0.3)
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
