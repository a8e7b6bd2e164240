"""Pretrained weights: every usual file is read, the head is new, and a misfit says how much fits."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from icmixup.lab.models import WeightsDoNotFit, build_model, start_note, weights_digest
from icmixup.lab.models.weights import HEAD_STD, read_weights


def saved() -> dict[str, torch.Tensor]:
    return build_model("small-cnn", 4, seed=7).state_dict()


FILES = {
    "state dict": lambda: saved(),
    "in an entry": lambda: {"epoch": 3, "state_dict": saved()},
    "average first": lambda: {
        "model": build_model("small-cnn", 4, seed=1).state_dict(),
        "model_ema": saved(),
    },
    "data parallel": lambda: {"module." + name: value for name, value in saved().items()},
    "compiled and wrapped": lambda: {"model": {f"module._orig_mod.{k}": v for k, v in saved().items()}},
    "with the arguments of timm's train.py": lambda: {"state_dict": saved(), "args": Namespace(lr=0.1)},
}


@pytest.mark.parametrize("kind", FILES)
def test_weights_are_found_in_files_of_every_usual_form(kind: str, tmp_path: Path) -> None:
    torch.save(FILES[kind](), tmp_path / "weights.pt")
    model = build_model("small-cnn", 9, seed=0, weights=str(tmp_path / "weights.pt"))
    body = [name for name in saved() if not name.startswith("classifier")]
    assert all(torch.equal(model.state_dict()[name], saved()[name]) for name in body)
    assert model.load_report.loaded == tuple(body)
    assert model.load_report.missing == model.load_report.unused == ()


def test_safetensors_give_the_same_network_as_a_state_dict(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({k: v.contiguous() for k, v in saved().items()}, tmp_path / "weights.safetensors")
    torch.save(saved(), tmp_path / "weights.pt")
    one, other = (
        build_model("small-cnn", 9, seed=0, weights=str(tmp_path / name)).state_dict()
        for name in ("weights.safetensors", "weights.pt")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_safetensors_may_have_a_prefix_as_a_state_dict_may(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {f"model.{name}": value.contiguous() for name, value in saved().items()}
    safetensors.save_file(state, tmp_path / "weights.safetensors")
    report = build_model("small-cnn", 9, seed=0, weights=str(tmp_path / "weights.safetensors")).load_report
    assert report.missing == report.unused == ()


def test_a_prefix_is_found_beside_the_tensors_of_a_loss(tmp_path: Path) -> None:
    state = {f"model.{name}": value for name, value in saved().items()}
    torch.save({"state_dict": {**state, "criterion.weight": torch.ones(4)}}, tmp_path / "lightning.ckpt")
    report = build_model("small-cnn", 9, seed=0, weights=str(tmp_path / "lightning.ckpt")).load_report
    assert (report.missing, report.unused) == ((), ("criterion.weight",))


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    state = saved()
    state["stem.1.bias"] = state["stem.1.bias"] * float("nan")
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"NaN or infinite values in 1 of \d+ tensors.*stem\.1\.bias"):
        build_model("small-cnn", 9, seed=0, weights=str(tmp_path / "weights.pt"))


def test_the_head_is_new_even_if_the_number_of_classes_agrees(tmp_path: Path) -> None:
    torch.save(saved(), tmp_path / "weights.pt")
    model = build_model("small-cnn", 4, seed=0, weights=str(tmp_path / "weights.pt"))
    random = build_model("small-cnn", 4, seed=0)
    kept = build_model("small-cnn", 4, seed=0, weights=str(tmp_path / "weights.pt"), keep_head=True)
    new, other = model.classifier.weight.detach(), random.classifier.weight.detach()
    assert torch.allclose(new / new.std(), other / other.std())
    assert torch.equal(kept.classifier.weight, saved()["classifier.weight"])
    assert str(model.load_report).endswith("new head (classifier.weight, classifier.bias)")


def test_a_new_head_starts_with_small_scores_and_no_bias(tmp_path: Path) -> None:
    torch.save(saved(), tmp_path / "weights.pt")
    model = build_model("small-cnn", 4, seed=0, weights=str(tmp_path / "weights.pt"))
    assert model.classifier.weight.std().item() == pytest.approx(HEAD_STD, rel=1e-4)
    assert not model.classifier.bias.any()


def test_a_file_that_does_not_fit_says_how_many_tensors_do(tmp_path: Path) -> None:
    torch.save(saved(), tmp_path / "weights.pt")
    with pytest.raises(
        WeightsDoNotFit, match=r"does not fit resnet18: \d+ of \d+ tensors below the head fit"
    ):
        build_model("resnet18", 4, seed=0, weights=str(tmp_path / "weights.pt"))


def test_tensors_that_are_missing_or_not_used_are_reported(tmp_path: Path) -> None:
    state = saved()
    state.pop("stem.1.bias")
    torch.save({**state, "extra.weight": torch.zeros(2)}, tmp_path / "weights.pt")
    report = build_model("small-cnn", 4, seed=0, weights=str(tmp_path / "weights.pt")).load_report
    assert (report.missing, report.unused) == (("stem.1.bias",), ("extra.weight",))
    assert "1 not in the file and random (stem.1.bias)" in str(report)
    assert "1 of the file not used (extra.weight)" in str(report)


class Stranger:
    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.parametrize("content", [Stranger(), nn.Linear(2, 2), [1, 2], {"a": 1}])
def test_nothing_in_a_file_is_executed(
    content: object, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"save model\.state_dict\(\)"):
        read_weights(tmp_path / "weights.pt")
    assert capsys.readouterr().out == ""


def test_a_folder_in_place_of_a_file_is_called_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder; pass the file of the weights"):
        read_weights(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"is a folder; pass a file in it, such as .*/model\.safetensors"):
        read_weights(tmp_path)


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_a_missing_or_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no weights file .*{name}"):
        build_model("small-cnn", 4, seed=0, weights=str(tmp_path / name))
    (tmp_path / name).write_bytes(b"not weights at all")
    with pytest.raises(ValueError, match=rf"{name} is not a"):
        build_model("small-cnn", 4, seed=0, weights=str(tmp_path / name))


def test_the_digest_changes_with_the_content(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(b"one")
    first = weights_digest("small-cnn", str(path))
    path.write_bytes(b"two")
    assert weights_digest("small-cnn", str(path)) != first
    assert weights_digest("small-cnn", None) is None


def test_our_networks_have_no_published_weights() -> None:
    with pytest.raises(ValueError, match="resnet50 is our network for small images and has no pretrained"):
        build_model("resnet50", 4, seed=0, weights="pretrained")
    assert start_note("resnet50", None) == ""
