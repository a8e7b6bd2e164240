"""What takes most of the time of a tiny run, made short where it is not what a test is about."""

import multiprocessing
from multiprocessing import forkserver

import pytest
from forked import forking_context


@pytest.fixture(autouse=True)
def short_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of an instant, instead of 0.3 s, by which a comparison says how long it will take."""
    if request.path.parent.name != "sweep" and "budget" not in request.path.name:
        monkeypatch.setattr("icmixup.lab.sweep.speed.TRIAL_SECONDS", (0.02, 10.0))


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes that do not import torch first, since they are forked from one that has."""
    context = forking_context()
    forkserver.ensure_running()  # now, because workers start with signals blocked, and so would the server
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
