"""What nothing else beats."""

from __future__ import annotations

import numpy as np

from meshwright.plan.cost.candidates import Floats, Ints


def front(*costs: Floats) -> Ints:
    """Indices of what nothing else beats: no other is as good in all `costs` and better in one.

    Of several that are equal in all, the first. Sorted by the first cost, then the next.
    """
    table = np.column_stack(costs)
    chosen: list[int] = []
    best = np.empty((0, table.shape[1]))
    for index in np.lexsort(table.T[::-1]):
        row = table[index]
        if not np.any(np.all(best <= row, axis=1)):
            chosen.append(int(index))
            best = np.vstack([best, row])
    return np.array(chosen, np.int64)
