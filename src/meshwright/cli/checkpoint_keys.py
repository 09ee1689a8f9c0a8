"""`meshwright checkpoint new-key` and `rotate-keys`: the master keys of encrypted stores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.base.errors import InputError
from meshwright.checkpoint.files import open_files
from meshwright.checkpoint.keys import provider
from meshwright.checkpoint.keys.local import make_key_file
from meshwright.checkpoint.keys.rotation import rotate
from meshwright.cli.commits import as_asked, store_at

_KEY_HELP = "file:PATH, kms:ALIAS_OR_ARN[?region=NAME] or vault:https://HOST/MOUNT/KEY"


def new_key(path: Annotated[Path, typer.Argument(metavar="FILE", help="Must not exist.")]) -> None:
    """Make a master key in a file that only its owner may read."""
    path = path.expanduser()
    make_key_file(path)
    typer.echo(f'encrypt = "file:{path.absolute()}"', nl=True)


def rotate_keys(
    where: Annotated[str, typer.Argument(metavar="RUN|STORE")],
    old: Annotated[str, typer.Argument(metavar="OLD", help=_KEY_HELP)],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The same, or a key's new version.")],
) -> None:
    """Wrap the data keys of a store by another master key; no checkpoint is written anew."""
    address = store_at(where, None, old).address
    with as_asked():
        files = open_files(address)
        if not files.names("keys/"):
            raise InputError(f"{address}: holds no keys: nothing is encrypted there")
        done = rotate(files, provider(old, "OLD"), provider(new, "NEW"))
    already = f", {len(done.already)} were before" if done.already else ""
    typer.echo(f"{len(done.rewrapped)} data keys are wrapped by {new}{already}")
