"""What is asked of the planner: which model, on which cluster, trained with what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import get_args

from meshwright.base.errors import ConfigError, did_you_mean
from meshwright.catalog import Cluster, cluster
from meshwright.models import presets
from meshwright.models.spec import ModelSpec
from meshwright.plan.cost.constants import Constants
from meshwright.plan.cost.framework import Framework, framework
from meshwright.plan.cost.oom import BALANCED, NATURAL, Imbalance
from meshwright.plan.cost.workload import Precision, Workload
from meshwright.plan.read import Reading, read

LARGEST_MICRO_BATCH = 16  # sequences; more only makes activations and the bubble larger
LONGEST_DEFAULT = 8192  # tokens: what most published pretraining runs use

# Tokens of a step where nobody says: (parameters up to, tokens). Llama 3 took 4 Mi tokens for its
# 8B, 16 Mi for most of its 405B (arXiv 2407.21783, section 3.4.1); DeepSeek-V3 15,360 x 4,096.
STEP_TOKENS = ((1e9, 2**20), (20e9, 2**22), (150e9, 2**23), (float("inf"), 2**24))

_STYLES = {"trainium": "neuron", "tpu": "maxtext", "cpu": "meshwright"}
_FORMATS = {"torchtitan": "torchtitan", "deepspeed": "deepspeed", "megatron": "megatron"}


@dataclass(frozen=True)
class Question:
    """A model, its batch and its framework on a cluster. `imbalance` is how unevenly experts may be
    loaded at worst over a run (it bears on memory), `risk` the probability of running out of memory
    that a layout may have, `notes` what was filled in. `causal`, `trained` and `sample_bytes` are
    as of `Workload`; `largest_micro_batch` is in sequences."""

    spec: ModelSpec
    cluster: Cluster
    framework: Framework
    seq_len: int
    global_batch: int
    precision: Precision
    imbalance: Imbalance
    constants: Constants
    risk: float = 0.1
    notes: tuple[str, ...] = ()
    causal: bool = True
    trained: bool = True
    sample_bytes: float | None = None
    largest_micro_batch: int = LARGEST_MICRO_BATCH

    @cached_property
    def work(self) -> Workload:
        """The workload as the cost model has it; time counts balanced experts."""
        return Workload(
            self.spec, self.seq_len, self.global_batch, self.precision, self.framework,
            causal=self.causal, trained=self.trained, sample_bytes=self.sample_bytes,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq_len * self.global_batch

    @property
    def peak_flops(self) -> float:
        """Dense peak of one chip in the precision in use: the denominator of MFU."""
        return self.cluster.chip.peak(self.precision)

    @property
    def flops_per_chip(self) -> float:
        """Model FLOPs of a step on each chip."""
        return self.work.flops_per_token * self.tokens / self.cluster.chips

    def on(self, other: Cluster) -> Question:
        """The same on another cluster."""
        return replace(self, cluster=other)


@dataclass(frozen=True)
class Wishes:
    """What the user said besides model and cluster; None: to be filled in."""

    seq_len: int | None = None
    global_batch: int | None = None
    precision: str | None = None
    framework: str | None = None
    risk: float = 0.1
    catalogue: Path | None = None
    constants: Constants | None = None


def ask(
    model: str, cluster_ref: str, wishes: Wishes | None = None
) -> tuple[Question, Reading | None]:
    """The question, and what was read from a file if `model` is one.

    Raises ConfigError, one line, for a name that is not known or a value that does not fit.
    """
    wishes = wishes or Wishes()
    where = cluster(cluster_ref, wishes.catalogue)
    spec, reading = find_model(model, where.chips)
    notes: list[str] = []
    seq_len = wishes.seq_len or (reading and reading.seq_len)
    if not seq_len:
        seq_len = min(spec.max_seq_len, LONGEST_DEFAULT)
        notes.append(f"seq_len = {seq_len}: not given")
    batch = wishes.global_batch or (reading and reading.global_batch)
    if not batch:
        batch = default_batch(spec, seq_len)
        notes.append(f"global_batch = {batch} sequences: not given")
    question = Question(
        spec=spec,
        cluster=where,
        framework=_framework(wishes, where, reading, notes),
        seq_len=seq_len,
        global_batch=batch,
        precision=_precision(wishes.precision, where, reading, notes),
        imbalance=NATURAL if spec.n_experts else BALANCED,
        constants=wishes.constants or Constants.shipped(),
        risk=wishes.risk,
        notes=tuple(notes),
    )
    return question, reading


def find_model(model: str, chips: int) -> tuple[ModelSpec, Reading | None]:
    """A preset by name, or the model of a file or of a folder with a config.json."""
    if model in presets.names():
        return presets.preset(model), None
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.exists():
        reading = read(path, world=chips)
        return reading.spec(), reading
    hint = did_you_mean(model, presets.names()) or f"; presets: {', '.join(presets.names())}"
    raise ConfigError("model", model, "neither a preset nor a file" + hint)


def default_batch(spec: ModelSpec, seq_len: int) -> int:
    """Sequences of a step where nobody says (`STEP_TOKENS`), a power of two."""
    tokens = next(tokens for most, tokens in STEP_TOKENS if spec.params <= most)
    return 1 << max(1, tokens // seq_len).bit_length() - 1


def _framework(
    wishes: Wishes, where: Cluster, reading: Reading | None, notes: list[str]
) -> Framework:
    if wishes.framework:
        return framework(wishes.framework)
    chip = where.chip.name
    style = next((name for start, name in _STYLES.items() if chip.startswith(start)), "megatron")
    if reading and reading.format in _FORMATS:
        style = _FORMATS[reading.format]
    notes.append(f"framework = {style}: not given")
    return framework(style)


def _precision(
    wish: str | None, where: Cluster, reading: Reading | None, notes: list[str]
) -> Precision:
    said = wish or (reading and reading.layout.get("precision"))
    known = get_args(Precision)
    if said and said not in known:
        hint = did_you_mean(str(said), known) or f"; known: {', '.join(known)}"
        raise ConfigError("precision", said, "no such precision" + hint)
    if not said:
        said = "fp32" if where.chip.name == "cpu" else "bf16"
        notes.append(f"precision = {said}: not given")
    where.chip.peak(said)
    precision: Precision = next(name for name in known if name == said)
    return precision
