"""Data keys, and how a provider's master key wraps them for `keys/<key id>.<version>.json`.

{"format": 1, "key": "18ae…", "version": 1, "by": "kms alias/training",
 "wrapped": "…", "check": "first 16 bytes, in hex, of HMAC-SHA256(data key, key id)"}

The check tells whether what a provider unwraps is the key of this name, whatever the provider
authenticates itself. It gives nothing away of 256 random bits.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import time
from dataclasses import dataclass, field
from typing import Protocol

from meshwright.checkpoint.files import Files
from meshwright.checkpoint.seal import SealError
from meshwright.checkpoint.xaes import KEY_BYTES

FORMAT = 1
_FILE_NAME = re.compile(r"keys/([0-9a-f]{32})\.(\d+)\.json")


@dataclass(frozen=True)
class DataKey:
    """256 random bits and their name, 32 hex digits that begin with the time of its making."""

    id: str
    secret: bytes = field(repr=False)

    @property
    def check(self) -> str:
        """What tells this key from others without giving it away."""
        return hmac.digest(self.secret, self.id.encode(), "sha256")[:16].hex()


class Provider(Protocol):
    """A master key, which may never leave where it is kept, and what it does with data keys.

    `key_id` is authenticated with a wrapping where the provider can do so. All methods raise
    SealError with the reason: another key, no right to it, out of reach.
    """

    @property
    def label(self) -> str:
        """The master key in words, without secrets or paths."""
        ...

    def new(self, key_id: str) -> tuple[bytes, str]:
        """A new secret of `KEY_BYTES`, and its wrapping."""
        ...

    def unwrap(self, wrapped: str, key_id: str) -> bytes:
        """The secret of a wrapping."""
        ...

    def rewrap(self, wrapped: str, key_id: str, old: Provider) -> str:
        """The secret of `old`'s wrapping, wrapped by this one."""
        ...


@dataclass(frozen=True)
class Envelope:
    """One wrapping of a data key, a file of the store."""

    key_id: str
    version: int
    by: str
    wrapped: str
    check: str

    @property
    def file_name(self) -> str:
        """Its name in the store."""
        return file_name(self.key_id, self.version)

    def dump(self) -> bytes:
        """The text of the file."""
        return json.dumps(
            {
                "format": FORMAT,
                "key": self.key_id,
                "version": self.version,
                "by": self.by,
                "wrapped": self.wrapped,
                "check": self.check,
            }
        ).encode()

    def open(self, provider: Provider) -> DataKey:
        """The data key. Raises SealError if the provider does not give the key of this name."""
        try:
            key = DataKey(self.key_id, provider.unwrap(self.wrapped, self.key_id))
        except SealError as error:
            raise SealError(f"{self.file_name}, wrapped by {self.by}: {error}") from error
        if len(key.secret) != KEY_BYTES or not hmac.compare_digest(key.check, self.check):
            raise SealError(
                f"{self.file_name}, wrapped by {self.by}: {provider.label} unwraps another key "
                "than this was written for: the file was changed; restore it from a copy"
            )
        return key


def file_name(key_id: str, version: int) -> str:
    """Where a wrapping lies in the store."""
    return f"keys/{key_id}.{version}.json"


def new_key_id() -> str:
    """A name that sorts after those of keys made before."""
    return f"{time.time_ns():016x}{os.urandom(8).hex()}"


def versions(files: Files) -> dict[str, list[int]]:
    """Versions of the wrappings of each data key in a store, ascending; oldest key first."""
    found: dict[str, list[int]] = {}
    for entry in files.names("keys/"):
        if match := _FILE_NAME.fullmatch(entry.name):
            found.setdefault(match[1], []).append(int(match[2]))
    return {key_id: sorted(found[key_id]) for key_id in sorted(found)}


def read_envelope(files: Files, key_id: str, version: int) -> Envelope:
    """A wrapping from the store. Raises FileNotFoundError if it is gone, SealError if damaged."""
    name = file_name(key_id, version)
    try:
        raw = json.loads(files.read(name))
        found = Envelope(raw["key"], raw["version"], raw["by"], raw["wrapped"], raw["check"])
        sound = all(type(one) is str for one in (found.by, found.wrapped, found.check))
        if sound and raw["format"] == FORMAT and found.file_name == name:
            return found
    except (ValueError, KeyError, TypeError) as error:
        raise SealError(f"{name}: cannot be read ({error}); restore it from a copy") from error
    raise SealError(f"{name}: not a wrapping of this key; restore it from a copy")
