"""Reading a run directory back: what was asked, what was planned, what happened.

A run may be young (files missing), alive (a last line half written) or have gone back to a
checkpoint (steps told twice). All of these are read without complaint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from meshwright.base.errors import InputError
from meshwright.base.events import ExpertLoad, Kind, Metrics, RankProfile
from meshwright.plan.job import Job, load_job

JsonObject = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """One `EVALUATED` event: mean losses in nats per token, all on the same held-out tokens."""

    step: int
    loss: float
    tokens: int
    bigram_loss: float | None = None
    unigram_loss: float | None = None


@dataclass(frozen=True)
class ExpertMove:
    """One `EXPERTS_MOVED` event; `before` and `after` are max / mean load of the chips."""

    step: int
    layer: int
    moved: int
    before: float
    after: float


@dataclass(frozen=True)
class RankPlace:
    """One rank of `plan.json`: its chip, its coordinates, what it holds. `layers` are those of all
    its pipeline stages."""

    rank: int
    chip: str
    node: str
    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    layers: tuple[int, ...]
    holds: tuple[str, ...]
    params: int
    cp: int = 0


@dataclass(frozen=True)
class PlanRecord:
    """`plan.json`. The peak is dense FLOP/s of the precision in use, None if it is not known;
    `stage_balance` is mean / max FLOPs of a pipeline rank. Older plans lack what has a default.
    """

    layout: dict[str, Any]
    label: str
    model_params: int
    flops_per_token: float
    peak_flops_per_chip: float | None
    peak_source: str
    ranks: tuple[RankPlace, ...]
    assumptions: tuple[str, ...] = ()
    active_params: int | None = None
    stage_balance: float | None = None


@dataclass(frozen=True)
class RunHistory:
    """Everything a run directory says. Metrics and evaluations ascend strictly in step.

    `expert_loads`, `expert_moves` and `skipped_steps` are of the steps that the newest weights
    descend from.
    """

    path: Path
    job: Job
    job_text: str
    plan: PlanRecord | None
    events: tuple[JsonObject, ...]
    metrics: tuple[Metrics, ...]
    evaluations: tuple[Evaluation, ...]
    profiles: tuple[RankProfile, ...]
    expert_loads: tuple[ExpertLoad, ...]
    expert_moves: tuple[ExpertMove, ...]
    skipped_steps: tuple[int, ...]
    unreadable_lines: int


class _Stepped(Protocol):
    @property
    def step(self) -> int: ...


Record = TypeVar("Record")
Stepped = TypeVar("Stepped", bound=_Stepped)


def read_run(path: Path) -> RunHistory:
    """The history of the run in `path`. Raises InputError if that is not a run directory."""
    job_path = path / "job.toml"
    if not job_path.is_file():
        raise InputError(f"{path}: not a run directory, it has no job.toml; give runs/NAME")
    job = load_job(job_path)
    events, bad_events = _read_lines(path / "events.jsonl")
    lines, bad_lines = _read_lines(path / "metrics.jsonl")
    metrics, bad_metrics = _parse_each(lines, _metrics())
    evaluations, bad_evaluations = _parse_each(_of_kind(events, Kind.EVALUATED), _evaluation())
    profiles, bad_profiles = _parse_each(_of_kind(events, Kind.RANK_PROFILE), _plain(RankProfile))
    valid = surviving(events)
    loads, bad_loads = _parse_each(_of_kind(valid, Kind.EXPERT_LOAD), _plain(ExpertLoad))
    moves, bad_moves = _parse_each(_of_kind(valid, Kind.EXPERTS_MOVED), _plain(ExpertMove))
    skipped, bad_skipped = _parse_each(_of_kind(valid, Kind.STEP_SKIPPED), _step)
    bad_events += bad_evaluations + bad_profiles + bad_loads + bad_moves + bad_skipped
    return RunHistory(
        path=path,
        job=job,
        job_text=job_path.read_text(),
        plan=_read_plan(path / "plan.json"),
        events=tuple(events),
        metrics=latest_lineage(metrics),
        evaluations=latest_lineage(evaluations),
        profiles=tuple(profiles),
        expert_loads=tuple(loads),
        expert_moves=tuple(moves),
        skipped_steps=tuple(skipped),
        unreadable_lines=bad_events + bad_lines + bad_metrics,
    )


def parse_plan(raw: JsonObject, source: str = "plan") -> PlanRecord:
    """The contents of a `plan.json`. Raises InputError naming `source` and the key at fault."""
    try:
        return TypeAdapter(PlanRecord).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{source}: {key}: {first['msg']}; was it edited by hand?") from error


def latest_lineage(records: Iterable[Stepped]) -> tuple[Stepped, ...]:
    """The records that the newest weights descend from, ascending in step.

    Files are only ever appended to, so a step that does not ascend means that the run went back to
    a checkpoint: the record of that step and all after it were lost and are dropped.
    """
    kept: list[Stepped] = []
    for record in records:
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return tuple(kept)


def surviving(events: Iterable[JsonObject]) -> list[JsonObject]:
    """`events` without those of steps that a later incarnation, which began before them, undid."""
    kept: list[JsonObject] = []
    for event in events:
        if event.get("kind") == Kind.RUN_STARTED:
            first = _count(event.get("resumed_from"))
            kept = [one for one in kept if _count(one.get("step")) <= first]
        kept.append(event)
    return kept


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _read_plan(path: Path) -> PlanRecord | None:
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}; was it edited by hand?") from error
    return parse_plan(raw, str(path))


def _read_lines(path: Path) -> tuple[list[JsonObject], int]:
    """The JSON objects of a `.jsonl` file, and how many lines are none.

    A line counts from the moment its newline is written; a missing file has no lines.
    """
    if not path.is_file():
        return [], 0
    *lines, _unfinished = path.read_bytes().split(b"\n")
    return _parse_each(lines, _json_object)


def _json_object(line: bytes) -> JsonObject:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


Raw = TypeVar("Raw")


def _parse_each(raws: Iterable[Raw], parse: Callable[[Raw], Record]) -> tuple[list[Record], int]:
    """What `parse` makes of each of `raws`, and how many it refused with ValueError."""
    parsed: list[Record] = []
    refused = 0
    for raw in raws:
        try:
            parsed.append(parse(raw))
        except ValueError:  # pydantic's and json's errors are ValueErrors too
            refused += 1
    return parsed, refused


def _of_kind(events: Iterable[JsonObject], kind: Kind) -> list[JsonObject]:
    return [event for event in events if event.get("kind") == kind]


def _metrics() -> Callable[[JsonObject], Metrics]:
    adapter = TypeAdapter(Metrics)
    measured = {
        field.name: None if field.default is MISSING else field.default
        for field in fields(Metrics)
        if field.name not in ("step", "tokens", "predicted_step_time_s")
    }

    def parse(line: JsonObject) -> Metrics:
        numbers = {name: _number(line.get(name, absent)) for name, absent in measured.items()}
        return adapter.validate_python({"predicted_step_time_s": None, **line, **numbers})

    return parse


def _evaluation() -> Callable[[JsonObject], Evaluation]:
    adapter = TypeAdapter(Evaluation)
    return lambda event: adapter.validate_python({**event, "loss": _number(event.get("loss"))})


def _plain(record: type[Record]) -> Callable[[JsonObject], Record]:
    adapter = TypeAdapter(record)
    return lambda event: adapter.validate_python(event)


def _step(event: JsonObject) -> int:
    step = event.get("step")
    if not isinstance(step, int):
        raise ValueError(f"step {step!r} is not a whole number")
    return step


def _number(value: Any) -> Any:
    """JSON has no NaN: `null` stands for it."""
    return math.nan if value is None else value
