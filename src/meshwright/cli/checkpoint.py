"""`meshwright checkpoint`: what a store holds, where it came from, whether it is whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from meshwright.base.errors import InputError
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.files import Files
from meshwright.checkpoint.history import Logged
from meshwright.checkpoint.holding import DamagedRecordError
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.rehearsal import rehearse
from meshwright.checkpoint.retention import Policy
from meshwright.checkpoint.store import GRACE_S, Store
from meshwright.checkpoint.stored import DamagedCommitError
from meshwright.cli.checkpoint_exchange import export, import_
from meshwright.cli.checkpoint_keys import new_key, rotate_keys
from meshwright.cli.commits import COMMIT_HELP, as_asked, branch_of, commit_of, opened, store_at
from meshwright.cli.options import AsJson, print_json

checkpoint = typer.Typer(
    help="Look into stores of checkpoints, check them, branch, prune, exchange.",
    no_args_is_help=True,
)
checkpoint.command("export")(export)
checkpoint.command("import")(import_)
checkpoint.command("new-key")(new_key)
checkpoint.command("rotate-keys")(rotate_keys)

Where = Annotated[
    str, typer.Argument(metavar="RUN|STORE", help="Run folder, or a store's folder or address.")
]
CommitWord = Annotated[str, typer.Argument(metavar="COMMIT", help=COMMIT_HELP)]
Branch = Annotated[str | None, typer.Option(help="The run's own, or main, by default.")]
Key = Annotated[str, typer.Option(help="Of an encrypted store that is not a run's: its key.")]


@checkpoint.command("log")
def log(where: Where, branch: Branch = None, key: Key = "", as_json: AsJson = False) -> None:
    """What a branch has recorded, newest first."""
    at = store_at(where, branch, key)
    found = branch_of(at).log(at.branch)
    if as_json:
        print_json([_logged_document(one) for one in found])
        return
    for one in found:
        typer.echo(_logged_line(one))


@checkpoint.command("branches")
def branches(where: Where, key: Key = "", as_json: AsJson = False) -> None:
    """All branches and tags, and where they are."""
    store = opened(store_at(where, None, key))
    heads = {name: store.head(name) for name in store.branches()}
    tags = store.tags()
    if as_json:
        ids = {name: head and head.id for name, head in heads.items()}
        print_json({"branches": ids, "tags": tags})
        return
    for name, head in heads.items():
        typer.echo(f"branch {name}: {head or 'empty'}")
    for name, commit_id in tags.items():
        typer.echo(f"tag {name}: {commit_id}")


@checkpoint.command("show")
def show(where: Where, commit: CommitWord = "", key: Key = "", as_json: AsJson = False) -> None:
    """What a commit holds: its tensors, and all that it was made with."""
    reader = commit_of(where, commit, key)
    document = _commit_document(reader)
    if as_json:
        print_json(document)
        return
    typer.echo(
        f"{reader.commit}, parent {reader.commit.parent or 'none'}, "
        f"{document['elements']:,} elements in {len(document['tensors'])} tensors, "
        f"stored in {document['stored_bytes']:,} bytes"
    )
    for line in _made_with(reader.meta):
        typer.echo(line)
    for name, tensor in document["tensors"].items():
        typer.echo(f"  {name}  {tensor['dtype']} {tensor['shape']}")


@checkpoint.command("diff")
def diff(
    where: Where, old: CommitWord, new: CommitWord, key: Key = "", as_json: AsJson = False
) -> None:
    """Which tensors differ between two commits, and by how much."""
    before, after = (commit_of(where, word, key).commit for word in (old, new))
    found = opened(store_at(where, None, key)).diff(before, after)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    for one in found:
        what = one.kind
        if what == "changed":
            what = (
                f"{one.changed:,} of {one.size:,} elements, by {one.relative:.2g} of its norm, "
                f"one by {one.largest:.2g} at most"
            )
        typer.echo(f"{one.name}: {what}")
    if not found:
        typer.echo("no tensor differs")


@checkpoint.command("lineage")
def lineage(where: Where, commit: CommitWord = "", key: Key = "", as_json: AsJson = False) -> None:
    """Which samples, in the order of which data, made a commit."""
    store = opened(store_at(where, None, key))
    found = store.lineage(commit_of(where, commit, key).commit)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    for one in found:
        typer.echo(
            f"steps {one.after_step + 1} to {one.step}: samples {one.first} to {one.stop - 1} "
            f"of data {one.data or 'unknown'}"
        )
        for name, (first, stop) in one.sources.items():
            typer.echo(f"  {name}: {first} to {stop - 1}")


@checkpoint.command("verify")
def verify(
    where: Where,
    commit: CommitWord = "",
    every: Annotated[bool, typer.Option("--all", help="All commits of the branch.")] = False,
    branch: Branch = None,
    key: Key = "",
    as_json: AsJson = False,
) -> int:
    """Read all bytes of a commit, restore a part of it, and repair what is damaged from the run's
    replica; exit code 1 if a commit is damaged and cannot be repaired."""
    at = store_at(where, branch, key)
    store = branch_of(at) if every else opened(at)
    wanted = store.commits(at.branch) if every else [commit_of(where, commit, key, branch).commit]
    with as_asked():
        replica = at.replica_files()
    results = [_verified(store, one, replica) for one in wanted]
    if as_json:
        print_json(results)
    for one in results if not as_json else ():
        whole = f"{one['commit']}: {one['bytes']:,} bytes are as they were saved"
        typer.echo(one["error"] or whole)
        for damage in one["repaired"]:
            typer.echo(f"  repaired: {damage}")
    return int(any(one["error"] for one in results))


@checkpoint.command("tag")
def tag(
    where: Where,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    commit: CommitWord = "",
    key: Key = "",
) -> None:
    """Name a commit, which is never pruned then."""
    found = commit_of(where, commit, key).commit
    with as_asked():
        opened(store_at(where, None, key)).tag(name, found)
    typer.echo(f"tag {name}: {found}")


@checkpoint.command("untag")
def untag(
    where: Where, name: Annotated[str, typer.Argument(metavar="NAME")], key: Key = ""
) -> None:
    """Remove a name of a commit."""
    store = opened(store_at(where, None, key))
    if name not in (tags := store.tags()):
        there = f"there are {', '.join(tags)}" if tags else "there are none"
        raise InputError(f"{store.address}: no tag {name!r}; {there}")
    store.untag(name)


@checkpoint.command("branch")
def branch_(
    where: Where,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the new branch.")],
    commit: CommitWord = "",
    key: Key = "",
) -> None:
    """Begin a branch at a commit; a run goes on there by `-o checkpoint.branch=NAME`."""
    found = commit_of(where, commit, key).commit
    with as_asked():
        opened(store_at(where, None, key)).start_branch(name, found)
    typer.echo(f"branch {name}: {found}")


@checkpoint.command("rollback")
def rollback(where: Where, commit: CommitWord, branch: Branch = None, key: Key = "") -> None:
    """Make an earlier commit the head of a branch again; nothing is deleted."""
    at = store_at(where, branch, key)
    found = commit_of(where, commit, key, branch).commit
    branch_of(at).rollback(found, at.branch)
    typer.echo(f"{at.branch} is at {found}")


@checkpoint.command("prune")
def prune(
    where: Where,
    newest: Annotated[int, typer.Option(min=1, help="Newest commits of each branch to keep.")] = 2,
    verified: Annotated[int, typer.Option(min=2, help="Newest verified ones to keep.")] = 2,
    spaced: Annotated[bool, typer.Option(help="And verified ones 1, 2, 4, 8, ... back.")] = True,
    grace_s: Annotated[float, typer.Option(min=0, help="Files as young stay.")] = GRACE_S,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Remove old commits, then the bytes that no commit needs."""
    store = opened(store_at(where, None, key))
    gone = store.retain(Policy(newest, verified, spaced))
    freed = store.gc(grace_s)
    if as_json:
        print_json({"removed": [one.id for one in gone], "collected": asdict(freed)})
        return
    named = ", ".join(map(str, gone)) or "no commit"
    typer.echo(f"removed {named}; {freed.bytes:,} bytes in {freed.packs} packs are free")


def _verified(store: Store, commit: Commit, replica: Files | None) -> dict[str, Any]:
    found: dict[str, Any] = {"commit": str(commit), "bytes": 0, "error": None, "repaired": []}
    try:
        done = rehearse(store, commit, replica)
    except (DamagedCommitError, DamagedRecordError) as error:
        return found | {"error": str(error)}
    return found | {"bytes": done.read_bytes, "repaired": list(done.repaired)}


def _commit_document(reader: Reader) -> dict[str, Any]:
    commit = reader.commit
    tensors = {
        name: {"dtype": reader.dtype(name).name, "shape": list(reader.shape(name))}
        for name in reader.names
    }
    sizes = [row.piece.size * len(row.of) for index in reader.indices for row in index.stored]
    chunks = [c for index in reader.indices for row in index.stored for c in row.chunks]
    return {
        "id": commit.id,
        "step": commit.step,
        "branch": commit.branch,
        "parent": commit.parent,
        "time_s": commit.time_s,
        "depth": commit.depth,
        "elements": sum(sizes),
        "stored_bytes": sum(chunk.bytes for chunk in chunks),
        "meta": {key: value for key, value in reader.meta.items() if key != "said"},
        "tensors": tensors,
    }


def _made_with(meta: Mapping[str, Any]) -> list[str]:
    """What a commit was made with, for a person; `--json` has all of it."""
    words = []
    if "job" in meta:
        words.append(f"job {meta['job']['job']['name']} as {meta['layout']}, seed {meta['seed']}")
    if "data_position" in meta:
        words.append(f"after samples {meta['data_position']}, updates {meta.get('updates')}")
    if "code" in meta:
        words.append(f"by {', '.join(f'{what} {which}' for what, which in meta['code'].items())}")
    return [", ".join(words)] if words else []


def _logged_document(one: Logged) -> dict[str, Any]:
    document = asdict(one)
    if one.commit is not None:
        document["commit"] = {"id": one.commit.id, "step": one.commit.step, **asdict(one.commit)}
    return document


def _logged_line(one: Logged) -> str:
    when = datetime.fromtimestamp(one.time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    if one.kind == "damaged":
        return f"{one.seq:6d}  damaged: {one.why}"
    if one.commit is None:
        return f"{one.seq:6d}  {when}  {one.kind} to {one.to.id[:8] if one.to else '?'}"
    marks = ["verified"] if one.verified_ns else []
    marks += ["BAD"] if one.bad else []
    marks += [] if one.on_line else ["left behind"]
    marks += [f"change {one.commit.depth}"] if one.commit.depth else []
    marks += [f"tag {name}" for name in one.tags]
    return f"{one.seq:6d}  {when}  {one.commit}  {', '.join(marks)}".rstrip()
