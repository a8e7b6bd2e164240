"""icmixup data: list datasets, download one, check one, or clear the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tyro import conf

from icmixup._install import install_hint
from icmixup.lab.cli.loading import check_folder
from icmixup.lab.cli.shared import Flag, data_folder
from icmixup.lab.cli.terminal import print_rows
from icmixup.lab.wording import count

SUMMARY = "List datasets, download one, check one, or show and clear the cache of decoded photos."
HELP = f"""{SUMMARY}

  icmixup data list
  icmixup data get cifar100
  icmixup data check path/to/images
  icmixup data cache --clear

Sets of photos that take more than 128 MB once decoded are kept in the folder cache of --data-dir. The
environment variable ICMIXUP_CACHE sets another folder, and ICMIXUP_CACHE_GB its largest size (50 by default):
the least recently used photos are deleted first."""


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """List datasets, download one, check one, or show and clear the cache of decoded photos."""

    action: conf.Positional[Literal["list", "get", "check", "cache"]]
    """List all datasets, get one, check one, or show the cache of decoded photos."""
    name: conf.Positional[str | None] = None
    """digits, cifar10, cifar100, cifair10, cifair100, a folder of images, hf:owner/name, or features.npz."""
    data_dir: Path = field(default_factory=data_folder)
    """Folder of datasets, also for downloads; the environment variable ICMIXUP_DATA sets the default."""
    clear: Flag = False
    """With cache: delete all decoded photos, and what interrupted commands left behind."""
    debug: Flag = False
    """Show a traceback with an error."""


def run_data(flags: DataFlags) -> int:
    """List, get or check datasets; 1 if a check failed."""
    from icmixup.lab.datasets import DATASETS
    from icmixup.lab.datasets.inspect import check_dataset, describe_dataset, get_dataset

    if flags.clear and flags.action != "cache":
        raise ValueError(f"--clear deletes decoded photos: icmixup data cache --clear, not {flags.action}")
    if flags.action == "list":
        return print_listing(flags.data_dir)
    if flags.action == "cache":
        return print_cache(flags.data_dir, clear=flags.clear)
    if flags.name is None:
        raise ValueError(f"icmixup data {flags.action} needs a name: {', '.join(DATASETS)}, or a folder")
    check_folder(flags.name)
    if flags.action == "get":
        print_rows(("", ""), describe_dataset(get_dataset(flags.name, flags.data_dir, show_progress=True)))
        return 0
    checks = check_dataset(flags.name, flags.data_dir, show_progress=True)
    marks = {True: "yes", False: "NO", None: "no, as published"}
    print_rows(("claim", "found", "holds"), [(c.claim, c.found, marks[c.holds]) for c in checks])
    return 1 if any(check.holds is False for check in checks) else 0


def print_listing(data_dir: Path) -> int:
    from icmixup.lab.datasets.inspect import list_datasets

    rows = [
        (entry.name, f"{entry.train:,}", f"{entry.test:,}", str(entry.classes), entry.size, entry.where)
        for entry in list_datasets(data_dir)
    ]
    others = "images in one subfolder per class, or in train/ and test/ folders of those"
    rows += [
        ("a folder", "", "", "", "any", others),
        ("hf:owner/name", "", "", "", "any", f"the Hugging Face hub: {install_hint('hub')}"),
    ]
    print_rows(("dataset", "train", "test", "classes", "image", "where"), rows)
    return 0


def print_cache(data_dir: Path, *, clear: bool) -> int:
    """Print the sets of decoded photos and their sizes; with `clear`, delete them."""
    from datetime import datetime

    from icmixup.lab.datasets.cache import cache_folder, cache_limit, clear_cache, list_entries

    folder = cache_folder(data_dir)
    if clear:
        entries, size = clear_cache(folder)
        print(f"deleted {count(entries, 'set')} of decoded photos, {size / 1e9:.2f} GB, from {folder}")
        return 0
    found = list_entries(folder)
    rows = [
        (
            entry.path.name,
            f"{entry.photos:,}",
            str(entry.short_side),
            f"{entry.bytes / 1e9:.2f}",
            f"{datetime.fromtimestamp(entry.used):%Y-%m-%d %H:%M}",
        )
        for entry in found
    ]
    print_rows(("decoded photos", "number", "short side", "GB", "last used"), rows)
    total = sum(entry.bytes for entry in found) / 1e9
    print(f"{total:.2f} of at most {cache_limit() / 1e9:g} GB in {folder}")
    return 0
