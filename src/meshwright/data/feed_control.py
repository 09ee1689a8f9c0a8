"""How many readers a feed has and how far they read ahead, from what the trainer waited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import median

_SLACK = 1.25  # readers beyond what the mean asks for
_CALM = 0.01  # share of waiting below which readers may be too many
_FURTHEST = 64  # batches ahead of what the readers are at
_GAIN = 1.1  # more readers are worth it if they deliver so many times as much


@dataclass(frozen=True)
class Limits:
    """What a feed may use: reader threads, bytes of batches that are ready, and the share of a step
    that may be waiting before it is worth saying."""

    workers: int = 16
    memory_bytes: int = 1 << 30
    wait_share: float = 0.05


@dataclass(frozen=True)
class Controls:
    """Reader threads, and batches that are under way or ready at most.

    `tried` and `rate` are readers and batches a second of the last setting that delivered more than
    those before it; `saturated`: more readers than `tried` did not help.
    """

    workers: int = 1
    depth: int = 2
    tried: int = 0
    rate: float = 0.0
    saturated: bool = False


@dataclass(frozen=True)
class Seen:
    """Of some steps: time in all and blocked in `next()`, what reading one batch took a reader on
    average and at worst, and the bytes of the largest batch."""

    steps: int
    total_s: float
    wait_s: float
    fetch_s: float
    slowest_s: float
    batch_bytes: int

    @property
    def wait_share(self) -> float:
        """Share of the time that was waiting."""
        return self.wait_s / self.total_s if self.total_s else 0.0

    @property
    def compute_s(self) -> float:
        """Of a step, what was not waiting."""
        return max(1e-6, (self.total_s - self.wait_s) / max(1, self.steps))


def adjust(now: Controls, seen: Seen, limits: Limits) -> Controls:
    """The controls of the next steps.

    By Little's law `fetch_s / compute_s` readers keep pace. Where more of them each become as much
    slower, storage or the processor gives no more, and the smaller number stays.
    """
    learned = _learn(now, seen) if seen.wait_share > limits.wait_share else now
    wanted = ceil(_SLACK * seen.fetch_s / seen.compute_s)
    if seen.wait_share > limits.wait_share:
        wanted = max(wanted, now.workers + 1)
    elif seen.wait_share > _CALM:
        wanted = max(wanted, now.workers)
    if learned.saturated:
        wanted = min(wanted, learned.tried)
    most = deepest(seen, limits)
    workers = max(1, min(wanted, limits.workers, most, 2 * now.workers))
    workers = max(workers, min(now.workers - 1, most))  # up fast, down slowly
    # So that the slowest is waited for in peace.
    ahead = 1 + min(_FURTHEST, ceil(seen.slowest_s / seen.compute_s))
    return replace(learned, workers=workers, depth=max(workers, min(most, workers + ahead)))


def _learn(now: Controls, seen: Seen) -> Controls:
    """What a starved trainer was given each second is what the readers deliver."""
    rate = seen.steps / seen.total_s
    if not now.rate or rate > _GAIN * now.rate:
        return replace(now, tried=now.workers, rate=rate, saturated=False)
    if now.workers > now.tried:
        return replace(now, saturated=True)
    return replace(now, rate=rate, saturated=now.saturated and rate > now.rate / _GAIN)


def deepest(seen: Seen, limits: Limits) -> int:
    """Batches that fit the memory; one at least."""
    return max(1, limits.memory_bytes // max(1, seen.batch_bytes))


def at_limit(now: Controls, seen: Seen, limits: Limits) -> bool:
    """Whether more readers, or more batches ahead, would not help or are not allowed."""
    return now.saturated or now.workers >= limits.workers or now.depth >= deepest(seen, limits)


def advice(now: Controls, seen: Seen, limits: Limits) -> str | None:
    """One line on what keeps the trainer waiting and what would help, or None below the limit."""
    if seen.wait_share <= limits.wait_share:
        return None
    step_s = seen.total_s / max(1, seen.steps)
    told = (
        f"data: {seen.wait_share:.0%} of a step is waiting for data; a reader takes "
        f"{seen.fetch_s:.3g} s a batch, there are {now.workers}, and the rest of a step takes "
        f"{seen.compute_s:.3g} s"
    )
    if now.saturated:
        mb_s = now.rate * seen.batch_bytes / 1e6
        return (
            f"{told}; storage or decoding gives {mb_s:.3g} MB/s however many read: a faster disk, "
            "a local cache or fewer bytes a sample would make a step up to "
            f"{step_s / seen.compute_s:.2g} times as fast"
        )
    if now.workers >= limits.workers:
        return f"{told}; raise the limit of {limits.workers} readers"
    if now.depth >= deepest(seen, limits):
        needed = seen.batch_bytes * ceil(_SLACK * seen.fetch_s / seen.compute_s)
        return f"{told}; their memory is at its limit: raise it to {needed / 2**20:.0f} MiB"
    return f"{told}; more are being started"


def input_bound_share(usual_s: Sequence[float], replayed_s: Sequence[float]) -> float:
    """Share of a step that reading costs, from times of steps as usual and with one batch replayed:
    the only figure that also sees what reading takes from the processor. Neither may be empty."""
    return max(0.0, 1 - median(replayed_s) / median(usual_s))


def replays(step: int, replay: int | None) -> bool:
    """Whether `step`, from 0, gets the batch of the step before it, in a trial where every other
    run of `replay` steps does; None: there is no trial."""
    return replay is not None and step // replay % 2 == 1
