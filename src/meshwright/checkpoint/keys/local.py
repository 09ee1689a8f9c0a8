"""A master key in a file of one's own: 32 random bytes, readable by its owner alone."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from binascii import Error as NotBase64
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.base.errors import ConfigError, InputError
from meshwright.checkpoint import xaes
from meshwright.checkpoint.keys.base import Provider
from meshwright.checkpoint.seal import SealError

_MODE = 0o600
_BEGINNING = "meshwright-key-1 "


@dataclass(frozen=True)
class KeyFile:
    """A master key that this process holds."""

    secret: bytes = field(repr=False)

    @property
    def label(self) -> str:
        """Its fingerprint: the first 4 bytes of a SHA-256 over it."""
        return f"key file {hashlib.sha256(b'meshwright key file' + self.secret).hexdigest()[:8]}"

    def new(self, key_id: str) -> tuple[bytes, str]:
        """A secret drawn here, and its wrapping."""
        secret = os.urandom(xaes.KEY_BYTES)
        return secret, self._wrap(secret, key_id)

    def unwrap(self, wrapped: str, key_id: str) -> bytes:
        """The secret. Raises SealError if this key did not wrap it, or the wrapping was changed."""
        label, _, text = wrapped.rpartition(":")
        if label != self.label:
            raise SealError(
                f"wrong key: {self.label} was given; give the file that holds the other"
            )
        try:
            sealed = base64.b64decode(text, validate=True)
        except NotBase64:
            sealed = b""
        nonce, body = sealed[: xaes.NONCE_BYTES], sealed[xaes.NONCE_BYTES :]
        fits = len(sealed) == xaes.NONCE_BYTES + xaes.KEY_BYTES + xaes.TAG_BYTES
        secret = xaes.decrypt(self.secret, nonce, body, key_id.encode()) if fits else None
        if secret is None:
            raise SealError("the wrapping was changed; restore it from a copy")
        return secret

    def rewrap(self, wrapped: str, key_id: str, old: Provider) -> str:
        """What `old` unwraps, wrapped by this key."""
        return self._wrap(old.unwrap(wrapped, key_id), key_id)

    def _wrap(self, secret: bytes, key_id: str) -> str:
        nonce = xaes.new_nonce()
        sealed = nonce + xaes.encrypt(self.secret, nonce, secret, key_id.encode())
        return f"{self.label}:{base64.b64encode(sealed).decode()}"


def make_key_file(path: Path) -> None:
    """Write a new master key, for its owner alone. Raises InputError if there is a file already
    (a key that is overwritten is lost with all that it encrypted), or none can be written."""
    line = _BEGINNING + base64.b64encode(os.urandom(xaes.KEY_BYTES)).decode() + "\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        with os.fdopen(descriptor, "w") as file:
            file.write(line)
            file.flush()
            os.fsync(descriptor)
    except FileExistsError as error:
        raise InputError(f"{path}: exists; keep it, or name a new file for the key") from error
    except OSError as error:
        raise InputError(f"{path}: no key can be written ({error.strerror})") from error


def read_key_file(path: Path, config_key: str) -> KeyFile:
    """The master key in a file. Raises ConfigError naming `config_key` if the file is absent, is no
    key, or others than its owner may read or write it."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(config_key, f"file:{path}", f"cannot be read ({error})") from error
    if mode & ~_MODE:
        fix = f"its mode is {mode:o}: others may get at the key; chmod 600 {path}"
        raise ConfigError(config_key, f"file:{path}", fix)
    try:
        secret = base64.b64decode(text.removeprefix(_BEGINNING).strip(), validate=True)
    except (ValueError, NotBase64):
        secret = b""
    if not text.startswith(_BEGINNING) or len(secret) != xaes.KEY_BYTES:
        raise ConfigError(config_key, f"file:{path}", "holds no key as Meshwright makes them")
    return KeyFile(secret)
