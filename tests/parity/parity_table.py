"""The table of the acceptance matrix, as a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from meshwright.train.compare import Comparison, Limits

_HEAD = """# Every layout trains the same model as one process

Written by `make test-all`. Each row is a run of six steps in fp32 under a layout, compared with
the same steps in one process: the loss and the global gradient norm of each step (largest relative
difference), every gradient tensor of the first step (the worst one: relative difference in the
2-norm, and ratio of the norms), and weights, moments and routers' state after the last. A run is
equal if losses and norms agree to {loss:.0e}, gradients to {gradient:.0e} and state to {state:.0e}
(AdamW turns the rounding of a gradient that is all but zero into a full update).

`x1` and `x4` are micro-batches a step. Layouts without experts are left out where there is nothing
to share out.

"""


@dataclass
class Table:
    """Rows in the order in which they were run."""

    rows: list[tuple[str, str, int, Comparison]] = field(default_factory=list)

    def add(self, model: str, layout: str, accumulation: int, found: Comparison) -> None:
        """One more run."""
        self.rows.append((model, layout, accumulation, found))

    def write(self, path: Path) -> None:
        """The page, for reading and for review of its changes."""
        equal = sum(found.equal for *_, found in self.rows)
        lines = [
            f"{equal} of {len(self.rows)} runs are equal.\n",
            "| Model | Layout | | Loss | Gradient norm | Worst gradient | Ratio | Equal |",
            "|---|---|---|---|---|---|---|---|",
            *(_row(*row) for row in self.rows),
        ]
        limits = Limits()
        head = _HEAD.format(loss=limits.loss, gradient=limits.gradient, state=limits.state)
        path.write_text(head + "\n".join(lines) + "\n")


def _row(model: str, layout: str, accumulation: int, found: Comparison) -> str:
    worst = max((t for t in found.tensors if t.what == "gradient"), key=lambda t: t.rel)
    verdict = "yes" if found.equal else "**no**"
    return (
        f"| {model} | {layout} | x{accumulation} | {found.loss_rel:.0e} | "
        f"{found.grad_norm_rel:.0e} | {worst.rel:.0e} | {worst.norm_ratio:.6f} | {verdict} |"
    )
