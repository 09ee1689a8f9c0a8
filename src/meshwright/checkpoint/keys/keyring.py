"""The seal of an encrypted store: data keys for chunks and records, wrapped by a provider.

Sealed bytes: format (1 byte), id of the data key (16), nonce (24), ciphertext, tag (16). The first
two are authenticated along with what the bytes are bound to.

One data key serves all ranks and all commits until `renew`, which a run calls once when it begins:
ranks then need one call of the provider each, not one for each commit, and saving goes on while
the provider is out of reach. That is safe since nonces have 192 bits (`xaes`). A commit may refer
to chunks of earlier ones, so every sealed thing names the key it needs.
"""

from __future__ import annotations

from threading import Lock

from meshwright.checkpoint import xaes
from meshwright.checkpoint.files import Files
from meshwright.checkpoint.keys.base import (
    DataKey,
    Envelope,
    Provider,
    new_key_id,
    read_envelope,
    versions,
)
from meshwright.checkpoint.seal import Bytes, SealError

_FORMAT = b"\x01"
_HEAD_BYTES = 1 + 16
OVERHEAD_BYTES = _HEAD_BYTES + xaes.NONCE_BYTES + xaes.TAG_BYTES


class Keyring:
    """A `Seal` of AES-256-GCM. Data keys are fetched when first needed, then held in memory."""

    def __init__(self, files: Files, provider: Provider) -> None:
        self._files = files
        self._provider = provider
        self._lock = Lock()
        self._opened: dict[str, DataKey] = {}
        self._writing: DataKey | None = None

    @property
    def key_id(self) -> str:
        """The data key that is written with; empty before it was needed. Asks nobody."""
        return self._writing.id if self._writing else ""

    def renew(self) -> str:
        """Write with a new data key from now on, and so does every keyring opened later; returns
        its id. Raises SealError if the provider makes none."""
        with self._lock:
            self._writing = self._make()
            return self._writing.id

    def seal(self, plain: Bytes, bound: bytes) -> bytes:
        """`plain` encrypted with the newest data key of the store; makes the first one."""
        key = self._writing or self._newest()
        head, nonce = _FORMAT + bytes.fromhex(key.id), xaes.new_nonce()
        return b"".join((head, nonce, xaes.encrypt(key.secret, nonce, plain, head + bound)))

    def open(self, sealed: Bytes, bound: bytes) -> bytes:
        """What was sealed. Raises SealError: not sealed, key lost or refused, changed or moved."""
        view = memoryview(sealed)
        head, nonce = bytes(view[:_HEAD_BYTES]), bytes(view[_HEAD_BYTES:][: xaes.NONCE_BYTES])
        if len(view) < OVERHEAD_BYTES or head[:1] != _FORMAT:
            raise SealError("these bytes are not encrypted as this store encrypts: damaged")
        key = self._key(head[1:].hex())
        body = view[_HEAD_BYTES + xaes.NONCE_BYTES :]
        plain = xaes.decrypt(key.secret, nonce, body, head + bound)
        if plain is None:
            raise SealError(
                "authentication failed: the encrypted bytes were changed, or are those of another "
                "tensor, place or store"
            )
        return plain

    def _newest(self) -> DataKey:
        with self._lock:
            if not self._writing:
                newest = next(reversed(versions(self._files)), None)
                self._writing = self._unwrapped(newest) if newest else self._make()
            return self._writing

    def _key(self, key_id: str) -> DataKey:
        with self._lock:
            return self._unwrapped(key_id)

    def _unwrapped(self, key_id: str) -> DataKey:
        if key_id not in self._opened:
            self._opened[key_id] = self._fetch(key_id)
        return self._opened[key_id]

    def _make(self) -> DataKey:
        key_id = new_key_id()
        secret, wrapped = self._provider.new(key_id)
        key = DataKey(key_id, secret)
        envelope = Envelope(key_id, 1, self._provider.label, wrapped, key.check)
        self._files.create(envelope.file_name, [envelope.dump()])
        self._opened[key_id] = key
        return key

    def _fetch(self, key_id: str) -> DataKey:
        """From the newest wrapping that opens: during a rotation, old and new are both there."""
        failed: SealError | None = None
        for _ in range(2):  # a rotation may remove the one that was listed
            for version in reversed(versions(self._files).get(key_id, [])):
                try:
                    return read_envelope(self._files, key_id, version).open(self._provider)
                except FileNotFoundError:
                    continue
                except SealError as error:
                    failed = failed or error
        raise failed or SealError(
            f"keys/{key_id}.*.json: this data key is lost; restore the file from a copy: without "
            "it nobody can read what it encrypted"
        )
