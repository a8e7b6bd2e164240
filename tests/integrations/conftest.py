"""Warnings of other frameworks are theirs; those of our own modules stay errors."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")
    config.addinivalue_line("filterwarnings", "error:::icmixup.*")
