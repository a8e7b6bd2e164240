"""One thread a process: tests are small, run side by side, and must give the same sums everywhere."""

import signal
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)
# A shell starts background jobs with Ctrl-C ignored, and what tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For the next test as well: what a test runs may choose another number of threads."""
    yield
    torch.set_num_threads(1)
