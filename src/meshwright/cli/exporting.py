"""A commit of a run as a model folder of Hugging Face, at its end or when it is asked for."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint.reader import Reader
from meshwright.cli.corpus import JobData
from meshwright.plan.job import Job


def export_model(job: Job, data: JobData, reader: Reader, out: Path) -> Path:
    """Write the model of `job` as it is in a commit; the folder. Raises as `ship.hf.export_hf`."""
    # Imported here: only who exports needs it.
    from meshwright.ship.hf import export_hf
    from meshwright.ship.start import commit_lies, commit_read

    read, lies = commit_read(reader), commit_lies(reader)
    return export_hf(job.model, read, data.tokenizer_path, data.end_of_text, out, lies=lies)
