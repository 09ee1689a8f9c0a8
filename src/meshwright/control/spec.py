"""What users ask for: a cluster, a job, a fault. Every key is checked, unknown ones are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.control.words import FaultKind, NodeAction

EngineName = Literal["local", "simulated", "slurm", "kubernetes"]

# Of clusters and jobs: also part of paths, host names and command lines.
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?$")]
Labels = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/+@-]{1,128}$")],
        Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")],
    ],
    Field(max_length=50),
]


class Asked(BaseModel):
    """Known keys only, which stay as they are."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Storage(Asked):
    """Nodes that serve files to the others."""

    nodes: int = Field(default=1, ge=0, le=1024)
    capacity_tb: float = Field(default=10.0, gt=0, le=1e6, description="1e12 bytes, in all")
    bandwidth_gb_s: float = Field(default=2.0, gt=0, le=1e5, description="of one node of the rest")


class Network(Asked):
    """How nodes are joined."""

    topology: Literal["torus", "switch"] = Field(default="torus", description="inside a domain")
    bandwidth_gb_s: float | None = Field(
        default=None,
        gt=0,
        le=1e5,
        description="of a chip to other nodes; the instance's by default",
    )
    subnet: str = Field(default="", max_length=64, description="CIDR or name, for real engines")


class Encryption(Asked):
    """AES-256 at rest, of the commits of jobs that name no key themselves."""

    enabled: bool = True
    key: str = Field(
        default="",
        max_length=512,
        description="file:PATH, kms:ALIAS or vault:URL; without one nothing is sealed",
    )


class ClusterSpec(Asked):
    """`CreateTrainiumCluster`: by default 64 chips, 4 nodes x 16, in a torus."""

    name: Name
    engine: EngineName = "simulated"
    instance: str = Field(
        default="trn2u", max_length=64, description="of the catalogue; engine local: processes"
    )
    nodes: int = Field(default=4, ge=1, le=6250)
    chips_per_node: int | None = Field(
        default=None, ge=1, le=64, description="the instance's by default"
    )
    spares: int = Field(
        default=1, ge=0, le=10_000, description="chips held ready, at most 4 for each 64"
    )
    memory_gib_per_chip: float | None = Field(default=None, gt=0, le=4096)
    storage: Storage = Storage()
    network: Network = Network()
    encryption: Encryption = Encryption()
    seed: int = Field(default=0, ge=0, lt=2**31, description="of a simulated cluster")
    speed: float = Field(
        default=1.0, gt=0, le=1e5, description="of a simulated cluster: its seconds in one of ours"
    )
    partition: str = Field(
        default="", max_length=64, pattern=r"^[A-Za-z0-9_.-]*$", description="engine slurm"
    )
    namespace: str = Field(
        default="default",
        max_length=63,
        pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$",
        description="engine kubernetes",
    )
    software: str = Field(default="1.0", max_length=64, pattern=r"^[A-Za-z0-9_.+-]+$")
    labels: Labels = {}


class ClusterChange(Asked):
    """`UpdateCluster`: what is given changes."""

    nodes: int | None = Field(default=None, ge=1, le=6250)
    spares: int | None = Field(default=None, ge=0, le=10_000)
    labels: Labels | None = None


class JobRequest(Asked):
    """`SubmitTrainingJob`: a job file's tables, or its text, for a cluster."""

    cluster: str = Field(max_length=64, description="name or id")
    name: Name | None = Field(default=None, description="default: job.name of the job file")
    job: dict[str, Any] | None = Field(default=None, description="tables of a job file")
    job_toml: str | None = Field(default=None, max_length=1_000_000, description="or its text")
    overrides: list[str] = Field(default=[], max_length=100, description="section.key=value")
    priority: int = Field(default=0, ge=-1000, le=1000, description="higher goes first")
    max_restarts: int = Field(default=3, ge=0, le=1000, description="after its run was lost")
    labels: Labels = {}

    @model_validator(mode="after")
    def _one_job(self) -> Self:
        if (self.job is None) == (self.job_toml is None):
            raise ValueError("give one of job and job_toml")
        return self


class FaultRequest(Asked):
    """`InjectFault`: on a whole node, or on one of its chips."""

    kind: FaultKind
    node: int = Field(ge=0, le=1_000_000)
    chip: int | None = Field(default=None, ge=0, le=1000, description="within the node")
    severity: float = Field(default=0.5, gt=0, le=1000)
    seconds: float | None = Field(default=None, gt=0, le=1e7, description="until cleared if absent")


class PlanRequest(Asked):
    """`CreatePlan`: what `meshwright plan` is asked, of a model that is known by name."""

    model: str = Field(max_length=64, description="a preset")
    cluster: str = Field(max_length=64, description="INSTANCE:CHIPS, of the catalogue")
    seq_len: int | None = Field(default=None, gt=0, le=1 << 24)
    global_batch: int | None = Field(default=None, gt=0, le=1 << 24, description="sequences")
    precision: str | None = Field(default=None, max_length=16)
    framework: str | None = Field(default=None, max_length=32)
    top: int = Field(default=3, ge=1, le=20)


class ResizeRequest(Asked):
    """`ResizeTrainingJob`: keys of `[layout]` to change while it goes on."""

    layout: dict[str, int | str | bool] = Field(min_length=1, max_length=30)


class NodeActionRequest(Asked):
    """`ActOnNode`."""

    action: NodeAction


class BulkRequest(Asked):
    """`BulkClusterAction`: the same for several clusters; each goes on its own."""

    action: Literal["update", "delete"]
    clusters: list[Annotated[str, Field(max_length=64)]] = Field(min_length=1, max_length=100)
    change: ClusterChange | None = Field(default=None, description="for update")

    @model_validator(mode="after")
    def _change_for_update(self) -> Self:
        if (self.action == "update") != (self.change is not None):
            raise ValueError("give change with action update, and only with it")
        return self
