"""Where the commits of a run are, for the commands that start one, go on with it or look at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from meshwright.base.errors import CheckpointError, ConfigError, InputError
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.holding import DamagedRecordError
from meshwright.checkpoint.keys import provider
from meshwright.checkpoint.opening import KEY, StoreAt
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import MAIN, Store
from meshwright.checkpoint.stored import DamagedCommitError
from meshwright.conduct.stores import store_of
from meshwright.plan.job import Job, load_job

COMMIT_HELP = "Head by default; a step, a tag, a branch, BRANCH@STEP or the beginning of an id."


def store_of_run(run: Path) -> StoreAt:
    """That of the run in the folder `run`."""
    return store_of(load_job(run / "job.toml"), run)


def store_at(where: str, branch: str | None = None, key: str = "") -> StoreAt:
    """That of a run folder, or the store in a folder or at an address; with another branch or key
    if they are given."""
    run = Path(where)
    is_run = "://" not in where and (run / "job.toml").is_file()
    at = store_of_run(run) if is_run else StoreAt(where, MAIN)
    return replace(at, branch=branch or at.branch, encrypt=key or at.encrypt)


@contextmanager
def as_asked() -> Iterator[None]:
    """What the user named and is not there, or cannot be had so, is wrong input; damage is not."""
    try:
        yield
    except (DamagedCommitError, DamagedRecordError):
        raise
    except CheckpointError as error:
        raise InputError(str(error)) from error


def opened(at: StoreAt) -> Store:
    """The store, once it is sure that its keys fit. Raises InputError."""
    with as_asked():
        store = at.open()
        if at.encrypt:
            store.head(at.branch)
    return store


def branch_of(at: StoreAt) -> Store:
    """The store, which has the branch. Raises InputError."""
    store = opened(at)
    if at.branch not in (names := store.branches()):
        there = f"there are {', '.join(names)}" if names else "nothing has been committed there"
        raise InputError(f"{at.address}: no branch {at.branch!r}; {there}")
    return store


def commit_of(where: str, word: str = "", key: str = "", branch: str | None = None) -> Reader:
    """What the commit named by `word` holds, the head if it is empty. A step is one of the run's
    branch, if that has it. Raises InputError."""
    at = store_at(where, branch, key)
    store = opened(at)
    with as_asked():
        commit = _found(store, at.branch, word) if word else store.head(at.branch)
        if commit is None:
            raise InputError(f"{at.address}: branch {at.branch} has no commit; see its branches")
        return store.reader(commit)


def _found(store: Store, branch: str, word: str) -> Commit:
    if word.isdecimal():
        of_branch = [one for one in store.commits(branch) if one.step == int(word)]
        if of_branch:
            return of_branch[-1]
    return store.find(word)


def refuse_bad_store(job: Job) -> None:
    """Before a run begins: raises ConfigError if its keys cannot be used, or if it would be the
    second one on a branch, where two would go on from each other's weights."""
    if job.checkpoint.encrypt:
        provider(job.checkpoint.encrypt, KEY)
    if not job.checkpoint.store:
        return
    at = store_of(job, Path())
    with as_asked():
        head = at.head()
    if head is not None:
        raise ConfigError(
            "checkpoint.branch",
            at.branch,
            f"{at.address} has it already, up to step {head.step}; take another name, or go on "
            "with the run that wrote it",
        )
