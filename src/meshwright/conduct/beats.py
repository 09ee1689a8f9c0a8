"""What an agent's heartbeat says of its members, as plain JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.base.pulse import Phase, Pulse
from meshwright.conduct.verdicts import Sample


def encode_sample(sample: Sample) -> list[Any]:
    """`sample` without its role, which the conductor knows."""
    own = [sample.rank, sample.member, sample.quiet_s, sample.state, sample.state_s]
    return [*own, *sample.pulse]


def decode_sample(fields: Sequence[Any], role: str) -> Sample:
    """The sample that `encode_sample` made."""
    rank, member, quiet_s, state, state_s, *rest = fields
    pulse = Pulse(*rest)
    pulse = pulse._replace(phase=Phase(pulse.phase))
    return Sample(rank, member, role, pulse, quiet_s, state, state_s)


def at_work(sample: Sample) -> bool:
    """Whether a member does something that may take long and leave no trace in its pulse, as a
    checkpoint; one that waits for others does not."""
    pulse = sample.pulse
    return sample.state != "T" and pulse.phase is not Phase.IDLE and not pulse.waits


def progress_key(pulse: Pulse) -> tuple[int, ...]:
    """Changes whenever a member gets on; waiting for another, or for others, is no progress."""
    return pulse.epoch, pulse.step, int(pulse.phase), pulse.begun, pulse.done
