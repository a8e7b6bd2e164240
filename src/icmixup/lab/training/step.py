"""One training step, eager or captured in a CUDA graph, and the learner it updates.

B images in a batch    N images in an epoch
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from icmixup.hidden import hidden_modules
from icmixup.lab.augment import normaliser
from icmixup.lab.datasets import Dataset
from icmixup.lab.models import MODELS, build_linear, build_model, check_digest, is_own
from icmixup.lab.models.fused import can_fuse, fuse_layers
from icmixup.lab.models.overlap import abandon, side_of
from icmixup.lab.training.artifacts import load_artifacts
from icmixup.lab.training.identity import autocast_dtype
from icmixup.lab.training.optimizer import make_optimizer, weight_groups
from icmixup.lab.training.ranks import world_size, wrap_for_ranks
from icmixup.lab.training.recipe import Recipe
from icmixup.methods import Method
from icmixup.objective import training_loss

WARM_UP_STEPS = 3  # before a capture: cuDNN selects algorithms, autograd and the optimizer allocate
# At a batch of 128 many kernels are small: combining them in one launch, overlapping launches and autotuned
# tiles make them cheaper (docs/log.md). Options that the installed torch does not know are left out.
COMPILE_OPTIONS = {"combo_kernels": True, "max_autotune_pointwise": True, "triton.enable_pdl": True}
BENCHMARK_LIMIT = 3  # algorithms of cuDNN that are tried for a convolution
# Of an epoch: the host waits before it adds another one. If whole epochs were queued, the many small launches
# with which another run starts would each wait for a place in the driver's queue.
REPLAYS_IN_FLIGHT = 8
PREPARING = threading.Lock()  # only one thread compiles and captures, or evaluates
# The steps of all runs are captured, and all runs evaluated, in one thread: cuDNN plans convolutions for each
# thread and shape anew, which takes up to half a minute for a network with depthwise ones.
GPU_THREAD = ThreadPoolExecutor(1, thread_name_prefix="gpu")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Learner:
    """What training updates: weights, their average, the optimizer and its learning rate."""

    model: nn.Module  # the plain module, which owns the weights
    forward: nn.Module  # called on full batches: the model, compiled or wrapped for several ranks
    average: nn.Module | None
    optimizer: torch.optim.Optimizer
    lrs: Tensor  # (G,) of each group of weights, on the device, where a captured step can read it
    lr_scales: Tensor  # (G,) of each group, relative to the scheduled learning rate
    generator: torch.Generator  # of mixing

    @property
    def device(self) -> torch.device:
        return self.lrs.device

    @property
    def tested(self) -> nn.Module:
        """The model that is evaluated."""
        return self.model if self.average is None else self.average

    def state(self) -> dict[str, object]:
        average = None if self.average is None else self.average.state_dict()
        return {
            "model": self.model.state_dict(),
            "average": average,
            "optimizer": self.optimizer.state_dict(),
        }

    def load(self, state: dict[str, object]) -> None:
        self.model.load_state_dict(state["model"])  # type: ignore[arg-type]
        if self.average is not None:
            self.average.load_state_dict(state["average"])  # type: ignore[arg-type]
        if state["optimizer"] is None:  # of a complete training
            return
        self.optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
        for group, lr in zip(self.optimizer.param_groups, self.lrs, strict=True):
            group["lr"] = lr  # loading replaces it with a copy

    def is_finite(self) -> Tensor:
        """Whether everything that training updates is finite: a scalar on the device, not waited for."""
        floats = [tensor for tensor in self.tensors() if tensor.is_floating_point()]
        return torch.stack(torch._foreach_norm(floats, torch.inf)).isfinite().all()

    def tensors(self) -> list[Tensor]:
        """Everything that a step updates, for a snapshot."""
        parts = list(self.model.state_dict().values())
        if self.average is not None:
            parts += list(self.average.state_dict().values())
        return parts + [part for state in self.optimizer.state.values() for part in state.values()]


def make_learner(recipe: Recipe, dataset: Dataset) -> Learner:
    """A learner with the initial weights of the recipe and zero momentum."""
    images = dataset.train.images
    device = images.device
    model = to_device(initial_model(recipe, dataset), device)
    # Manifold Mixup adds hooks in every step. A compiled model would be recompiled each time, and a fused
    # norm has already applied the activation at whose input a hook may mix.
    hooked = recipe.method_at(0).draw == "manifold"
    if is_fused(recipe, device) and not hooked:
        fuse_layers(model)
    forward = model
    if recipe.compile and not hooked and not dataset.is_features:
        kind = (recipe.model, dataset.num_classes, images.shape[1], images.shape[-1], recipe.cosine, device)
        shared, forward = compiled_model(*kind, threading.get_ident(), MODELS.get(recipe.model))
        shared.load_state_dict(model.state_dict())
        model = shared
    groups = weight_groups(model, recipe)
    lrs = torch.zeros(len(groups), device=device)
    return Learner(
        model=model,
        forward=wrap_for_ranks(forward),
        average=copy.deepcopy(model) if recipe.ema is not None else None,
        optimizer=make_optimizer(groups, recipe, lrs),
        lrs=lrs,
        lr_scales=torch.tensor([group.lr_scale for group in groups], device=device),
        generator=torch.Generator(device),
    )


def is_captured(recipe: Recipe, device: torch.device) -> bool:
    """Whether the steps of a run are captured in CUDA graphs."""
    return recipe.graph and device.type == "cuda" and world_size() == 1


def is_fused(recipe: Recipe, device: torch.device) -> bool:
    """Whether a run uses fused layers.

    torch.compile fuses by itself, and a step that is not captured would wait for the launches of our kernels.
    """
    return (
        is_captured(recipe, device) and can_fuse(device) and not recipe.compile and not is_own(recipe.model)
    )


def initial_model(recipe: Recipe, dataset: Dataset) -> nn.Module:
    """The network before training; a linear one for a dataset of features, unless the user gave another."""
    images = dataset.train.images
    if dataset.is_features and not is_own(recipe.model):
        return build_linear(dataset.num_classes, images.shape[1], cosine=recipe.cosine, seed=recipe.seed)
    check_digest(recipe.model, recipe.weights, recipe.weights_digest)
    return build_model(
        recipe.model,
        dataset.num_classes,
        channels=images.shape[1],
        seed=recipe.seed,
        weights=recipe.weights,
        image_size=images.shape[-1],
        cosine=recipe.cosine,
    )


@functools.cache
def compiled_model(
    name: str,
    num_classes: int,
    channels: int,
    image_size: int,
    cosine: bool,
    device: torch.device,
    thread: int,
    builder: object,
) -> tuple[nn.Module, nn.Module]:
    """A module and its compiled form, created once per thread: later runs load their weights into it.

    Threads have their own weights, but share the compiled code. The builder is an argument because a name can
    be given another one.
    """
    load_artifacts()
    model = build_model(name, num_classes, channels=channels, seed=0, image_size=image_size, cosine=cosine)
    model = to_device(model, device)
    known = torch._inductor.list_options()
    options = {option: value for option, value in COMPILE_OPTIONS.items() if option in known}
    return model, torch.compile(model, dynamic=False, options=options)  # type: ignore[arg-type, return-value]


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on its device, in channels-last format, which is faster for convolutions on GPUs and CPUs."""
    model = model.to(device)
    if any(weight.dim() == 5 for weight in model.parameters()):  # 3D convolutions have no such format
        return model
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


Step = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def make_step(learner: Learner, recipe: Recipe, method: Method, dataset: Dataset) -> Step:
    """A function from (B, ...) images, (B,) labels and learning rate to the loss; updates the learner."""
    device = learner.device
    prepare = make_inputs(dataset, device)
    class_counts = dataset.class_counts.to(device, torch.float32)
    dtype = autocast_dtype(recipe, device)
    weights = list(learner.model.parameters())
    # Found before the first step, since a step that is captured in a CUDA graph cannot look for them.
    manifold = method.draw == "manifold"
    hidden = hidden_modules(learner.model, prepare(next(dataset.train.blocks(8)))) if manifold else None

    def step(images: Tensor, labels: Tensor, lr: Tensor, whole: bool) -> Tensor:
        torch.mul(learner.lr_scales, lr, out=learner.lrs)
        inputs = prepare(images)
        # An incomplete last batch uses the plain module: compiled code is for one shape.
        model = learner.forward if whole or not recipe.compile else learner.model
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = training_loss(
                model, inputs, labels, method, class_counts, generator=learner.generator, hidden=hidden
            )
        learner.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(weights, recipe.clip_norm)
        learner.optimizer.step()
        if learner.average is not None and recipe.ema is not None:
            update_average(learner.average, learner.model, recipe.ema)
        return loss.detach().float()

    return step


def make_inputs(dataset: Dataset, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function from a batch to what the network takes: normalised images, or floats as they are."""
    if dataset.train.images.dtype != torch.uint8:
        return lambda features: features
    shift, scale = normaliser(*(torch.tensor(x, device=device) for x in (dataset.mean, dataset.std)))
    return lambda images: torch.addcmul(shift, images.contiguous(memory_format=torch.channels_last), scale)


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """average <- decay average + (1 - decay) model; integer counters are copied."""
    pairs = list(zip(average.state_dict().values(), model.state_dict().values(), strict=True))
    floats = [(a, m) for a, m in pairs if a.is_floating_point()]
    torch._foreach_lerp_([a for a, _ in floats], [m for _, m in floats], 1 - decay)
    for a, m in pairs:
        if not a.is_floating_point():
            a.copy_(m)


class Epoch(NamedTuple):
    """One pass over the images; refilled in place, since captured steps read from fixed addresses."""

    # (N, channels, H, W) uint8, augmented; (N, D) features; or one batch of photos at a time, (B, 3, H, W)
    images: Tensor
    labels: Tensor  # (N,)
    lrs: Tensor  # (steps,) learning rate of each step
    batch_size: int

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Images, labels, learning rate and completeness of batch `number`."""
        rows = slice(number * self.batch_size, (number + 1) * self.batch_size)
        labels = self.labels[rows]
        images = self.images[rows] if self.is_whole else self.images[: len(labels)]
        return images, labels, self.lrs[number], len(labels) == self.batch_size

    @property
    def is_whole(self) -> bool:
        """Whether `images` holds the whole epoch, not one batch at a time."""
        return len(self.images) == len(self.labels)


class GraphedEpoch:
    """All steps of an epoch, each one CUDA graph: gather, mix, forward, loss, backward, optimizer.

    A step reads its batch at a cursor on the device and advances it, so it costs the host a single launch. An
    incomplete last batch has its own graph. `prepare`, if given, fills the buffer before each step.
    """

    def __init__(
        self, learner: Learner, step: Step, epoch: Epoch, prepare: Callable[[int], None] | None = None
    ) -> None:
        self.epoch, self.prepare = epoch, prepare
        self.kept: list[object] = [step]  # tensors that a graph reads must live as long as the graph
        self.cursor = torch.zeros(1, dtype=torch.int64, device=epoch.images.device)  # number of the next step
        self.losses = torch.zeros_like(epoch.lrs)
        whole, rest = divmod(len(epoch.labels), epoch.batch_size)
        sizes = [epoch.batch_size] * (whole > 0) + [rest] * (rest > 0)
        with PREPARING, cudnn_benchmark():
            graphs = in_gpu_thread(
                lambda: [self.capture(learner, step, size) for size in sizes], learner.device
            )
        self.graphs = graphs[:1] * whole + graphs[-1:] * (rest > 0)
        self.replayed = [make_event() for _ in range(REPLAYS_IN_FLIGHT)]

    def capture(self, learner: Learner, step: Step, size: int) -> torch.cuda.CUDAGraph:
        rows = torch.arange(size, device=self.cursor.device)
        self.kept.append(rows)

        def run() -> None:
            batch = torch.add(rows, self.cursor, alpha=self.epoch.batch_size)
            labels = self.epoch.labels.index_select(0, batch)
            whole = self.epoch.is_whole
            images = self.epoch.images.index_select(0, batch) if whole else self.epoch.images[:size]
            lr = self.epoch.lrs.index_select(0, self.cursor)[0]
            loss = step(images, labels, lr, size == self.epoch.batch_size)
            self.losses.index_copy_(0, self.cursor, loss.view(1))
            self.cursor.add_(1)

        # The warm-up must read a valid batch, wherever the cursor will be when the graph is replayed.
        self.cursor.fill_(0)
        return capture(run, [*learner.tensors(), self.cursor], learner)

    def __call__(self) -> Tensor:
        """Run the epoch; (steps,) losses."""
        self.cursor.zero_()
        for number, graph in enumerate(self.graphs):
            replayed = self.replayed[number % REPLAYS_IN_FLIGHT]
            replayed.synchronize()
            if self.prepare is not None:
                self.prepare(number)
            graph.replay()
            replayed.record()
        return self.losses


def make_event() -> torch.cuda.Event:
    """An event for which the host waits asleep, so that it does not take a core from other runs."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def in_gpu_thread(run: Callable[[], Result], device: torch.device) -> Result:
    """run() in GPU_THREAD, on the stream of this thread; on a CPU, in this thread."""
    if device.type != "cuda":
        return run()
    stream = torch.cuda.current_stream(device)

    def run_on_stream() -> Result:
        with torch.cuda.stream(stream):
            return run()

    return GPU_THREAD.submit(run_on_stream).result()


def capture(run: Callable[[], None], changed: list[Tensor], learner: Learner) -> torch.cuda.CUDAGraph:
    """Capture `run` in a CUDA graph; tensors in `changed` are restored after the warm-up."""
    before = [tensor.clone() for tensor in changed]
    stream, warm_up, _ = capture_streams(learner.device)
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(WARM_UP_STEPS):
            run()
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(learner.generator)
    learner.optimizer.zero_grad()
    # Other threads may allocate and synchronise meanwhile; that is not part of this capture.
    with (
        own_workspaces(),
        no_garbage_collection(),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        try:
            run()
        except BaseException:  # or the error of a capture that cannot end would hide this one
            with suppress(RuntimeError):
                abandon(learner.device)
            raise
    return graph


@contextmanager
def cudnn_benchmark() -> Iterator[None]:
    """Let cuDNN benchmark some algorithms on each new shape; it keeps the fastest afterwards."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, BENCHMARK_LIMIT
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


@functools.cache
def capture_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Stream]:
    """All streams that a capture uses: its own, that of the warm-up, and that of weight gradients.

    The same ones for all captures, under PREPARING: every stream with a matrix product keeps a workspace. No
    other thread may run anything on them. torch hands out its streams in turn, so three in a row differ.
    """
    own, warm_up = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
    return own, warm_up, side_of(device).stream


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Let products of a captured step use memory of its own graph.

    cuBLAS keeps one workspace per thread and stream, and all steps are captured with the same ones. Graphs of
    several runs, replayed at the same time, would write into each other's sums.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: freeing an old graph would invalidate a capture."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
