"""Every error that Meshwright raises on purpose.

MeshwrightError
├── InputError          wrong input from the user: exit 2, one line, nothing written
│   ├── ConfigError     a key of the job file or of the command line
│   ├── NotFoundError   what was named is not there
│   ├── ConflictError   what was asked does not go with how things are
│   └── DataError       a corpus, token store or tokenizer that cannot be used
│       └── DamagedError    a part of it is not what was built: a job may do without some
├── CheckpointError     a checkpoint that is absent, torn or does not fit
└── RunError            a run that ended before its last step: exit 1
    └── RankLostError   a rank died
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class MeshwrightError(Exception):
    """Root of the tree. `str()` is one line for a person."""

    exit_code = 1


class InputError(MeshwrightError):
    """What the user gave cannot be used; nothing has been written."""

    exit_code = 2


class ConfigError(InputError):
    """A key holds a value that cannot be used.

    `key` is dotted (`layout.tp`), `value` what was given, `fix` says what is wrong and the way out.
    """

    def __init__(self, key: str, value: object, fix: str) -> None:
        self.key, self.value, self.fix = key, value, fix
        super().__init__(f"{key} = {value!r}: {fix}")


class NotFoundError(InputError):
    """No cluster, job, operation or other thing of that name."""


class ConflictError(InputError):
    """It cannot be done as things are now; `str()` says what would have to be done first."""


class DataError(InputError):
    """A corpus, token store or tokenizer cannot be used."""


class DamagedError(DataError):
    """A part of a corpus is not what was built, whoever reads it: a job may do without some."""


class CheckpointError(MeshwrightError):
    """A checkpoint is absent, torn, or does not fit the model that asks for it."""


class RunError(MeshwrightError):
    """A run ended before its last step."""


class RankLostError(RunError):
    """A rank died. `str()` names rank, step, signal or exit code, and the log file."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean "hidden"?` for a near miss, else an empty string."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""
