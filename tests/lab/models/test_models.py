"""Networks: published sizes, images of any size, weights determined by the seed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from icmixup.lab.models import MODELS, build_linear, build_model, classifier_of
from icmixup.lab.models.small import PaddedShortcut
from icmixup.lab.models.timm import stage_names

OURS = tuple(MODELS)
# The other networks are only tested on small images, to keep the tests fast.
LIGHT = ("resnet32", "small-cnn", "resnet18")


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "num_classes", "millions"),
    [
        ("resnet18", 100, 11.22),
        ("resnet34", 100, 21.33),  # PAPER: 21.3 M
        ("resnet50", 100, 23.71),
        ("resnet32", 10, 0.46),  # He et al., Table 6
        ("resnet32x4", 100, 7.41),  # sixteen times the convolutions of ResNet-32
        ("wrn16-8", 10, 10.96),  # Zagoruyko and Komodakis: 11.0 M
    ],
)
def test_the_number_of_parameters_is_the_published_one(name: str, num_classes: int, millions: float) -> None:
    assert num_parameters(build_model(name, num_classes, seed=0)) / 1e6 == pytest.approx(millions, abs=0.005)


@pytest.mark.parametrize("head", ["network", "linear"])
def test_a_cosine_classifier_scores_thirty_times_the_cosine_of_features_and_class(head: str) -> None:
    if head == "network":
        model: nn.Module = build_model("small-cnn", 4, seed=0, cosine=True).eval()
        classifier = classifier_of(model, "small-cnn")
        images = torch.rand(5, 3, 8, 8)
        found: list[torch.Tensor] = []
        classifier.register_forward_pre_hook(lambda _, args: found.append(args[0]))
        scores = model(images)
        features = found[0]
    else:
        classifier = build_linear(4, 6, cosine=True, seed=0)
        features = torch.randn(5, 6)
        scores = classifier(features)
    for score, feature in zip(scores, features, strict=True):
        for label in range(4):
            cosine = torch.dot(feature, classifier.weight[label]) / feature.norm()
            torch.testing.assert_close(score[label], 30 * cosine / classifier.weight[label].norm())
    assert torch.allclose(classifier.weight.norm(dim=1), torch.ones(4))


def test_a_cosine_classifier_changes_no_other_weight_of_the_seed() -> None:
    plain, cosine = (build_model("small-cnn", 4, seed=3, cosine=c).state_dict() for c in (False, True))
    assert all(torch.equal(plain[name], cosine[name]) for name in cosine if not name.startswith("classifier"))


def test_small_cnn_has_fewer_than_200k_parameters() -> None:
    assert num_parameters(build_model("small-cnn", 10, channels=1, seed=0)) < 200_000


@pytest.mark.parametrize("name", OURS)
def test_the_classifier_is_the_only_layer_with_a_conv_or_linear_bias(name: str) -> None:
    model = build_model(name, 7, seed=0)
    biased = [
        n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and m.bias is not None
    ]
    assert biased == ["classifier"]


@pytest.mark.parametrize("size", [(8, 8), (9, 13), (32, 32)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", LIGHT)
def test_images_of_any_size_give_one_score_per_class(name: str, channels: int, size: tuple[int, int]) -> None:
    model = build_model(name, 7, channels=channels, seed=0).eval()
    with torch.inference_mode():
        assert model(torch.randn(2, channels, *size)).shape == (2, 7)


@pytest.mark.parametrize("name", OURS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = build_model(name, 3, seed=0)
    nn.functional.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.tensor([0, 1, 2, 0])).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("name", OURS)
def test_weights_depend_on_the_seed_only(name: str) -> None:
    torch.manual_seed(1)
    first = build_model(name, 3, seed=5).state_dict()
    torch.manual_seed(2)
    second, other = build_model(name, 3, seed=5).state_dict(), build_model(name, 3, seed=6).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    weights = [key for key in first if first[key].dim() > 1]
    assert not any(torch.equal(first[key], other[key]) for key in weights)


def test_building_does_not_change_the_global_random_state() -> None:
    before = torch.random.get_rng_state()
    build_model("small-cnn", 3, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", OURS)
def test_all_features_pass_through_each_hidden_submodule(name: str) -> None:
    """Replacing the input of a hidden submodule by that of the partner gives the scores of the partner."""
    model = build_model(name, 3, seed=0).eval()
    images = torch.randn(3, 3, 8, 8)
    partner = torch.tensor([2, 0, 1])
    assert len(model.hidden) == 3
    with torch.inference_mode():
        scores = model(images)
        for hidden in model.hidden:
            hook = model.get_submodule(hidden).register_forward_pre_hook(lambda _, args: (args[0][partner],))
            torch.testing.assert_close(model(images), scores[partner])
            hook.remove()
    assert not torch.allclose(scores[partner], scores)


@pytest.mark.parametrize(("name", "sides"), [("resnet18", [8, 4, 2, 1]), ("wrn16-8", [8, 4, 2])])
def test_the_first_stage_keeps_the_size_and_the_others_halve_it(name: str, sides: list[int]) -> None:
    model = build_model(name, 3, seed=0).eval()
    seen: list[int] = []
    for stage in model.stages:
        model.get_submodule(stage).register_forward_hook(lambda _, __, out: seen.append(out.shape[-1]))
    with torch.inference_mode():
        model(torch.randn(1, 3, 8, 8))
    assert seen == sides


def test_padded_shortcut_keeps_the_channels_between_zeros() -> None:
    maps = torch.randn(2, 4, 5, 5)
    out = PaddedShortcut(4, 8, 2)(maps)
    assert out.shape == (2, 8, 3, 3)
    assert torch.equal(out[:, 2:6], maps[:, :, ::2, ::2])
    assert not out[:, :2].any()
    assert not out[:, 6:].any()


def test_small_cnn_learns_digits() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = torch.tensor(digits.images).float()[:, None] / 8 - 1, torch.tensor(digits.target)
    model = build_model("small-cnn", 10, channels=1, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for rows in torch.arange(1280).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    with torch.inference_mode():
        right = model.eval()(images[1280:]).argmax(dim=1) == labels[1280:]
    assert right.float().mean() > 0.8


def test_an_unknown_name_suggests_similar_ones_and_lists_ours() -> None:
    with pytest.raises(
        ValueError, match=r"no model 'resnet43' \(did you mean .*resnet34.*\): use resnet18.*small-cnn"
    ):
        build_model("resnet43", 3, seed=0)


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_without_timm_the_error_says_how_to_install_it() -> None:
    with pytest.raises(ValueError, match=r"'convnext_atto'.*pip install 'icmixup\[timm\]'"):
        build_model("convnext_atto", 3, seed=0)


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_timm_networks_are_built_from_the_seed() -> None:
    first, second = (build_model("resnet18.a1_in1k", 3, channels=1, seed=4) for _ in range(2))
    assert first.hidden == ("layer1", "layer2", "layer3", "layer4")
    assert first(torch.randn(2, 1, 64, 64)).shape == (2, 3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_stages_of_timm_networks_are_found_by_name() -> None:
    first, rest = (nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity())) for _ in range(2))
    named = nn.ModuleDict({"stem": nn.Identity(), "layer1": first, "stages": rest, "head": nn.Identity()})
    assert stage_names(named) == ("layer1", "stages.0", "stages.1")


@pytest.mark.parametrize(("num_classes", "channels"), [(1, 3), (0, 3), (10, 0)])
def test_too_few_classes_or_channels_are_refused(num_classes: int, channels: int) -> None:
    expected = "channels must be at least 1, got 0" if channels == 0 else f"at least 2, got {num_classes}"
    with pytest.raises(ValueError, match=expected):
        build_model("small-cnn", num_classes, channels=channels, seed=0)


@pytest.mark.parametrize(
    ("name", "weights"), [("resnet18", 11_173_962), ("resnet34", 21_282_122), ("resnet50", 23_520_842)]
)
def test_our_resnets_have_as_many_weights_as_those_of_pytorch_cifar(name: str, weights: int) -> None:
    model = build_model(name, 10, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == weights
