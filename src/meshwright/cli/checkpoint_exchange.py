"""`meshwright checkpoint export` and `import`: folders of Hugging Face and of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.base.errors import ConfigError, InputError
from meshwright.checkpoint.reader import Reader
from meshwright.cli.commits import COMMIT_HELP, as_asked, commit_of, store_at
from meshwright.cli.corpus import prepare_job
from meshwright.cli.exporting import export_model
from meshwright.cli.options import log_console
from meshwright.plan.job import load_job

_HF, _TENSORS, _DCP = "hf", "safetensors", "dcp"


def export(
    where: Annotated[str, typer.Argument(metavar="RUN|STORE")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
    commit: Annotated[str, typer.Option(help=COMMIT_HELP)] = "",
    form: Annotated[str, typer.Option("--format", metavar="hf|safetensors|dcp")] = _HF,
    key: Annotated[str, typer.Option(help="Key of an encrypted store that is no run's.")] = "",
) -> None:
    """Write a commit as a folder that others load; bytes that lie there as needed are copied by
    the kernel."""
    if form not in (_HF, _TENSORS, _DCP):
        raise ConfigError("--format", form, f"one of {_HF}, {_TENSORS}, {_DCP}")
    if out.exists():
        raise InputError(f"{out}: exists; name a new folder")
    # Imported here: each of them brings torch or what only it needs.
    reader = commit_of(where, commit, key)
    if form == _HF:
        _export_of_run(Path(where), reader, out)
    elif form == _TENSORS:
        from meshwright.ship.tensors import export_tensors

        export_tensors(reader, out)
    else:
        from meshwright.checkpoint.dcp.exchange import export_dcp

        export_dcp(reader, out)
    typer.echo(str(out))


def _export_of_run(run: Path, reader: Reader, out: Path) -> None:
    if not (run / "job.toml").is_file():
        raise InputError(
            f"{run}: a model folder needs the job of the run; give the run folder, or take "
            f"--format {_TENSORS}"
        )
    job = load_job(run / "job.toml")
    export_model(job, prepare_job(job, log_console()), reader, out)


def import_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of a model, or of DCP.")],
    store: Annotated[str, typer.Argument(metavar="STORE", help="Made if it is not there.")],
    step: Annotated[int, typer.Option(min=0)] = 0,
    branch: Annotated[str, typer.Option()] = "main",
    key: Annotated[str, typer.Option(help="Of an encrypted store.")] = "",
) -> None:
    """Commit what a folder of Hugging Face or of torch.distributed.checkpoint holds."""
    at = store_at(store, branch, key)
    with as_asked():
        if (head := at.head()) is not None:
            raise ConfigError("--branch", branch, f"{at.address} has it already, up to {head}")
    if (folder / ".metadata").is_file():
        from meshwright.checkpoint.dcp.exchange import import_dcp

        made = import_dcp(folder, at.open(create=True), step, branch)
    elif (folder / "config.json").is_file():
        from meshwright.ship.start import start_commit

        made = start_commit(folder, at)
    else:
        raise InputError(
            f"{folder}: neither config.json of a model nor .metadata of DCP is there; name such a "
            "folder"
        )
    typer.echo(at.where(made))
