"""The time that a comparison spends to say how long it will take is most of the time of a tiny one."""

import pytest


@pytest.fixture(autouse=True)
def short_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of speed of an instant, instead of 0.3 s, except where what they measure matters."""
    if request.path.parent.name != "sweep" and "budget" not in request.path.name:
        monkeypatch.setattr("icmixup.lab.sweep.speed.TRIAL_SECONDS", (0.02, 10.0))
