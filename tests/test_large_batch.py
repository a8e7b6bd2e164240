"""The batch in parts beside the batch as a whole: the same gradients, whatever draws or counts on the way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from icmixup import InfiniteClassLoss, draw_mixup, mix_targets
from icmixup.large_batch import cached_backward

B, D, C = 21, 6, 5
PARTS = pytest.mark.parametrize(("part_size", "parts"), [(21, 1), (11, 2), (7, 3), (3, 7), (1000, 1)])
Loss = Callable[[Tensor], Tensor]


def make_batch(seed: int = 0) -> tuple[Tensor, Loss]:
    """(B, D) inputs and the loss of their scores, which ties every row to every other."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(C, (B,), generator=generator)
    targets = mix_targets(labels, draw_mixup(labels, alpha=1.0, mode="elem", generator=generator), C)
    criterion = InfiniteClassLoss()
    return torch.randn(B, D, generator=generator), lambda scores: criterion(scores, targets.to(scores.device))


def make_model(*between: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(D, 16), nn.Tanh(), *between, nn.Linear(16, C)).double()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [weight.grad for weight in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient.clone() for gradient in found if gradient is not None]


class Counter(nn.Module):
    """Counts in a buffer how often it ran, how many rows it saw at most, and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros((), dtype=torch.float64))
        self.most = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.runs += 1
        self.most = max(self.most, len(rows))
        return rows * (1 + 0.1 * self.runs)


class Replacing(Counter):
    """The same, with a new tensor in place of the buffer, and a buffer that does not exist before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", None)

    def forward(self, rows: Tensor) -> Tensor:
        self.runs = self.runs + 1
        self.most = max(self.most, len(rows))
        self.first = self.runs.clone() if self.first is None else self.first
        return rows * (self.first + 0.1 * self.runs)


class Doubled(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        rows *= 2
        return rows


@PARTS
def test_any_number_of_parts_gives_the_loss_and_gradient_of_one_pass(part_size: int, parts: int) -> None:
    inputs, loss = make_batch()
    inputs, whole = inputs.double(), make_model()
    value = loss(whole(inputs))
    value.backward()
    model = make_model()
    cached = cached_backward(model, inputs, loss, part_size)
    torch.testing.assert_close(cached, value.detach())
    assert not cached.requires_grad
    for ours, one_pass in zip(gradients(model), gradients(whole), strict=True):
        torch.testing.assert_close(ours, one_pass)


@PARTS
def test_dropout_draws_in_the_second_pass_what_it_drew_in_the_first(part_size: int, parts: int) -> None:
    inputs, loss = make_batch()
    inputs, model = inputs.double(), make_model(nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.3))
    whole = copy.deepcopy(model)
    torch.manual_seed(7)
    scores = torch.cat([whole(part) for part in inputs.tensor_split(parts)])  # one graph over all draws
    value = loss(scores)
    value.backward()
    torch.manual_seed(7)
    cached = cached_backward(model, inputs, loss, part_size)
    torch.testing.assert_close(cached, value.detach())
    for ours, one_pass in zip(gradients(model), gradients(whole), strict=True):
        torch.testing.assert_close(ours, one_pass)


def test_the_next_call_draws_anew_and_what_the_loss_draws_stays_drawn() -> None:
    inputs, loss = make_batch()
    inputs, model = inputs.double(), make_model(nn.Dropout(0.5))
    drawn: list[float] = []

    def drawing_loss(scores: Tensor) -> Tensor:
        drawn.append(torch.rand(()).item())
        return loss(scores)

    torch.manual_seed(7)
    values = [cached_backward(model, inputs, drawing_loss, 7).item() for _ in range(2)]
    assert values[0] != values[1]
    assert torch.rand(()).item() not in drawn


@PARTS
@pytest.mark.parametrize("kind", [Counter, Replacing])
def test_buffers_change_once_a_part_and_both_passes_see_the_same_ones(
    kind: type[Counter], part_size: int, parts: int
) -> None:
    inputs, loss = make_batch()
    inputs, model = inputs.double(), make_model(kind())
    whole = copy.deepcopy(model)
    loss(torch.cat([whole(part) for part in inputs.tensor_split(parts)])).backward()
    cached_backward(model, inputs, loss, part_size)
    counter = model.get_submodule("2")
    assert isinstance(counter, Counter)
    assert counter.runs == parts
    assert counter.most == min(part_size, B)
    for ours, one_pass in zip(gradients(model), gradients(whole), strict=True):
        torch.testing.assert_close(ours, one_pass)


@pytest.mark.parametrize(("part_size", "parts"), [(21, 1), (7, 3), (5, 5), (20, 2)])
def test_running_statistics_are_those_of_one_forward_a_part(part_size: int, parts: int) -> None:
    inputs, loss = make_batch()
    inputs, model = inputs.double(), make_model(nn.BatchNorm1d(16))
    trained = copy.deepcopy(model)
    for part in inputs.tensor_split(parts):
        trained(part)
    cached_backward(model, inputs, loss, part_size)
    for ours, plain in zip(model.buffers(), trained.buffers(), strict=True):
        torch.testing.assert_close(ours, plain)


@PARTS
def test_spectral_norm_makes_one_power_iteration_a_part_the_same_in_both_passes(
    part_size: int, parts: int
) -> None:
    inputs, loss = make_batch()
    inputs, model = inputs.double(), make_model(spectral_norm(nn.Linear(16, 16)))
    whole = copy.deepcopy(model)
    loss(torch.cat([whole(part) for part in inputs.tensor_split(parts)])).backward()
    cached_backward(model, inputs, loss, part_size)
    for ours, one_pass in zip(gradients(model), gradients(whole), strict=True):
        torch.testing.assert_close(ours, one_pass)
    for ours, one_pass in zip(model.buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(ours, one_pass)


@PARTS
def test_a_model_that_changes_its_inputs_in_place_has_the_same_gradient(part_size: int, parts: int) -> None:
    inputs, loss = make_batch()
    inputs, whole = inputs.double(), nn.Sequential(Doubled(), make_model())
    value = loss(whole(inputs.clone()))
    value.backward()
    in_parts = copy.deepcopy(whole)
    in_parts.zero_grad()
    again = cached_backward(in_parts, inputs.clone(), loss, part_size=part_size)
    torch.testing.assert_close(again, value.detach())
    torch.testing.assert_close(gradients(in_parts), gradients(whole))


def test_gradients_are_added_to_those_that_are_there() -> None:
    inputs, loss = make_batch()
    inputs, model = inputs.double(), make_model()
    cached_backward(model, inputs, loss, 7)
    once = gradients(model)
    cached_backward(model, inputs, loss, 4)
    for twice, single in zip(gradients(model), once, strict=True):
        torch.testing.assert_close(twice, 2 * single)


def test_no_gradient_is_lost_within_autocast() -> None:
    inputs, loss = make_batch()
    model = make_model().float()
    whole = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = whole(inputs)
        assert scores.dtype == torch.bfloat16
        value = loss(scores)
    value.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cached = cached_backward(model, inputs, loss, 7)
    torch.testing.assert_close(cached, value.detach(), rtol=1e-3, atol=1e-3)
    for ours, one_pass in zip(gradients(model), gradients(whole), strict=True):
        # bfloat16 has 8 bits, and the parts round on their own.
        torch.testing.assert_close(ours, one_pass, rtol=0.03, atol=0.03 * float(one_pass.abs().max()))


@PARTS
def test_no_gradient_is_lost_where_parametrized_weights_are_cached(part_size: int, parts: int) -> None:
    inputs, loss = make_batch()
    inputs, model = inputs.double(), make_model()
    weight_norm(model[-1])
    whole = copy.deepcopy(model)
    loss(whole(inputs)).backward()
    with parametrize.cached():
        cached_backward(
            model, inputs, lambda scores: loss(scores) + model[-1].weight.square().sum(), part_size
        )
    whole[-1].weight.square().sum().backward()
    torch.testing.assert_close(gradients(model), gradients(whole))


class TwoInputs(nn.Module):
    """Words and a mask for them: integers in, and two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, C, dtype=torch.float64)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        return (self.words(words) * mask[:, :, None]).sum(dim=1)


def test_a_tuple_of_inputs_is_split_together_and_integers_are_welcome() -> None:
    _, loss = make_batch()
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(11, (B, 4), generator=generator)
    mask = torch.randint(2, (B, 4), generator=generator)
    torch.manual_seed(0)
    model = TwoInputs()
    whole = copy.deepcopy(model)
    loss(whole(words, mask)).backward()
    cached_backward(model, (words, mask), loss, 4)
    torch.testing.assert_close(gradients(model), gradients(whole))


def test_a_dict_of_inputs_and_an_output_with_logits() -> None:
    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TwoInputs()

        def forward(self, words: Tensor, mask: Tensor, scale: float) -> SimpleNamespace:
            return SimpleNamespace(logits=self.inner(words, mask) * scale)

    _, loss = make_batch()
    words, mask = torch.arange(B * 4).reshape(B, 4) % 11, torch.ones(B, 4)
    torch.manual_seed(0)
    model = Output()
    whole = copy.deepcopy(model)
    loss(whole(words, mask, 0.5).logits).backward()
    cached_backward(model, {"words": words, "mask": mask, "scale": 0.5}, loss, 4)
    torch.testing.assert_close(gradients(model), gradients(whole))


@PARTS
def test_a_grad_scaler_scales_the_gradients_and_not_the_loss(part_size: int, parts: int) -> None:
    inputs, loss = make_batch()
    inputs, model, plain = inputs.double(), make_model(), make_model()
    expected = cached_backward(plain, inputs, loss, part_size)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    value = cached_backward(model, inputs, loss, part_size, scaler=scaler)
    torch.testing.assert_close(value, expected)
    for scaled, gradient in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(scaled, 1024 * gradient)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.step(optimizer)
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_a_temperature_learnt_in_the_loss_gets_its_gradient_too() -> None:
    inputs, loss = make_batch()
    inputs = inputs.double()
    one, other = (torch.tensor(0.7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss(make_model()(inputs) / one).backward()
    cached_backward(make_model(), inputs, lambda scores: loss(scores / other), 5)
    assert one.grad is not None
    torch.testing.assert_close(other.grad, one.grad)


def test_frozen_weights_stay_without_gradient_and_evaluation_mode_stays() -> None:
    inputs, loss = make_batch()
    model = make_model(nn.Dropout(0.5)).eval()
    model.get_submodule("0").requires_grad_(False)
    cached_backward(model, inputs.double(), loss, 7)
    assert model.get_parameter("0.weight").grad is None
    assert model.get_parameter("3.weight").grad is not None
    assert not model.training


@pytest.mark.parametrize(
    ("inputs", "part_size", "message"),
    [
        (torch.zeros(B, D), 0, "part_size must be an integer of at least 1, got 0"),
        (torch.zeros(0, D), 4, r"\[0\] rows"),
        ((torch.zeros(B, D), torch.zeros(B - 1, D)), 4, r"\[21, 20\] rows"),
        ((), 4, r"\[\] rows"),
        (torch.zeros(B, D), 2.5, "part_size must be an integer .* got 2.5"),
    ],
)
def test_inputs_that_cannot_be_split_are_named(
    inputs: Tensor | tuple[Tensor, ...], part_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cached_backward(make_model(), inputs, make_batch()[1], part_size)
