"""Chaos tests use the stand-ins of the conductor's unit tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "conduct"))
