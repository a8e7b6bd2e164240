"""Inputs of a model: a tensor, a tuple or a dict of tensors. Its scores: a tensor, or an output with logits.

B inputs in a batch    C classes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from icmixup.pairs import Pairs, mix_inputs

Inputs = Tensor | Sequence[object] | Mapping[str, object]


def call_model(model: nn.Module, inputs: Inputs) -> Tensor:
    """(B, C) scores: model(tensor), model(*tuple) or model(**dict); of an output with `logits`, those."""
    if isinstance(inputs, Tensor):
        output = model(inputs)
    elif isinstance(inputs, Mapping):
        output = model(**inputs)
    else:
        check_sequence(inputs)
        output = model(*inputs)
    return find_scores(output)


def check_sequence(inputs: object) -> None:
    """Refuse what is not a batch, such as an array, whose rows would become arguments of the model."""
    if not isinstance(inputs, Sequence):
        raise TypeError(
            f"the inputs must be a torch.Tensor, or a tuple or dict of tensors, got {type(inputs).__name__}; "
            "convert arrays with torch.as_tensor"
        )


def find_scores(output: object) -> Tensor:
    """The (B, C) scores in what a model returns."""
    scores = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(scores, Tensor):
        raise ValueError(
            f"the model returned {type(output).__name__}; expected a (B, C) tensor of scores, "
            "or an output with a tensor `logits`"
        )
    if scores.dim() != 2:
        raise ValueError(f"the model returned scores of shape {tuple(scores.shape)}; expected (B, C)")
    return scores


def mix_batch(inputs: Inputs, pairs: Pairs) -> Inputs:
    """mix_inputs for every tensor of a batch; other entries, such as flags and None, stay as they are.

    Integers cannot be mixed: the mean of two token ids is not a token. Embeddings can, at a hidden layer.
    """
    if isinstance(inputs, Tensor):
        return mix_inputs(inputs, pairs)
    if not any(True for _ in named_tensors(inputs)):
        raise ValueError(f"the inputs, of type {type(inputs).__name__}, have no tensor that could be mixed")
    for name, tensor in named_tensors(inputs):
        if not tensor.is_floating_point():
            raise ValueError(
                f"input {name} has dtype {tensor.dtype}, which cannot be mixed at the input; token ids are "
                'mixed at a hidden layer: choose "manifold" or "ic-manifold" and pass hidden=(module, ...), '
                "modules that receive floating-point features"
            )
    return map_tensors(lambda tensor: mix_inputs(tensor, pairs), inputs)


def join_batches(first: Inputs, second: Inputs) -> Inputs:
    """Two batches of the same structure as one of twice the length."""
    others = iter([tensor for _, tensor in named_tensors(second)])
    return map_tensors(lambda tensor: torch.cat([tensor, next(others)]), first)


def named_tensors(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a batch, with its key or position; tuples and dicts are not searched within."""
    if isinstance(inputs, Tensor):
        yield "images", inputs
        return
    if not isinstance(inputs, Mapping):
        check_sequence(inputs)
    entries = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    for name, entry in entries:
        if isinstance(entry, Tensor) and entry.dim() > 0:
            yield repr(name), entry


def first_tensor(inputs: Inputs) -> Tensor:
    """The first tensor of a batch: its device and its size behind the channels are those of the batch."""
    for _, tensor in named_tensors(inputs):
        return tensor
    raise ValueError(
        f"the inputs, of type {type(inputs).__name__}, have no tensor; expected a (B, ...) tensor, "
        "or a tuple or dict of them"
    )


def map_tensors(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """The same structure with `function` applied to the tensors that named_tensors lists, in its order."""

    def apply(name: object, entry: object) -> object:
        if not isinstance(entry, Tensor):
            check_no_tensor_within(name, entry)
        return function(entry) if isinstance(entry, Tensor) and entry.dim() > 0 else entry

    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: apply(name, entry) for name, entry in inputs.items()}
    entries = [apply(name, entry) for name, entry in enumerate(inputs)]
    return entries if isinstance(inputs, list) else tuple(entries)


def check_no_tensor_within(name: object, entry: object) -> None:
    """Refuse tensors that would silently stay whole where others are mixed or split."""
    if holds_tensor(entry):
        raise ValueError(
            f"input {name!r} is a {type(entry).__name__} with tensors inside; pass every tensor as an entry "
            "of its own, since only tensors directly in the tuple or dict of inputs are mixed and split"
        )


def holds_tensor(entry: object) -> bool:
    if isinstance(entry, Mapping):
        return any(map(holds_tensor, entry.values()))
    return isinstance(entry, Tensor) or (isinstance(entry, list | tuple) and any(map(holds_tensor, entry)))
