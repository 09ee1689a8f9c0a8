"""Preparing a job's data, with progress, and its n-gram baselines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from meshwright.base.errors import DamagedError, DataError
from meshwright.cli.options import data_cache
from meshwright.data.baseline import ngram_baselines
from meshwright.data.built import check_together, has_held_out, is_build, open_build
from meshwright.data.far import is_far, mirror
from meshwright.data.held_out import open_held_out
from meshwright.data.prepare import Prepared, prepare
from meshwright.data.rows import open_rows
from meshwright.data.store import TokenStore, bring
from meshwright.plan.job import Job

_AT_ONCE = 1 << 20  # tokens of them that are read together
_LEFT_OUT = 1 << 14  # tokens at most around an edge of what is damaged
_COUNTED = 1 << 24  # tokens of sources that were built, from which the simplest models are counted


@dataclass(frozen=True)
class JobData:
    """Token stores of a job, one part for each source, and what the simplest models reach on its
    evaluation windows."""

    parts: tuple[Prepared, ...]
    baselines: dict[str, float]

    @property
    def tokenizer_path(self) -> Path:
        """Of the tokenizer, which all parts share."""
        return self.parts[0].tokenizer_path

    @property
    def end_of_text(self) -> int:
        """The token that ends a document."""
        return self.parts[0].end_of_text

    @property
    def train_prefix(self) -> list[Path]:
        """Of the stores to train on, one for each source."""
        return [part.train_prefix for part in self.parts]

    @property
    def held_out_prefix(self) -> list[Path | None]:
        """Of the stores to evaluate on; None for a source that has none."""
        return [part.held_out_prefix if has_held_out(part) else None for part in self.parts]

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change while a run is resumed: the numbers it trains on."""
        kept = ("source", "tokenizer_sha256", "files", "bytes", "tokens", "manifest_sha256")
        return {
            f"{key} of source {number}" if number else key: part.manifest[key]
            for number, part in enumerate(self.parts)
            for key in kept
            if key in part.manifest
        }


def prepare_job(job: Job, console: Console) -> JobData:
    """Tokenize the job's corpora, or reuse what is there. Raises DataError or ConfigError."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("data", total=1.0)

        def report(what: str, done: float) -> None:
            bar.update(task, description=what, completed=done)

        parts = [_prepare(source.path, job, report) for source in job.data.sources]
        check_together(parts)
        bar.update(task, description="baselines")
        return JobData(tuple(parts), _baselines(job, JobData(tuple(parts), {})))


def _prepare(source: str, job: Job, report: Callable[[str, float], None]) -> Prepared:
    how = job.data
    if is_far(source):
        return open_build(source, how.tokenizer, job.model.vocab, mirror(source, data_cache()))
    if is_build(source):
        return open_build(source, how.tokenizer, job.model.vocab)
    return prepare(source, job.data.tokenizer, job.model.vocab, data_cache(), report)


def _baselines(job: Job, data: JobData) -> dict[str, float]:
    """Unigram and bigram loss on the windows that the run evaluates on; kept beside the stores, or
    in the cache where those are the user's own."""
    how = job.data
    reading = how.reading(job.cluster.processes)
    try:
        rows = open_rows(data.train_prefix, how, job.job.seed, data.end_of_text, reading)
        held_out = open_held_out(data.held_out_prefix, how.seq_len, rows.order.mixture, reading)
    except DataError as error:
        names = ", ".join(repr(source.path) for source in how.sources)
        raise DataError(f"data.source = {names}: {error}") from error
    indices = held_out.spread(job.job.eval_sequences)
    inside = data.end_of_text if how.inside_documents else None
    decides = [how.seq_len, len(indices), job.model.vocab, inside, rows.identity, _shares(job)]
    key = sha256(json.dumps(decides).encode()).hexdigest()[:12]
    first = how.sources[0].path
    own = len(data.parts) == 1 and not is_far(first) and not is_build(first)
    folder = data.train_prefix[0].parent if own else data_cache()
    cached = folder / f"baselines-{key}.json"
    if cached.is_file():
        kept: dict[str, float] = json.loads(cached.read_text())
        return kept
    stores = [rows.store for rows in rows.sources]
    counted = stores[0] if own else _heads(stores, _shares(job), how.bad_samples > 0)
    found = asdict(ngram_baselines(counted, held_out, indices, job.model.vocab, inside))
    losses = {name: found[name] for name in ("unigram_loss", "bigram_loss")}
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(f"{cached}.tmp")
    draft.write_text(json.dumps(losses))
    draft.replace(cached)
    return losses


def _shares(job: Job) -> list[float]:
    """Of the sources at the end of the run; they sum to 1."""
    weights = job.data.mixture(job.job.seed).stages[-1].weights
    return [weight / sum(weights) for weight in weights]


def _heads(stores: Sequence[TokenStore], shares: Sequence[float], tolerant: bool) -> TokenStore:
    """The first tokens of each store by its share, for these may be too many to count them all;
    without those that are damaged if `tolerant`."""
    heads = []
    for store, share in zip(stores, shares, strict=True):
        stop = min(int(share * _COUNTED), store.n_tokens)
        for first in range(0, stop, _AT_ONCE):
            heads += _whole(store, first, min(first + _AT_ONCE, stop), tolerant)
    tokens = np.concatenate(heads) if heads else np.zeros(2, np.int64)
    return TokenStore(stores[0].prefix, tokens, np.array([0, tokens.size]))


def _whole(
    store: TokenStore, first: int, stop: int, tolerant: bool
) -> list[npt.NDArray[np.integer]]:
    """Tokens [first, stop) in pieces, but for those around what is damaged if `tolerant`."""
    try:
        bring(store.tokens, [(first, stop)])
        return [store.tokens[first:stop]]
    except DamagedError:
        if not tolerant:
            raise
    if stop - first <= _LEFT_OUT:
        return []
    middle = (first + stop) // 2
    return _whole(store, first, middle, tolerant) + _whole(store, middle, stop, tolerant)
