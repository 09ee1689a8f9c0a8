"""Preparing a job's data, with progress, and its n-gram baselines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from meshwright.base.errors import DataError
from meshwright.cli.options import data_cache
from meshwright.data.baseline import ngram_baselines
from meshwright.data.prepare import Prepared, prepare
from meshwright.data.store import open_store
from meshwright.data.windows import Windows
from meshwright.plan.job import Job


@dataclass(frozen=True)
class JobData:
    """Token stores of a job, and what the simplest models reach on its evaluation windows."""

    prepared: Prepared
    baselines: dict[str, float]

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change while a run is resumed: the numbers it trains on."""
        manifest = self.prepared.manifest
        kept = ("source", "tokenizer_sha256", "files", "bytes", "tokens")
        return {key: manifest[key] for key in kept}


def prepare_job(job: Job, console: Console) -> JobData:
    """Tokenize the job's corpus, or reuse what is there. Raises DataError or ConfigError."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("data", total=1.0)
        prepared = prepare(
            job.data.source,
            job.data.tokenizer,
            job.model.vocab,
            data_cache(),
            lambda what, done: bar.update(task, description=what, completed=done),
        )
        bar.update(task, description="baselines")
        return JobData(prepared, _baselines(job, prepared))


def _baselines(job: Job, prepared: Prepared) -> dict[str, float]:
    """Unigram and bigram loss on the windows that the run evaluates on; kept beside the stores."""
    train, held_out = open_store(prepared.train_prefix), open_store(prepared.held_out_prefix)
    try:
        Windows(train, job.data.seq_len)
        windows = Windows(held_out, job.data.seq_len)
    except DataError as error:
        raise DataError(f"data.source = {job.data.source!r}: {error}") from error
    indices = windows.spread(job.job.eval_sequences)
    key = sha256(f"{job.data.seq_len}/{len(indices)}/{job.model.vocab}".encode()).hexdigest()[:12]
    cached = prepared.train_prefix.parent / f"baselines-{key}.json"
    if cached.is_file():
        kept: dict[str, float] = json.loads(cached.read_text())
        return kept
    found = asdict(ngram_baselines(train, windows, indices, job.model.vocab))
    losses = {name: found[name] for name in ("unigram_loss", "bigram_loss")}
    draft = Path(f"{cached}.tmp")
    draft.write_text(json.dumps(losses))
    draft.replace(cached)
    return losses
