"""What the GPU tests share: the GPU, or the one line that says why they are skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The first GPU."""
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA GPU: torch {torch.__version__} finds none")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device
