"""The states that clusters, nodes, chips, jobs and operations are in, by the names users read."""

from __future__ import annotations

from enum import StrEnum


class ClusterStatus(StrEnum):
    """Of a cluster; those that were deleted are gone from lists, and are kept in the events."""

    CREATING = "CREATING"
    READY = "READY"
    UPDATING = "UPDATING"
    DELETING = "DELETING"
    FAILED = "FAILED"


class NodeStatus(StrEnum):
    """Of a machine. UNKNOWN: nobody can see it now, which is no evidence that it has failed."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    UNKNOWN = "UNKNOWN"
    DRAINING = "DRAINING"
    DRAINED = "DRAINED"
    REBOOTING = "REBOOTING"
    REPLACING = "REPLACING"
    CHECKING = "CHECKING"
    FAILED = "FAILED"


class Health(StrEnum):
    """Of a chip, a link or a node."""

    HEALTHY = "HEALTHY"
    DEGRADED = "DEGRADED"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"


class JobStatus(StrEnum):
    """Of a job. The last three are final: nothing leads out of them."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def final(self) -> bool:
        """Whether nothing will change any more."""
        return self in (JobStatus.STOPPED, JobStatus.SUCCEEDED, JobStatus.FAILED)

    @property
    def holds_chips(self) -> bool:
        """Whether chips are its own."""
        return self in (JobStatus.STARTING, JobStatus.RUNNING, JobStatus.STOPPING)


class OperationStatus(StrEnum):
    """Of long work."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def final(self) -> bool:
        """Whether nothing will change any more."""
        return self in (OperationStatus.SUCCEEDED, OperationStatus.FAILED)


class NodeAction(StrEnum):
    """What can be asked of one machine."""

    DRAIN = "drain"  # no new work; what runs there leaves
    RESUME = "resume"  # take work again
    REBOOT = "reboot"
    REPLACE = "replace"  # another machine under the same name, its disks are lost
    CHECK = "check"  # the self-test of its chips


class FaultKind(StrEnum):
    """What can be done to a cluster on purpose."""

    CHIP_DEAD = "chip_dead"  # falls off the bus
    CHIP_SLOW = "chip_slow"  # severity: share of its speed that is lost
    CHIP_CORRUPT = "chip_corrupt"  # computes wrong numbers
    OVERHEAT = "overheat"  # severity: degrees C above what cooling would hold
    POWER_CAP = "power_cap"  # severity: share of its power that is taken away
    MEMORY_ERRORS = "memory_errors"  # severity: corrected errors a second
    MEMORY_FATAL = "memory_fatal"  # one uncorrected error
    LINK_DOWN = "link_down"  # of the chip's links to others in its domain
    LINK_SLOW = "link_slow"  # severity: share of its rate that is lost
    NODE_DOWN = "node_down"  # loses power
    NODE_UNREACHABLE = "node_unreachable"  # cannot be seen, and computes all the same


class RunState(StrEnum):
    """Of what an engine has started for a job, as far as it can see."""

    ABSENT = "ABSENT"  # nothing of this attempt was ever started
    STARTING = "STARTING"  # not all ranks are ready
    RUNNING = "RUNNING"  # all ranks have been ready
    FINISHED = "FINISHED"  # did its last step
    STOPPED = "STOPPED"  # ended on request, its state saved
    FAILED = "FAILED"  # ended, and says why
    LOST = "LOST"  # ended without a word: killed, or its machine is gone
    UNKNOWN = "UNKNOWN"  # cannot be seen now; no evidence that it has ended

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self in (RunState.FINISHED, RunState.STOPPED, RunState.FAILED, RunState.LOST)
