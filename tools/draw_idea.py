"""Draw docs/idea.png: two digits, their mixed image, its interpolated classifier, and S~ = S Y~^T.

    python tools/draw_idea.py [docs/idea.png]

Every pixel and number is computed: the model is linear, so the weights of a class are an 8 x 8 image too, and
it is trained with the loss that the picture explains. Needs the lab extra; nothing is downloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from sklearn.datasets import load_digits
from torch import Tensor

import icmixup as icm

OUT = Path(__file__).parents[1] / "docs" / "idea.png"
LAM = 0.7
LABELS = torch.tensor([3, 0, 1, 4, 7, 6])  # one image of each in the picture; the first pair is 3 and 0
WIDTH, HEIGHT = 9.0, 4.5  # inches; positions below are shares of these
INK, FAINT, OWN, CLASS, PAIR = "#1f2933", "#adb5bd", "#e8590c", "#1864ab", "#2b8a3e"
LOOKS = {
    "image": {"cmap": "Greys", "vmin": 0, "vmax": 1},
    "weights": {"cmap": "RdBu_r", "vmin": -0.7, "vmax": 0.7},  # blue is negative, red positive
}


class Idea(NamedTuple):
    """B pairs, C = 10 classes, 64 pixels."""

    images: Tensor  # (B, 64)
    inputs: Tensor  # (B, 64) mixed images
    targets: Tensor  # (B, C) class shares
    weights: Tensor  # (C, 64) class weights of the linear model
    scores: Tensor  # (B, C)

    @property
    def classifiers(self) -> Tensor:
        """(B, 64) interpolated classifiers, Eq. 2."""
        return self.targets @ self.weights

    @property
    def mixed_scores(self) -> Tensor:
        """(B, B) S~ = S Y~^T."""
        return self.scores @ self.targets.T


def train_linear(images: Tensor, labels: Tensor, steps: int = 300) -> torch.nn.Linear:
    """A linear model without bias, trained with Infinite Class Mixup from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(64, 10, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=5e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (128,), generator=generator)
        loss = icm.training_loss(model, images[batch], labels[batch], "ic-mixup", generator=generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def compute_idea() -> Idea:
    """Train the model, mix one image of each class with the next one, and score the result."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = train_linear(images, labels)
    shown = torch.stack([images[labels == label][0] for label in LABELS])
    pairs = icm.draw_mixup(LABELS, partner=torch.arange(len(LABELS)).roll(-1), lam=torch.tensor(LAM))
    inputs = icm.mix_inputs(shown, pairs)
    targets = icm.mix_targets(LABELS, pairs, num_classes=10)
    with torch.no_grad():
        return Idea(shown, inputs, targets, model.weight.detach(), model(inputs))


def add_pixels(figure: Figure, box: tuple[float, float, float], pixels: Tensor, look: str, own: bool) -> None:
    """An 8 x 8 picture at (left, bottom, width); what belongs to the first pair is outlined."""
    left, bottom, width = box
    axes = figure.add_axes((left, bottom, width, width * WIDTH / HEIGHT))
    axes.imshow(pixels.reshape(8, 8), **LOOKS[look])
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color=OWN if own else FAINT, linewidth=2.2 if own else 0.8)


def add_text(figure: Figure, x: float, y: float, text: str, size: float = 9.0, **style: object) -> None:
    style = {"ha": "center", "va": "center", "color": INK, "linespacing": 1.35} | style
    figure.text(x, y, text, fontsize=size, **style)


def draw_sum(
    figure: Figure, bottom: float, parts: Sequence[Tensor], look: str, captions: Sequence[str]
) -> None:
    """lam * first + (1 - lam) * second = mixed, as three pictures with captions."""
    width = 0.086
    lefts = (0.064, 0.222, 0.352)
    for left, pixels, caption in zip(lefts, parts, captions, strict=True):
        add_pixels(figure, (left, bottom, width), pixels, look, own=pixels is parts[-1])
        add_text(figure, left + width / 2, bottom - 0.045, caption, 8.5)
    signs = (f"{LAM} \u00d7", f"+ {1 - LAM:.1f} \u00d7", "=")
    for x, sign in zip((0.036, 0.186, 0.330), signs, strict=True):
        add_text(figure, x, bottom + width * WIDTH / HEIGHT / 2, sign, 11)


def draw_left(figure: Figure, idea: Idea) -> None:
    """The first pair: its images above, its class weights below."""
    first, second = LABELS[:2].tolist()
    add_text(figure, 0.020, 0.937, "Mixup mixes two images \u2026", 10.5, ha="left", weight="bold")
    captions = (f"a {first}", f"a {second}", r"mixed image $\tilde{x}$")
    draw_sum(figure, 0.675, (idea.images[0], idea.images[1], idea.inputs[0]), "image", captions)
    add_text(
        figure,
        0.020,
        0.485,
        "\u2026 Infinite Class Mixup mixes their classifiers too",
        10.5,
        ha="left",
        weight="bold",
    )
    captions = (rf"weights $w_{first}$", rf"weights $w_{second}$", r"classifier $w_{\tilde{y}}$")
    weights = idea.weights[first], idea.weights[second], idea.classifiers[0]
    draw_sum(figure, 0.222, weights, "weights", captions)
    add_text(figure, 0.020, 0.048, r"$\lambda$ = 0.7 here; a new one is drawn for each batch", 8.5, ha="left")


def draw_matrix(figure: Figure, idea: Idea) -> None:
    """S~ under its classifiers and beside its images, the diagonal outlined."""
    left, bottom, cell = 0.570, 0.130, 0.0515
    tall, size = cell * WIDTH / HEIGHT, len(LABELS)
    axes = figure.add_axes((left, bottom, size * cell, size * tall))
    axes.imshow(idea.mixed_scores, cmap="Blues", vmin=-1.5, vmax=4.2)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=FAINT, linewidth=0.8)
    for (row, column), score in np.ndenumerate(idea.mixed_scores.numpy()):
        weight = "bold" if row == column else "normal"
        text = f"{score:.1f}".replace("-", "\u2212")
        axes.text(column, row, text, ha="center", va="center", fontsize=9, weight=weight, color=INK)
    for n in range(size):
        axes.add_patch(Rectangle((n - 0.46, n - 0.46), 0.92, 0.92, fill=False, ec=OWN, lw=2.2))
        beside = (left - cell, bottom + tall * (size - 1 - n + 0.08), cell * 0.84)
        above = (left + cell * (n + 0.08), bottom + tall * (size + 0.14), cell * 0.84)
        add_pixels(figure, beside, idea.inputs[n], "image", own=n == 0)
        add_pixels(figure, above, idea.classifiers[n], "weights", own=n == 0)
    add_text(figure, left - cell * 1.25, bottom + size * tall / 2, "mixed images", rotation=90)
    add_text(figure, left + size * cell / 2, bottom + tall * (size + 1.23), "interpolated classifiers")
    title = r"$\mathbf{\tilde{S} = S\,\tilde{Y}^{T}}$: the loss raises the diagonal"
    add_text(figure, left - cell, bottom + tall * (size + 1.75), title, 10.5, ha="left", weight="bold")
    draw_axes(figure, left, bottom, size * cell, size * tall)


def draw_axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> None:
    """The class axis along a row, the pair axis along a column, and the question that each one answers."""
    under, right = bottom - 0.035, left + width + 0.015
    ends = {CLASS: ((left, under), (left + width, under)), PAIR: ((right, bottom + height), (right, bottom))}
    for color, (start, stop) in ends.items():
        arrow = FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=12, linewidth=1.6, color=color)
        arrow.set_transform(figure.transFigure)
        figure.add_artist(arrow)
    question = "class axis: softmax over a row. Which classifier belongs to the image?"
    add_text(figure, left + width / 2, under - 0.05, question, color=CLASS)
    question = "pair axis: softmax over a column.\nWhich image belongs to the classifier?"
    add_text(figure, right + 0.028, bottom + height / 2, question, color=PAIR, rotation=270)


def draw_idea(idea: Idea) -> Figure:
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=160, facecolor="white")
    draw_left(figure, idea)
    draw_matrix(figure, idea)
    return figure


def main() -> None:
    torch.set_num_threads(1)  # sums over more threads differ in their last bits
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    draw_idea(compute_idea()).savefig(out, metadata={"Software": None})
    print(out)


if __name__ == "__main__":
    main()
