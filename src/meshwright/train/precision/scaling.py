"""Dynamic loss scaling for fp16: the scale as a value, and the rule that makes the next one.

Source: arXiv 1710.03740, section 3.2: the loss is multiplied so that small gradients survive fp16;
a step whose gradients overflow is skipped and the scale shrinks; after enough good steps it grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class LossScaleSettings:
    """The rule: powers of two keep the scaling itself exact. `interval` is in steps."""

    initial: float = 2.0**16
    factor: float = 2.0
    interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24


@dataclass(frozen=True)
class LossScale:
    """What the loss is multiplied by, and good steps since it last changed."""

    scale: float
    good_steps: int = 0

    @classmethod
    def start(cls, settings: LossScaleSettings) -> LossScale:
        """The scale of the first step."""
        return cls(settings.initial)

    def after(self, finite: bool, settings: LossScaleSettings) -> LossScale:
        """The next step's scale; `finite`: no rank's gradients had an inf or nan in this step."""
        if not finite:
            return LossScale(max(self.scale / settings.factor, settings.smallest))
        if self.good_steps + 1 < settings.interval:
            return LossScale(self.scale, self.good_steps + 1)
        return LossScale(min(self.scale * settings.factor, settings.largest))

    def as_json(self) -> dict[str, float | int]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, float | int]) -> LossScale:
        """The inverse of `as_json`. Raises KeyError if a field is absent."""
        return cls(float(saved["scale"]), int(saved["good_steps"]))
