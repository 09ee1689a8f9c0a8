"""Options that `plan` and `predict` share, and the question that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.plan.calibration import calibrated
from meshwright.plan.cost.constants import Constants
from meshwright.plan.read import Reading
from meshwright.plan.search_question import Question, Wishes, ask

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME|FILE",
        help="A preset, or a Hugging Face config.json, Megatron arguments, a torchtitan TOML.",
    ),
]
ClusterRef = Annotated[
    str, typer.Option("--cluster", metavar="NAME:CHIPS", help="As p5:1024; see docs/catalogue.md.")
]
SeqLen = Annotated[int | None, typer.Option("--seq-len", min=1, help="Tokens.")]
GlobalBatch = Annotated[int | None, typer.Option("--global-batch", min=1, help="Sequences.")]
FrameworkName = Annotated[
    str | None, typer.Option("--framework", help="Trainer: megatron, torchtitan, meshwright, ...")
]
PrecisionName = Annotated[
    str | None, typer.Option("--precision", help="Of matrix products: bf16, fp8, fp4, fp32, ...")
]
Risk = Annotated[
    float,
    typer.Option(
        "--risk", min=0.001, max=0.999, help="Probability of running out of memory that may be."
    ),
]
Catalogue = Annotated[
    Path | None, typer.Option("--catalogue", metavar="FILE", help="Your own chips and clusters.")
]
ConstantsFile = Annotated[
    Path | None, typer.Option("--constants", metavar="FILE", help="Instead of the shipped ones.")
]
Tokens = Annotated[
    float, typer.Option(min=1.0, max=1e20, help="Of the whole run, for days and dollars.")
]
Wanted = Annotated[str, typer.Option("--objective", help="time, cost, goodput or memory.")]
Top = Annotated[int, typer.Option(min=1, max=100, help="Layouts to show.")]
Failures = Annotated[
    float | None,
    typer.Option(min=1e-6, max=1e3, help="Of a node, a day; default as of Llama 3."),
]
Spares = Annotated[
    int | None,
    typer.Option(min=0, max=64, help="For each 64 chips; cost and goodput choose by themselves."),
]
Pareto = Annotated[
    bool, typer.Option("--pareto", help="Days, dollars and risk; smaller clusters too.")
]
Why = Annotated[str | None, typer.Option(metavar="LAYOUT", help="Why not this one: tp8,pp4,...")]
Scale = Annotated[
    str | None, typer.Option(metavar="64,128,...", help="The curve over so many chips.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Charts, as .html or .png.")]
Trace = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Chrome trace of a step.")]
EmitFor = Annotated[
    str | None, typer.Option("--emit", metavar="FRAMEWORK", help="Write its configuration.")
]
Out = Annotated[Path, typer.Option(help="Folder for --emit.")]
LayoutText = Annotated[
    str | None,
    typer.Option("--layout", metavar="LAYOUT", help="tp8,pp4,cp2,dp16,zero1,mbs1,full ..."),
]
Measured = Annotated[
    str | None,
    typer.Option(metavar="tokens_per_s=N", help="What you got; also tflops, mfu, step_time_s."),
]
DEFAULT_RISK = 0.1


def the_question(
    model: str, cluster: str, wishes: Wishes, constants: Path | None
) -> tuple[Question, Reading | None]:
    """The question, with the constants of the cluster: from `constants`, else from what was
    measured on it, else the shipped ones."""
    known = Constants.read(constants) if constants else calibrated(cluster)
    return ask(model, cluster, Wishes(**{**vars(wishes), "constants": known}))
