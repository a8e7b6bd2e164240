"""Two and three real processes beside one: the same losses, the same gradients, and no one left waiting."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forking_context
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from icmixup import METHODS, InfiniteClassLoss, draw_mixup, infinite_class_loss, mix_targets, training_loss
from icmixup.large_batch import cached_backward

C, D = 5, 4
SIZES = {2: (4, 7), 3: (5, 1, 3)}  # pairs on each rank
SECONDS = 60  # after which a rank that still waits gives up, and the test fails

CHOICES: dict[str, dict[str, Any]] = {
    "paper": {},
    "class": {"axes": ("class",)},
    "pair": {"axes": ("pair",)},
    "sources": {"negatives": ("sources",)},
    "classes": {"negatives": ("classes",)},
    "pairs and classes": {"negatives": ("pairs", "classes")},
    "temperature": {"temperature": 0.3},
    "weighted": {"class_weights": torch.tensor([1.0, 2.0, 0.5, 4.0, 3.0])},
    "virtual": {"virtual": torch.eye(C)[:3] * 0.25 + 0.15},
    "ignore": {"duplicates": "ignore"},
    "positive": {"duplicates": "positive"},
    "centred": {"centred": True},
    "all": {
        "negatives": ("pairs", "classes"),
        "class_weights": torch.tensor([1.0, 2.0, 0.5, 4.0, 3.0]),
        "virtual": torch.eye(C)[:3] * 0.25 + 0.15,
        "duplicates": "positive",
        "centred": True,
    },
}

# What each rank of a disagreement brings, and what the error must name.
DISAGREEMENTS: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "classes": (lambda rank: {"classes": C + rank}, "classes: 5, 6"),
    "axes": (lambda rank: {"axes": (("class",), ("class", "pair"))[rank]}, "axes: "),
    "bfloat16": (
        lambda rank: {"dtype": (torch.float32, torch.bfloat16)[rank]},
        "torch.float32, torch.bfloat16",
    ),
    "two halves": (lambda rank: {"dtype": (torch.float16, torch.bfloat16)[rank]}, "dtype of scores"),
    "float64": (lambda rank: {"dtype": (torch.float32, torch.float64)[rank]}, "dtype of scores"),
    "negatives": (lambda rank: {"negatives": (("pairs",), ("classes",))[rank]}, "negatives: "),
    "duplicates": (lambda rank: {"duplicates": ("negative", "positive")[rank]}, "duplicates: "),
    "class_weights": (
        lambda rank: {"class_weights": (None, torch.ones(C))[rank]},
        "class_weights: none, given",
    ),
}


def make_batch(pairs: int, classes: int = C) -> tuple[Tensor, Tensor]:
    """(pairs, D) float64 features and targets, of which every third is the same as the first."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (pairs,), generator=generator)
    lam = torch.rand(pairs, generator=generator, dtype=torch.float64)
    targets = mix_targets(labels, draw_mixup(labels, lam=lam, generator=generator), classes)
    targets[::3] = targets[0].clone()
    return torch.randn(pairs, D, generator=generator, dtype=torch.float64), targets


def make_weights() -> Tensor:
    return torch.randn(D, C, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


def own_rows(rows: Tensor, sizes: tuple[int, ...], rank: int) -> Tensor:
    return rows.split(sizes)[rank]


def gather_losses(rank: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """This rank's loss and gradient under every choice; the parent compares."""
    features, targets = (own_rows(rows, sizes, rank) for rows in make_batch(sum(sizes)))
    found = {}
    for name, choice in CHOICES.items():
        for reduction, gather in (("mean", True), ("sum", True), ("none", True), ("mean", False)):
            weights = make_weights()
            loss = infinite_class_loss(
                features @ weights, targets, reduction=reduction, gather=gather, **choice
            )
            loss.sum().backward()
            found[name, reduction, gather] = loss.detach(), weights.grad
    return found


def disagree(rank: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """What each disagreement raises here, and after how long; the ranks must be able to talk afterwards."""
    found = {}
    for name, (bring, _) in DISAGREEMENTS.items():
        brought = bring(min(rank, 1))
        _, targets = make_batch(sizes[rank], brought.pop("classes", C))
        scores = targets.to(brought.pop("dtype", torch.float32)).requires_grad_()
        started = time.monotonic()
        try:
            infinite_class_loss(scores, targets.float(), **brought)
        except ValueError as error:
            found[name] = str(error), time.monotonic() - started
    total = torch.ones(())
    dist.all_reduce(total)
    return {**found, "talk": total}


def wrapped_gradients(rank: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Gradients under DDP: of one pass, and of parts whose number differs from rank to rank."""
    features, targets = (own_rows(rows, sizes, rank) for rows in make_batch(sum(sizes)))
    criterion = InfiniteClassLoss()
    found = {}
    parts = {"whole": None, "parts of 2": 2, "parts of 5": 5, "one part": 100, "compiled": 2}
    for name, part_size in parts.items():
        model: nn.Module = DistributedDataParallel(make_network())
        if name == "compiled":
            model = torch.compile(model, backend="eager")
        if part_size is None:
            criterion(model(features), targets).backward()
        else:
            cached_backward(model, features, lambda scores: criterion(scores, targets), part_size)
        found[name] = [weight.grad for weight in model.parameters()]
    return found


def validate_alone(rank: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Rank 0 validates with integer labels while the others do nothing; then all must be able to talk."""
    scores, labels = make_batch(sizes[rank], C)[1].log1p(), torch.arange(sizes[rank]) % C
    loss = InfiniteClassLoss()(scores, labels) if rank == 0 else torch.zeros(())
    total = torch.ones(())
    dist.all_reduce(total)
    return {"loss": loss, "expected": nn.functional.cross_entropy(scores, labels), "talk": total}


def second_derivative(rank: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """The error of differentiating a gathered gradient again; where nothing is gathered there is none."""
    features, targets = (own_rows(rows, sizes, rank) for rows in make_batch(sum(sizes)))
    found = {}
    for gather in (True, False):
        weights = make_weights()
        loss = infinite_class_loss(features @ weights, targets, gather=gather)
        (gradient,) = torch.autograd.grad(loss, weights, create_graph=True)
        try:
            (gradient.square().sum() + weights.sum()).backward()
            found[gather] = ""
        except RuntimeError as error:
            found[gather] = str(error)
    return found


def manifold_gradients(rank: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Manifold Mixup under DDP and without it, with the same draws; equal batches, so means are equal too."""
    features, _ = make_batch(6)
    labels, found = torch.arange(6) % C, {}
    for name, wrap in (("plain", lambda model: model), ("wrapped", DistributedDataParallel)):
        model = wrap(make_network())
        generator = torch.Generator().manual_seed(3)
        training_loss(model, features, labels, "manifold", generator=generator).backward()
        found[name] = [weight.grad for weight in model.parameters()]
    return found


def deferred_gradients(rank: int, sizes: tuple[int, ...]) -> list[Tensor]:
    """The class weights of ldam-drw, on this rank's share of unequal batches."""
    own = torch.arange(sum(sizes)).split(sizes)[rank]
    return list(weighted_gradients(own, sum(sizes)))


def weighted_gradients(rows: Tensor, pairs: int) -> tuple[Tensor, ...]:
    features, _ = make_batch(pairs)
    counts, model = torch.tensor([50, 20, 9, 3, 1]), make_network()
    labels = torch.arange(pairs) % C
    training_loss(model, features[rows], labels[rows], METHODS["ldam-drw"].at(1), counts).backward()
    return tuple(weight.grad for weight in model.parameters() if weight.grad is not None)


def make_network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, C)).double()


def start_rank(rank: int, sizes: tuple[int, ...], port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=len(sizes),
        timeout=timedelta(seconds=SECONDS),
    )
    works = (
        *(gather_losses, disagree, wrapped_gradients, validate_alone),
        *(second_derivative, manifold_gradients, deferred_gradients),
    )
    found = {work.__name__: work(rank, sizes) for work in works}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=SIZES, ids=lambda ranks: f"{ranks} ranks")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found, each a process of its own."""
    sizes, folder = SIZES[request.param], tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forking_context()  # its server has imported dynamo, which DDP needs and which takes seconds
    mp.start_processes(start_rank, (sizes, port, folder), nprocs=len(sizes), start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(len(sizes))]


@pytest.fixture
def losses(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each["gather_losses"] for each in found]


def alone(
    name: str, reduction: str = "mean", rows: slice = slice(None), *, pairs: int
) -> tuple[Tensor, Tensor]:
    """Loss and gradient of one process on the whole batch, or on some rows of it."""
    features, targets = make_batch(pairs)
    weights = make_weights()
    loss = infinite_class_loss(features[rows] @ weights, targets[rows], reduction=reduction, **CHOICES[name])
    loss.sum().backward()
    assert weights.grad is not None
    return loss.detach(), weights.grad


@pytest.mark.parametrize("name", CHOICES)
def test_the_mean_over_ranks_is_the_loss_and_gradient_of_one_process(
    name: str, losses: list[dict[str, Any]]
) -> None:
    found = [each[name, "mean", True] for each in losses]
    loss, gradient = alone(name, pairs=sum(SIZES[len(losses)]))
    torch.testing.assert_close(torch.stack([each[0] for each in found]).mean(), loss)
    torch.testing.assert_close(torch.stack([each[1] for each in found]).mean(dim=0), gradient)


def test_class_weights_give_the_gradient_of_one_process(found: list[dict[str, Any]]) -> None:
    pairs = sum(SIZES[len(found)])
    for whole, *parts in zip(
        weighted_gradients(torch.arange(pairs), pairs),
        *(each["deferred_gradients"] for each in found),
        strict=True,
    ):
        torch.testing.assert_close(torch.stack(parts).mean(dim=0), whole)


@pytest.mark.parametrize("name", CHOICES)
def test_the_sum_over_ranks_is_the_summed_loss_of_one_process(
    name: str, losses: list[dict[str, Any]]
) -> None:
    found = [each[name, "sum", True] for each in losses]
    loss, gradient = alone(name, "sum", pairs=sum(SIZES[len(losses)]))
    torch.testing.assert_close(torch.stack([each[0] for each in found]).sum(), loss)
    torch.testing.assert_close(torch.stack([each[1] for each in found]).sum(dim=0), gradient)


@pytest.mark.parametrize("name", CHOICES)
def test_each_rank_has_the_losses_of_its_own_pairs_in_order(name: str, losses: list[dict[str, Any]]) -> None:
    found = torch.cat([each[name, "none", True][0] for each in losses])
    torch.testing.assert_close(found, alone(name, "none", pairs=sum(SIZES[len(losses)]))[0])


@pytest.mark.parametrize("name", CHOICES)
def test_without_gathering_each_rank_is_a_process_of_its_own(name: str, losses: list[dict[str, Any]]) -> None:
    sizes = SIZES[len(losses)]
    for rank, each in enumerate(losses):
        rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        torch.testing.assert_close(each[name, "mean", False], alone(name, rows=rows, pairs=sum(sizes)))


def test_negatives_of_other_ranks_change_the_loss(losses: list[dict[str, Any]]) -> None:
    """Else the claims above would hold for a loss that never looks beyond its rank."""
    for each in losses:
        assert each["paper", "sum", True][0] > each["paper", "mean", False][0]
        assert not torch.allclose(each["pair", "mean", True][1], each["pair", "mean", False][1])


def test_ranks_that_disagree_all_say_on_what_and_none_waits(found: list[dict[str, Any]]) -> None:
    for name, (_, words) in DISAGREEMENTS.items():
        for each in found:
            assert name in each["disagree"], f"{name}: no error"
            message, seconds = each["disagree"][name]
            assert message.startswith("the ranks disagree on "), message
            assert words in message
            assert "gather=False" in message
            assert seconds < SECONDS / 2
    assert all(each["disagree"]["talk"] == len(found) for each in found)


def test_ddp_gives_the_gradient_of_one_process_in_one_pass_and_in_parts(found: list[dict[str, Any]]) -> None:
    model, (features, targets) = make_network(), make_batch(sum(SIZES[len(found)]))
    InfiniteClassLoss()(model(features), targets).backward()
    wanted = [weight.grad for weight in model.parameters()]
    for each in found:
        assert len(each["wrapped_gradients"]) == 5
        for gradients in each["wrapped_gradients"].values():
            torch.testing.assert_close(gradients, wanted)


def test_one_rank_can_validate_with_integer_labels_while_the_others_do_not(
    found: list[dict[str, Any]],
) -> None:
    torch.testing.assert_close(found[0]["validate_alone"]["loss"], found[0]["validate_alone"]["expected"])
    assert all(each["validate_alone"]["talk"] == len(found) for each in found)


def test_second_derivatives_of_gathered_rows_are_an_error(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "second derivatives of rows gathered from other ranks" in each["second_derivative"][True]
        assert each["second_derivative"][False] == ""


def test_manifold_mixup_looks_through_the_wrapper_of_ddp(found: list[dict[str, Any]]) -> None:
    for each in found:
        torch.testing.assert_close(*each["manifold_gradients"].values())
