"""`hf:owner/name` or `hf:path/to/folder`: image datasets through the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from icmixup._install import install_hint
from icmixup.lab.datasets.folder import Listed, ReadOptions, check_class_names, read_source
from icmixup.lab.datasets.subsets import Source
from icmixup.lab.images.decode import ImageFile

PREFIX = "hf:"
LABEL_NAMES = ("label", "labels", "fine_label", "class", "target")
TEST_SPLITS = ("test", "validation", "valid", "val")


def read_hub(name: str, data_dir: Path, options: ReadOptions, *, download: bool = True) -> Source:
    """Read the train split and the test (else validation) split; without one, a fifth is held out.

    The image column is the first one with images. The label column is one of LABEL_NAMES, else the first one
    with class labels. A test split with hidden labels (-1) is skipped.
    """
    return read_source(list_hub(name, data_dir, download=download), options)


def list_hub(name: str, data_dir: Path, *, download: bool = True) -> Listed:
    """The images of a dataset that `read_hub` reads, before any is decoded."""
    splits = _load_splits(name.removeprefix(PREFIX), data_dir, download)
    train = splits.get("train", next(iter(splits.values())))
    image, label = _find_columns(name, train.features)
    names = _label_names(train, label, name)
    labelled = (splits[key] for key in TEST_SPLITS if key in splits and splits[key] is not train)
    test = next((split for split in labelled if _has_labels(split, label)), None)
    train_files = list(_image_files(train, image, label, names, f"{name} train"))
    test_files = list(_image_files(test, image, label, names, f"{name} test")) if test is not None else []
    return Listed(train_files, test_files, names, "splits of the dataset")


def _load_splits(spec: str, data_dir: Path, download: bool) -> Mapping[str, Any]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{PREFIX}{spec} needs the datasets library: {install_hint('hub')}") from error
    if (Path(spec) / "dataset_dict.json").exists():
        return dict(datasets.load_from_disk(spec))
    config = datasets.DownloadConfig(local_files_only=not download)
    cache = str(data_dir / "huggingface")
    try:
        return dict(datasets.load_dataset(spec, cache_dir=cache, download_config=config))
    except Exception as error:  # the hub, the network and the file readers raise unrelated types
        reason = " ".join(str(error).split())
        raise ValueError(
            f"could not load {PREFIX}{spec} ({reason}): "
            "check the name and the network, or download the dataset and use hf:FOLDER"
        ) from error


def _find_columns(name: str, features: Mapping[str, Any]) -> tuple[str, str]:
    import datasets

    images = [key for key, kind in features.items() if isinstance(kind, datasets.Image)]
    classes = [key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    labels = [key for key in LABEL_NAMES if key in features] + classes
    if not images or not labels:
        raise ValueError(
            f"{name} must have an image column and a label column, got {', '.join(features)}: "
            f"rename the label column to {LABEL_NAMES[0]!r}, or save the images as a folder"
        )
    return images[0], labels[0]


def _label_names(split: Any, label: str, name: str) -> tuple[str, ...]:
    listed: Sequence[str] | None = getattr(split.features[label], "names", None)
    names = tuple(listed) if listed else tuple(map(str, sorted(set(_one_label_each(split, label, name)))))
    check_class_names(names, f"column {label!r} of {name}", "use a dataset with more classes")
    return names


def _one_label_each(split: Any, label: str, name: str) -> list[Any]:
    """The labels of all rows; a ValueError names the first row that has none, or several."""
    labels = list(split[label])
    for row, value in enumerate(labels):
        if value is None or isinstance(value, list | dict):
            raise ValueError(
                f"{name} has {value!r} in column {label!r}, row {row}, but every image needs one label: "
                "remove such rows, or use another dataset"
            )
    return labels


def _has_labels(split: Any, label: str) -> bool:
    return label in split.features and all(value not in (None, -1) for value in split[label])


def _image_files(
    split: Any, image: str, label: str, names: tuple[str, ...], where: str
) -> Iterator[ImageFile]:
    import datasets

    raw = split.cast_column(image, datasets.Image(decode=False))
    number_of = {name: number for number, name in enumerate(names)}
    for row, value in enumerate(split[label]):
        found = _class_name(split.features[label], value)
        if found not in number_of:
            given = value if found is None else found
            raise ValueError(
                f"{where} has label {given!r} in row {row}, expected one of its {len(names)} classes"
            )
        yield ImageFile(f"{where} row {row}", partial(_open_row, raw, row, image), number_of[found])


def _class_name(feature: Any, value: Any) -> str | None:
    """The name of a label; None for one that has none. A test split can number its classes in its own way."""
    own: Sequence[str] | None = getattr(feature, "names", None)
    if value is None or own is None:
        return None if value is None else str(value)
    return own[value] if 0 <= value < len(own) else None


def _open_row(raw: Any, row: int, image: str) -> IO[bytes]:
    cell = raw[row][image]
    return BytesIO(cell["bytes"]) if cell["bytes"] else open(cell["path"], "rb")
