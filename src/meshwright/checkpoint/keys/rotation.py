"""Another master key for a store: its data keys are wrapped anew, its chunks are not touched."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.checkpoint.files import Files
from meshwright.checkpoint.keys.base import (
    Envelope,
    Provider,
    file_name,
    read_envelope,
    versions,
)
from meshwright.checkpoint.seal import SealError


@dataclass(frozen=True)
class Rotation:
    """Ids of the data keys that were wrapped anew, and of those that the new key opened before."""

    rewrapped: tuple[str, ...]
    already: tuple[str, ...]


def rotate(files: Files, old: Provider, new: Provider) -> Rotation:
    """Wrap every data key of a store by `new`; `old` and `new` may be one provider whose master
    key has a new version. Stopped half way, it can be run again.

    An old wrapping goes only after the new one was read back and opened. Raises SealError naming
    the wrapping that `old` does not open, or that `new` does not; keys before it are rotated, and
    the store stays readable by whoever has both master keys.
    """
    rewrapped, already = [], []
    for key_id, found in versions(files).items():
        newest = read_envelope(files, key_id, found[-1])
        if old.label != new.label and _opens(newest, new):
            already.append(key_id)
            _remove(files, key_id, found[:-1])
        else:
            _rewrap(files, newest, old, new)
            rewrapped.append(key_id)
            _remove(files, key_id, found)
    return Rotation(tuple(rewrapped), tuple(already))


def _rewrap(files: Files, newest: Envelope, old: Provider, new: Provider) -> None:
    newest.open(old)  # first: what cannot be opened must not be wrapped once more
    wrapped = new.rewrap(newest.wrapped, newest.key_id, old)
    version = newest.version + 1
    envelope = Envelope(newest.key_id, version, new.label, wrapped, newest.check)
    envelope.open(new)
    if not files.create(envelope.file_name, [envelope.dump()]):
        raise SealError(
            f"{envelope.file_name}: another rotation has just written it; run one at a time, again"
        )
    read_envelope(files, newest.key_id, version).open(new)


def _opens(envelope: Envelope, provider: Provider) -> bool:
    try:
        envelope.open(provider)
    except SealError:
        return False
    return True


def _remove(files: Files, key_id: str, old: list[int]) -> None:
    for version in old:
        files.remove(file_name(key_id, version))
