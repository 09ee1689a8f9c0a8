"""What a configuration is written from, and what writing it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.catalog import Cluster
from meshwright.models.spec import ModelSpec
from meshwright.plan.job import Job, resolve_job
from meshwright.plan.layout import Layout


@dataclass(frozen=True)
class Plan:
    """A layout for a model on a cluster, and the batch that it was chosen for.

    `seq_len` is in tokens, `global_batch` in sequences. `lr` is no part of a layout: every
    framework needs one, so that a stand-in is written where nobody chose one.
    """

    spec: ModelSpec
    layout: Layout
    seq_len: int
    global_batch: int
    steps: int
    cluster: Cluster
    name: str = "run"
    lr: float = 3e-4

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a data-parallel rank in one step."""
        return self.global_batch // (self.layout.dp * self.layout.micro_batch)

    @property
    def local_batch(self) -> int:
        """Sequences of a data-parallel rank in one step."""
        return self.global_batch // self.layout.dp

    @property
    def per_node(self) -> int:
        """Ranks on one machine; all of them where they do not fill one."""
        return min(self.cluster.chips_per_node, self.layout.world)

    @property
    def nodes(self) -> int:
        """Machines that the ranks stand on."""
        return -(-self.layout.world // self.per_node)

    @property
    def warmup(self) -> int:
        """Steps over which the learning rate rises: a stand-in, 1 % of the run."""
        return self.steps // 100

    def tables(self) -> dict[str, Any]:
        """The plan as the tables of our own job file, without what has its default value."""
        model = self.spec.model_dump(exclude_defaults=True)
        layout = self.layout.model_dump(exclude_defaults=True)
        return {
            "job": {"name": self.name, "steps": self.steps},
            "model": model,
            "data": {"seq_len": self.seq_len, "global_batch": self.global_batch},
            "layout": layout,
            "cluster": {"ref": f"local:{self.layout.world}"},
            "optimizer": {"lr": self.lr, "warmup_steps": self.warmup},
        }

    def checked(self) -> Job:
        """The plan as a job, by the rules that refuse what can run nowhere. Raises ConfigError."""
        if self.layout.world != self.cluster.chips:
            raise ConfigError(
                "layout",
                self.layout.label,
                f"its axes multiply to {self.layout.world} ranks, {self.cluster.name} has "
                f"{self.cluster.chips} chips; change an axis or the cluster",
            )
        return resolve_job(self.tables())


@dataclass(frozen=True)
class Emitted:
    """A runnable configuration: the text of each file by its name, the command that starts it on
    every machine, and what means something else there than in the plan."""

    files: Mapping[str, str]
    command: str
    notes: tuple[str, ...]
