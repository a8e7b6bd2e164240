"""One thread a process: tests are small, run side by side, and must give the same sums everywhere."""

import torch

torch.set_num_threads(1)
