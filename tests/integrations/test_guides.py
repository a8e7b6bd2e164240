"""The code blocks of each framework's guide run, from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from frameworks import ROOT
from pages import blocks

GUIDES = sorted(path for path in (ROOT / "docs" / "guides").glob("*.md") if path.stem != "pytorch")


def test_every_framework_has_a_guide():
    modules = {path.stem for path in (ROOT / "src/icmixup/integrations").glob("[a-z]*.py")}
    assert {path.stem for path in GUIDES} == modules


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_code_of_a_guide_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(page.stem)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "guide"}
    torch.manual_seed(0)
    for line, source in blocks(page, "python"):
        exec(compile("\n" * line + source, str(page), "exec"), namespace)
