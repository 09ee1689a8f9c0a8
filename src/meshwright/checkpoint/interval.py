"""How often to commit, from what commits were measured to cost and how often chips fail. Pure."""

from __future__ import annotations

import math


def daly_interval_s(write_s: float, mtbf_s: float) -> float:
    """The interval between checkpoints that loses least time: Daly's higher-order form of Young's
    sqrt(2 delta M), M where a write takes as long as 2 M (J. T. Daly, FGCS 22, 2006)."""
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = write_s / (2 * mtbf_s)
    young = math.sqrt(2 * write_s * mtbf_s)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write_s
