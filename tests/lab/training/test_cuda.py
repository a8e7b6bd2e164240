"""Claims that only a GPU can break; elsewhere they are skipped."""

from __future__ import annotations

import copy
import gc
import threading
from dataclasses import replace

import pytest
import torch
from torch import distributed as dist

from icmixup import METHODS
from icmixup.distributed import Ranks, _GatherRows
from icmixup.lab.datasets import Dataset, Photos, Split
from icmixup.lab.datasets import photos as photos_module
from icmixup.lab.datasets.photos import Store
from icmixup.lab.models import MODELS, build_model
from icmixup.lab.sweep import run_recipes
from icmixup.lab.sweep.local import thread_streams
from icmixup.lab.training import feed as feed_module
from icmixup.lab.training import step as step_module
from icmixup.lab.training.evaluate import split_scores
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.feed import make_feed, side_stream
from icmixup.lab.training.loop import Session, tensors_in, train
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import Run
from icmixup.lab.training.step import capture_streams, make_learner
from icmixup.objective import training_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
C = 5


@pytest.fixture(autouse=True)
def exact_kernels():
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.deterministic = False


@pytest.fixture(scope="module")
def data() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (150, 3, 16, 16), generator=generator, dtype=torch.uint8)
    split = Split(images, torch.randint(C, (150,), generator=generator))
    names = tuple(map(str, range(C)))
    return Dataset("made", split, split, names, (0.5,) * 3, (0.25,) * 3).to(torch.device("cuda"))


def epoch_losses(data, tmp_path, epochs=3, **choices):
    """(epochs, steps) losses of a fresh run."""
    defaults = {"model": "small-cnn", "batch_size": 32, "precision": "float32"}
    recipe = Recipe(dataset="made", epochs=epochs, **defaults | choices)
    session = Session(Run(tmp_path, recipe), data, make_learner(recipe, data), None)
    run_epoch, losses = session.make_epoch(0), []
    for number in range(epochs):
        session.fill(number)
        losses.append(run_epoch().clone())
    return torch.stack(losses)


@pytest.mark.parametrize("method", METHODS)
def test_captured_steps_give_the_losses_of_eager_ones(method, data, tmp_path):
    captured = epoch_losses(data, tmp_path, method=method, lr=0.01)
    eager = epoch_losses(data, tmp_path, method=method, lr=0.01, graph=False)
    assert captured.shape == (3, 5)
    torch.testing.assert_close(captured, eager, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("method", ["erm", "balanced-ic-regmixup"])  # one and two uses of every weight
def test_captured_steps_of_a_network_with_shortcuts_give_the_losses_of_eager_ones(method, data, tmp_path):
    choices = {"method": method, "model": "resnet32", "lr": 0.001}
    captured = epoch_losses(data, tmp_path, **choices)  # fused, with weight gradients on a second stream
    eager = epoch_losses(data, tmp_path, graph=False, **choices)
    torch.testing.assert_close(captured, eager, rtol=2e-3, atol=2e-3)


def test_a_method_that_changes_in_training_is_captured_again(tmp_path):
    common = Recipe(
        dataset="digits",
        imbalance=0.1,
        model="small-cnn",
        method="ldam-drw",
        lr=0.01,
        epochs=5,
        batch_size=32,
    )
    recipes = [replace(common, graph=graph, precision="float32") for graph in (True, False)]
    captured, eager = run_recipes(
        recipes, Execution(out=tmp_path, data_dir=tmp_path, device="cuda", workers=1)
    )
    assert captured["loss"] == pytest.approx(eager["loss"], rel=2e-3)


@pytest.mark.parametrize("choice", [{"ema": 0.9}, {"clip_norm": 0.1}, {"mix_prob": 0.5}, {"mode": "pair"}])
def test_options_are_captured_too(choice, data, tmp_path):
    captured = epoch_losses(data, tmp_path, method="ic-mixup", lr=0.01, **choice)
    eager = epoch_losses(data, tmp_path, method="ic-mixup", lr=0.01, graph=False, **choice)
    torch.testing.assert_close(captured, eager, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_three_runs_at_once_on_one_gpu_come_to_what_each_comes_to_alone(compiled, tmp_path):
    common = Recipe(
        dataset="digits", model="small-cnn", lr=0.01, epochs=3, compile=compiled, precision="float32"
    )
    recipes = [replace(common, method=name, seed=k) for k in (0, 1) for name in ("erm", "ic-mixup")]
    alone, beside = (
        run_recipes(
            recipes, Execution(out=tmp_path / str(number), data_dir=tmp_path, device="cuda", workers=number)
        )
        for number in (1, 3)
    )
    for one, other in zip(alone, beside, strict=True):
        assert (one["at_once"], other["at_once"]) == (1, 3)
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-3)
    assert len({row["loss"] for row in beside}) == 4


def test_runs_of_a_network_with_products_in_16_bits_do_not_disturb_each_other(tmp_path):
    """Products with long sums use a workspace of cuBLAS, which graphs must not share."""
    recipe = Recipe(dataset="digits", model="resnet50", method="erm", lr=0.01, epochs=4, precision="bfloat16")
    recipes = [replace(recipe, seed=seed) for seed in range(4)]
    alone, beside = (
        run_recipes(
            recipes, Execution(out=tmp_path / str(number), data_dir=tmp_path, device="cuda", workers=number)
        )
        for number in (1, 4)
    )
    for one, other in zip(alone, beside, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0.1)


def test_a_compiled_model_gives_the_losses_of_a_plain_one(data, tmp_path):
    compiled = epoch_losses(data, tmp_path, method="ic-mixup", lr=0.01, compile=True)
    plain = epoch_losses(data, tmp_path, method="ic-mixup", lr=0.01, graph=False)
    torch.testing.assert_close(compiled, plain, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_leaves_no_more_on_the_gpu_than_the_one_before(compiled, tmp_path):
    common = Recipe(dataset="digits", model="small-cnn", lr=0.01, epochs=2, compile=compiled)
    left = []
    for method in ("mixup", "ic-mixup", "mixup", "ic-mixup"):
        recipe = replace(common, method=method, seed=len(left))
        run_recipes([recipe], Execution(out=tmp_path, data_dir=tmp_path, device="cuda", workers=1))
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    assert left[2:] == left[1:3]


FINETUNING = {"optimizer": "adamw", "weight_decay": 0.05, "decay_norms": False, "clip_norm": 1.0}


@pytest.mark.parametrize("method", ["erm", "mixup", "ic-mixup", "ic-regmixup"])
def test_captured_adamw_steps_give_the_losses_of_eager_ones(method, data, tmp_path):
    fields = {"method": method, "lr": 1e-3, "schedule": "cosine", "warmup_fraction": 0.3, **FINETUNING}
    captured = epoch_losses(data, tmp_path, **fields)
    eager = epoch_losses(data, tmp_path, graph=False, **fields)
    torch.testing.assert_close(captured, eager, rtol=2e-4, atol=2e-4)
    assert captured[-1].mean() < captured[0].mean()


def trained_weights(data, tmp_path, **fields):
    """Weights and state of the optimizer after one epoch."""
    recipe = Recipe(dataset="made", model="small-cnn", batch_size=32, epochs=2, precision="float32", **fields)
    session = Session(Run(tmp_path, recipe), data, make_learner(recipe, data), None)
    run_epoch = session.make_epoch(0)
    for number in range(2):
        session.fill(number)
        run_epoch()
    return [tensor.clone() for tensor in session.learner.tensors()]


def test_a_captured_adamw_step_leaves_the_weights_and_moments_of_an_eager_one(data, tmp_path):
    fields = {"method": "ic-mixup", "lr": 1e-3, "schedule": "cosine", "ema": 0.9, **FINETUNING}
    captured, eager = (trained_weights(data, tmp_path, graph=graph, **fields) for graph in (True, False))
    for one, other in zip(captured, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4)
    steps = [tensor for tensor in captured if tensor.dim() == 0 and tensor.is_floating_point()]
    assert {float(step) for step in steps} == {10.0}  # two epochs of five steps: the warm-up was undone


@pytest.mark.parametrize("choices", [{}, {"ema": 0.9, **FINETUNING}])
def test_the_remembered_state_is_that_of_the_end_of_an_epoch_whatever_captured_steps_follow(
    choices, data, tmp_path
):
    recipe = Recipe(dataset="made", model="small-cnn", batch_size=32, epochs=3, lr=1e-3, **choices)
    session = Session(Run(tmp_path, recipe), data, make_learner(recipe, data), None)
    run_epoch = session.make_epoch(0)
    for number in range(3):
        session.fill(number)
        run_epoch()
        expected = copy.deepcopy(session.learner.state())
        session.remember_epoch()
        run_epoch()  # queued at once behind the copy
        remembered = {name: session.last_epoch[name] for name in expected}
        torch.testing.assert_close(remembered, expected, rtol=0, atol=0)
        live = session.learner.state()
        assert not all(map(torch.equal, remembered["model"].values(), live["model"].values()))
        assert {tensor.device.type for tensor in tensors_in(remembered)} == {"cuda"}


def test_a_captured_step_follows_the_schedule_in_every_group(data, tmp_path):
    recipe = Recipe(
        dataset="made", model="small-cnn", batch_size=32, epochs=2, lr=1e-3, schedule="cosine", **FINETUNING
    )
    session = Session(Run(tmp_path, recipe), data, make_learner(recipe, data), None)
    session.learner.lr_scales.copy_(torch.tensor([1.0, 0.25]))
    run_epoch = session.make_epoch(0)
    for number in range(2):
        session.fill(number)
        run_epoch()
        expected = session.epoch.lrs[-1] * session.learner.lr_scales
        torch.testing.assert_close(session.learner.lrs, expected)


def test_a_head_on_features_is_captured_too(tmp_path):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(150, 20, generator=generator)
    split = Split(features, torch.randint(C, (150,), generator=generator))
    made = Dataset("made.npz", split, split, tuple(map(str, range(C))), (), ()).to(torch.device("cuda"))
    fields = {"method": "ic-mixup", "lr": 1e-3, "train": "head", **FINETUNING}
    captured, eager = (epoch_losses(made, tmp_path, graph=graph, **fields) for graph in (True, False))
    torch.testing.assert_close(captured, eager, rtol=2e-4, atol=2e-4)


def test_steps_are_captured_and_runs_evaluated_in_one_thread(tmp_path, monkeypatch):
    """cuDNN plans convolutions for each thread anew."""
    threads = set()

    def build(num_classes, channels):
        model = MODELS["small-cnn"](num_classes, channels)
        model.register_forward_pre_hook(lambda *_: threads.add(threading.current_thread().name))
        return model

    monkeypatch.setitem(MODELS, "watched", build)
    common = Recipe(dataset="digits", model="watched", lr=0.01, epochs=2, eval_every=1)
    recipes = [replace(common, seed=seed) for seed in range(3)]
    run_recipes(recipes, Execution(out=tmp_path, data_dir=tmp_path, device="cuda", workers=3))
    assert len(threads) == 1


@pytest.mark.parametrize("batch_size", [150, 64])
def test_scores_on_a_gpu_do_not_depend_on_the_size_of_batches(batch_size, data):
    model = build_model("small-cnn", C, seed=0).to("cuda")
    whole = split_scores(model, data.test, data.mean, data.std, batch_size=150, autocast_dtype=None)
    scores = split_scores(model, data.test, data.mean, data.std, batch_size=batch_size, autocast_dtype=None)
    torch.testing.assert_close(scores, whole, rtol=1e-4, atol=1e-4)


def test_steps_of_two_epochs_draw_differently(data, tmp_path):
    losses = epoch_losses(data, tmp_path, epochs=2, method="ic-mixup", lr=1e-12, rotation=0.0, padding=0)
    assert (losses[0] != losses[1]).all()


def test_rows_gathered_over_nccl_are_the_rows_and_so_are_their_gradients(tmp_path):
    """A group of one, which is all that one GPU allows; it takes the same way as a larger one."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    try:
        rows = torch.randn(5, 3, device="cuda", requires_grad=True)
        gathered = _GatherRows.apply(rows, Ranks((5,), 0))
        (gathered * torch.arange(15.0, device="cuda").view(5, 3)).sum().backward()
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(gathered, rows)
    torch.testing.assert_close(rows.grad, torch.arange(15.0, device="cuda").view(5, 3))


def test_image_tensors_are_cropped_at_random_on_a_gpu(data, tmp_path):
    losses = epoch_losses(data, tmp_path, method="erm", lr=0.01, random_resized_crop=0.2)
    assert losses.isfinite().all()


# Photos


@pytest.fixture(scope="module")
def photos() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(72, 120, (70, 2), generator=generator)
    pixels = torch.randint(256, (int(sizes.prod(dim=1).sum()), 3), generator=generator, dtype=torch.uint8)
    split = Split(Photos(Store(pixels, sizes), torch.arange(70), 64), torch.arange(70) % C)
    names = tuple(map(str, range(C)))
    return Dataset("made", split, split, names, (0.5,) * 3, (0.25,) * 3)


AUGMENTED = {"random_resized_crop": 0.2, "trivial": True, "colour_jitter": 0.4, "erasing": 0.5}


@pytest.mark.parametrize("share", [0.3, 0.0], ids=["on the GPU", "on the host"])
def test_captured_steps_on_photos_give_the_losses_of_eager_ones(share, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(photos_module, "DEVICE_SHARE", share)
    photos.train.images.store.copies.clear()
    data = photos.to("cuda")
    captured = epoch_losses(data, tmp_path, method="ic-mixup", lr=0.01, **AUGMENTED)
    eager = epoch_losses(data, tmp_path, method="ic-mixup", lr=0.01, graph=False, **AUGMENTED)
    assert (photos.train.images.store.on(torch.device("cuda")) is None) == (share == 0)
    torch.testing.assert_close(captured, eager, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("share", [0.3, 0.0], ids=["on the GPU", "on the host"])
def test_batches_of_photos_on_a_gpu_are_those_of_a_cpu(share, photos, monkeypatch):
    monkeypatch.setattr(photos_module, "DEVICE_SHARE", share)
    photos.train.images.store.copies.clear()
    recipe = Recipe(dataset="made", batch_size=32, random_resized_crop=0.2, rotation=10.0)
    here, there = make_feed(recipe, photos.train), make_feed(recipe, photos.to("cuda").train)
    for feed in (here, there):
        feed.fill(1)
    for step in range(3):
        one, two = here.batch(step)[0], there.batch(step)[0].cpu()
        assert (one.int() - two.int()).abs().max() <= 1  # the two ways of resizing round differently
        assert torch.equal(here.batch(step)[1], there.batch(step)[1].cpu())
    assert torch.equal(photos.test.square(), photos.to("cuda").test.square().cpu())


SLEEP = 200_000_000  # cycles of a GPU, about 0.1 s: longer than a batch takes to make


@pytest.fixture
def feeds(photos):
    """Two feeds of the same recipe, and the batches of an epoch from a third one, made on the main stream."""
    photos.train.images.store.copies.clear()
    recipe = Recipe(dataset="made", batch_size=8, **AUGMENTED)
    on_main, *others = (make_feed(recipe, photos.to("cuda").train) for _ in range(3))
    on_main.fill(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_module, "side_stream", lambda device: None)
        batches = [on_main.batch(step)[0].clone() for step in range(len(on_main.epoch.lrs))]
    torch.cuda.synchronize()
    return others, batches


def delayed(function):
    def run(*args):
        torch.cuda._sleep(SLEEP)
        return function(*args)

    return run


@pytest.mark.parametrize("share", [0.3, 0.0], ids=["on the GPU", "on the host"])
def test_photos_made_beside_the_steps_give_the_losses_of_those_made_between_them(
    share, photos, tmp_path, monkeypatch
):
    monkeypatch.setattr(photos_module, "DEVICE_SHARE", share)
    photos.train.images.store.copies.clear()
    choices = {"method": "ic-mixup", "lr": 0.01, "batch_size": 8, "epochs": 4, **AUGMENTED}
    beside = epoch_losses(photos.to("cuda"), tmp_path, **choices)
    monkeypatch.setattr(feed_module, "side_stream", lambda device: None)
    between = epoch_losses(photos.to("cuda"), tmp_path, **choices)
    assert beside.shape == (4, 9)
    torch.testing.assert_close(beside, between, rtol=2e-4, atol=2e-4)


def test_a_step_waits_for_a_batch_that_takes_long_to_make(feeds, monkeypatch):
    (feed, _), expected = feeds
    monkeypatch.setattr(feed_module, "apply_augmentation", delayed(feed_module.apply_augmentation))
    feed.fill(0)
    feed.start_first()
    for step, batch in enumerate(expected):
        assert torch.equal(feed.batch(step)[0].clone(), batch)


def test_a_batch_is_kept_until_a_slow_step_has_read_it(feeds):
    """The side stream would make the next batch in its memory."""
    (feed, other), expected = feeds
    other.fill(1)
    feed.fill(0)
    feed.start_first()
    seen = []
    for step in range(len(expected)):
        torch.cuda._sleep(SLEEP)  # the step before
        seen.append(feed.batch(step)[0].clone())
        other.make_batch(step)  # on the same side stream, and forgotten at once
    assert all(map(torch.equal, seen, expected))


def test_a_batch_is_made_and_the_next_epoch_drawn_while_a_step_runs(feeds):
    (feed, _), expected = feeds
    feed.fill(0)
    feed.prepare(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * SLEEP)
    running = torch.cuda.current_stream().record_event()
    feed.prepare(1)
    made = side_stream(torch.device("cuda")).record_event()
    feed.fill(0)
    feed.start_first()
    made.synchronize()
    assert not running.query()  # neither the host nor the side stream waited for it
    assert torch.equal(feed.epoch.images, expected[1])
    feed.prepare(0)
    assert torch.equal(feed.epoch.images, expected[0])


def test_the_host_is_at_most_two_steps_ahead_of_the_gpu(feeds):
    (feed, _), _ = feeds
    feed.fill(0)
    begun = []
    for step in range(5):
        torch.cuda._sleep(SLEEP)  # the step before
        begun.append(torch.cuda.current_stream().record_event())
        feed.prepare(step)
        assert all(event.query() for event in begun[: step - 1])
    assert not begun[-1].query()


def test_runs_on_photos_in_threads_come_to_what_each_comes_to_alone(photos, tmp_path):
    common = Recipe(dataset="made", model="small-cnn", lr=0.01, epochs=3, batch_size=8, precision="float32")
    recipes = [replace(common, method=name, seed=k, **AUGMENTED) for k in (0, 1) for name in ("erm", "mixup")]
    losses = {}

    def work(folder, chosen, stream):
        with torch.cuda.stream(stream):
            for recipe in chosen:
                execution = Execution(out=tmp_path / folder, data_dir=tmp_path, dataset=photos, device="cuda")
                losses[folder, recipe] = train(recipe, execution)["loss"]

    streams = thread_streams(torch.device("cuda", torch.cuda.current_device()), 2)
    work("alone", recipes, streams[0])
    threads = [threading.Thread(target=work, args=("beside", recipes[k::2], streams[k])) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for recipe in recipes:
        assert losses["beside", recipe] == pytest.approx(losses["alone", recipe], rel=2e-3)


def test_steps_are_captured_on_streams_that_no_thread_has(data, tmp_path, monkeypatch):
    device = torch.device("cuda", torch.cuda.current_device())
    taken = {torch.cuda.Stream() for _ in range(40)}
    threads = set(thread_streams(device, 40))
    seen = set()

    def record(*args, **options):
        seen.add(torch.cuda.current_stream())
        return training_loss(*args, **options)

    monkeypatch.setattr(step_module, "training_loss", record)
    epoch_losses(data, tmp_path, epochs=1, method="mixup", lr=0.01)
    assert seen == set(capture_streams(device)[:2])  # of the capture and of its warm-up
    assert not threads & set(capture_streams(device))
    assert threads | set(capture_streams(device)) == taken
    assert not {side_stream(device)} & taken  # of another priority
