"""A worker of `meshwright check` that counts its gradients twice when it is not alone.

As a program it is the command line with that worker in place of the real one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from meshwright.base.events import WorkerContext


def main(context: WorkerContext) -> None:
    """In place of `meshwright.train.check:main`."""
    from meshwright.train import check
    from meshwright.train.trainer import Trainer

    honest = Trainer.gradients

    def twice(trainer: Trainer, *args: Any, **more: Any) -> Any:
        agreed = honest(trainer, *args, **more)
        for group in trainer.data.groups:
            group.grad.mul_(2)
        return agreed

    if context.world > 1:
        Trainer.gradients = twice  # type: ignore[method-assign,assignment]
    check.main(context)


def run_command_line() -> None:
    """`meshwright`, with the faulty worker."""
    from meshwright.cli import check
    from meshwright.cli import main as command_line

    honest = check.trace

    check.trace = partial(honest, entry="cli_faulty_check:main")
    command_line.main()


if __name__ == "__main__":
    run_command_line()
