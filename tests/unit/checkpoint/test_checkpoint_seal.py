"""Chunks and records sealed: what opens, and the one error of each thing that must not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from memory_files import MemoryFiles

from meshwright.base.errors import ConfigError, InputError
from meshwright.checkpoint import keys, xaes
from meshwright.checkpoint.keys.base import DataKey, read_envelope, versions
from meshwright.checkpoint.keys.keyring import OVERHEAD_BYTES, Keyring
from meshwright.checkpoint.keys.local import KeyFile, make_key_file
from meshwright.checkpoint.keys.rotation import Rotation, rotate
from meshwright.checkpoint.seal import Plain, Seal, SealError

BOUND = b'["store","w",[2,2],"main",3]'


@pytest.fixture
def files() -> MemoryFiles:
    return MemoryFiles()


@pytest.fixture
def key_path(tmp_path: Path) -> Path:
    make_key_file(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def ring(files: MemoryFiles, key_path: Path) -> Keyring:
    return keys.open_seal(files, f"file:{key_path}")


def other_key(tmp_path: Path) -> KeyFile:
    make_key_file(tmp_path / "other")
    found = keys.provider(f"file:{tmp_path / 'other'}")
    assert isinstance(found, KeyFile)
    return found


def test_xaes_gives_the_published_vectors() -> None:
    """https://c2sp.org/XAES-256-GCM, Test Vectors: the second has the MSB of L set."""
    nonce, plain = b"ABCDEFGHIJKLMNOPQRSTUVWX", b"XAES-256-GCM"
    first = xaes.encrypt(b"\x01" * 32, nonce, plain, b"")
    assert first.hex() == "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"
    second = xaes.encrypt(b"\x03" * 32, nonce, plain, b"c2sp.org/XAES-256-GCM")
    assert second.hex() == "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"
    assert xaes.decrypt(b"\x03" * 32, nonce, second, b"c2sp.org/XAES-256-GCM") == plain


def test_plain_gives_what_it_gets() -> None:
    seal: Seal = Plain()
    assert seal.key_id is None
    assert seal.open(seal.seal(memoryview(b"abc"), b"x"), b"y") == b"abc"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_what_was_sealed_opens(ring: Keyring, kind: type) -> None:
    sealed = ring.seal(kind(b"weights"), BOUND)
    assert len(sealed) == len(b"weights") + OVERHEAD_BYTES and b"weights" not in sealed
    assert ring.open(kind(sealed), BOUND) == b"weights"
    assert ring.open(ring.seal(b"", BOUND), BOUND) == b""


def test_nonces_are_never_the_same(ring: Keyring) -> None:
    nonces = {ring.seal(b"same", BOUND)[17:41] for _ in range(500)}
    assert len(nonces) == 500


def test_another_process_opens_with_the_key_file(
    files: MemoryFiles, ring: Keyring, key_path: Path
) -> None:
    sealed = ring.seal(b"weights", BOUND)
    again = keys.open_seal(files, f"file:{key_path}")
    assert again.key_id == "", "None would say that nothing is encrypted"
    assert again.open(sealed, BOUND) == b"weights"
    again.seal(b"more", BOUND)
    assert again.key_id == ring.key_id
    assert len(files.names("keys/")) == 1, "writers that come later share the newest data key"


def test_ranks_that_write_first_at_once_all_can_be_read(files: MemoryFiles, key_path: Path) -> None:
    rings = [keys.open_seal(files, f"file:{key_path}") for _ in range(4)]
    sealed: list[bytes] = []
    threads = [Thread(target=lambda one=one: sealed.append(one.seal(b"w", BOUND))) for one in rings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = keys.open_seal(files, f"file:{key_path}")
    assert [reader.open(one, BOUND) for one in sealed] == [b"w"] * 4


def test_a_renewed_key_seals_what_follows_and_the_old_one_still_opens(
    files: MemoryFiles, ring: Keyring, key_path: Path
) -> None:
    before, first = ring.seal(b"old", BOUND), ring.key_id
    second = ring.renew()
    again = keys.open_seal(files, f"file:{key_path}")
    again.seal(b"", BOUND)
    assert first != second == again.key_id
    after = ring.seal(b"new", BOUND)
    assert before[1:17].hex() == first and after[1:17].hex() == second
    assert (ring.open(before, BOUND), ring.open(after, BOUND)) == (b"old", b"new")


def test_every_flipped_bit_is_refused(ring: Keyring) -> None:
    sealed = ring.seal(b"some weights", BOUND)
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SealError):
            ring.open(changed, BOUND)


@pytest.mark.parametrize("bound", [b"", BOUND + b" ", b'["store","v",[2,2],"main",3]'])
def test_what_is_bound_to_another_place_is_refused(ring: Keyring, bound: bytes) -> None:
    """Swapped chunks and swapped records: same key, other bound."""
    with pytest.raises(SealError, match="those of another tensor, place or store"):
        ring.open(ring.seal(b"weights", BOUND), bound)


@pytest.mark.parametrize(
    "sealed", [b"", b"\x01" * 56, b"plain bytes of a store that is not sealed" * 9]
)
def test_what_is_not_sealed_is_refused(ring: Keyring, sealed: bytes) -> None:
    with pytest.raises(SealError, match="not encrypted as this store encrypts"):
        ring.open(sealed, BOUND)


def test_wrong_key(files: MemoryFiles, ring: Keyring, tmp_path: Path) -> None:
    sealed = ring.seal(b"weights", BOUND)
    with pytest.raises(SealError, match=r"wrapped by key file .{8}: wrong key: key file .{8} was"):
        Keyring(files, other_key(tmp_path)).open(sealed, BOUND)


def test_lost_key(files: MemoryFiles, ring: Keyring, key_path: Path) -> None:
    sealed = ring.seal(b"weights", BOUND)
    files.held.clear()
    with pytest.raises(SealError, match=f"{ring.key_id}.*is lost; restore the file"):
        keys.open_seal(files, f"file:{key_path}").open(sealed, BOUND)


def tampered(files: MemoryFiles, name: str, **changes: object) -> None:
    raw = json.loads(files.held[name]) | changes
    files.held[name] = json.dumps(raw).encode()


def test_tampered_wrapping(files: MemoryFiles, ring: Keyring, key_path: Path) -> None:
    sealed = ring.seal(b"weights", BOUND)
    (name,) = files.held
    sound = dict(files.held)
    label, text = json.loads(sound[name])["wrapped"].rsplit(":", 1)
    flipped = ("A" if text[40] != "A" else "B").join((text[:40], text[41:]))
    for changes, words in (
        ({"wrapped": f"{label}:{flipped}"}, "the wrapping was changed"),
        ({"wrapped": f"{label}:{text[:-8]}"}, "the wrapping was changed"),
        ({"wrapped": f"{label}:!!"}, "the wrapping was changed"),
        ({"check": "00" * 16}, "unwraps another key than this was written for"),
        ({"version": 2}, "not a wrapping of this key"),
        ({"wrapped": 7}, "not a wrapping of this key"),
    ):
        files.held = dict(sound)
        tampered(files, name, **changes)
        with pytest.raises(SealError, match=words):
            keys.open_seal(files, f"file:{key_path}").open(sealed, BOUND)
    files.held = {name: sound[name][:30]}
    with pytest.raises(SealError, match="cannot be read"):
        keys.open_seal(files, f"file:{key_path}").open(sealed, BOUND)


def test_swapped_wrappings(files: MemoryFiles, ring: Keyring, key_path: Path) -> None:
    sealed = ring.seal(b"weights", BOUND)
    first, second = ring.key_id, ring.renew()
    theirs = json.loads(files.held[f"keys/{second}.1.json"])
    tampered(files, f"keys/{first}.1.json", wrapped=theirs["wrapped"], check=theirs["check"])
    with pytest.raises(SealError, match="the wrapping was changed"):
        keys.open_seal(files, f"file:{key_path}").open(sealed, BOUND)


class Careless:
    """A provider that authenticates nothing, not even which key it gives."""

    label = "careless"

    def new(self, key_id: str) -> tuple[bytes, str]:
        secret = (key_id.encode() * 2)[-32:]
        return secret, secret.hex()

    def unwrap(self, wrapped: str, key_id: str) -> bytes:  # noqa: ARG002
        return bytes.fromhex(wrapped)

    def rewrap(self, wrapped: str, key_id: str, old: object) -> str:  # noqa: ARG002
        return wrapped


def test_swapped_wrappings_of_a_careless_provider(files: MemoryFiles) -> None:
    ring = Keyring(files, Careless())
    sealed, first = ring.seal(b"weights", BOUND), ring.key_id
    other = json.loads(files.held[f"keys/{ring.renew()}.1.json"])
    tampered(files, f"keys/{first}.1.json", wrapped=other["wrapped"])
    with pytest.raises(SealError, match="unwraps another key than this was written for"):
        Keyring(files, Careless()).open(sealed, BOUND)


def test_rotation_wraps_anew_and_touches_nothing_else(
    files: MemoryFiles, ring: Keyring, key_path: Path, tmp_path: Path
) -> None:
    files.create("packs/aa/bb", [sealed := ring.seal(b"weights", BOUND)])
    ids = (ring.key_id, ring.renew())
    old, new = keys.provider(f"file:{key_path}"), other_key(tmp_path)
    assert rotate(files, old, new) == Rotation(ids, ())
    assert list(versions(files).values()) == [[2], [2]]
    assert files.held["packs/aa/bb"] == sealed
    assert Keyring(files, new).open(sealed, BOUND) == b"weights"
    with pytest.raises(SealError, match="wrong key"):
        Keyring(files, old).open(sealed, BOUND)
    assert rotate(files, old, new) == Rotation((), ids), "again: nothing left to do"


class Dying(MemoryFiles):
    """Files of a process that dies at its n-th change."""

    def __init__(self, held: dict[str, bytes], changes: int) -> None:
        super().__init__()
        self.held, self.left = held, changes

    def _change(self) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1

    def create(self, name, parts):  # type: ignore[no-untyped-def]
        self._change()
        return super().create(name, parts)

    def remove(self, name: str) -> None:
        self._change()
        super().remove(name)


@pytest.mark.parametrize("changes", range(4))
def test_a_rotation_killed_anywhere_leaves_all_readable_and_can_be_repeated(
    files: MemoryFiles, ring: Keyring, key_path: Path, tmp_path: Path, changes: int
) -> None:
    sealed = [ring.seal(b"a", BOUND)]
    ring.renew()
    sealed.append(ring.seal(b"b", BOUND))
    old, new = keys.provider(f"file:{key_path}"), other_key(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        rotate(Dying(files.held, changes), old, new)
    for text, one in zip((b"a", b"b"), sealed, strict=True):
        opened = [text for ring in (Keyring(files, old), Keyring(files, new)) if opens(ring, one)]
        assert opened, "neither of the master keys opens it"
    rotate(files, old, new)
    assert [Keyring(files, new).open(one, BOUND) for one in sealed] == [b"a", b"b"]
    assert len(files.held) == 2


def opens(ring: Keyring, sealed: bytes) -> bool:
    try:
        return bool(ring.open(sealed, BOUND))
    except SealError:
        return False


def test_a_rotation_whose_result_does_not_open_removes_nothing(
    files: MemoryFiles, ring: Keyring, key_path: Path, tmp_path: Path
) -> None:
    ring.seal(b"weights", BOUND)
    before = dict(files.held)

    class Broken(KeyFile):
        def rewrap(self, wrapped: str, key_id: str, old: object) -> str:  # noqa: ARG002
            return self.new(key_id)[1]  # of another secret

    with pytest.raises(SealError, match="unwraps another key"):
        rotate(files, keys.provider(f"file:{key_path}"), Broken(other_key(tmp_path).secret))
    assert files.held == before


def test_a_rotation_that_was_stored_wrong_removes_nothing(
    files: MemoryFiles, ring: Keyring, key_path: Path, tmp_path: Path
) -> None:
    ring.seal(b"weights", BOUND)
    (name,) = files.held

    class Torn(MemoryFiles):
        def create(self, name, parts):  # type: ignore[no-untyped-def]
            return super().create(name, [b"".join(parts)[:100]])

    torn = Torn()
    torn.held = files.held
    with pytest.raises(SealError, match="cannot be read"):
        rotate(torn, keys.provider(f"file:{key_path}"), other_key(tmp_path))
    assert name in files.held


def test_a_rotation_from_the_wrong_key_changes_nothing(
    files: MemoryFiles, ring: Keyring, tmp_path: Path
) -> None:
    ring.seal(b"weights", BOUND)
    before = dict(files.held)
    with pytest.raises(SealError, match="wrong key"):
        rotate(files, KeyFile(b"x" * 32), other_key(tmp_path))
    assert files.held == before


def test_a_reader_goes_on_during_a_rotation(
    files: MemoryFiles, ring: Keyring, key_path: Path, tmp_path: Path
) -> None:
    """Both wrappings are there: whoever has one of the master keys reads."""
    sealed = ring.seal(b"weights", BOUND)
    (key_id,) = versions(files)
    old, new = keys.provider(f"file:{key_path}"), other_key(tmp_path)
    found = read_envelope(files, key_id, 1)
    wrapped = new.rewrap(found.wrapped, key_id, old)
    second = replace(found, version=2, by=new.label, wrapped=wrapped)
    files.create(second.file_name, [second.dump()])
    for master in (old, new):
        assert Keyring(files, master).open(sealed, BOUND) == b"weights"


def test_key_files_are_for_their_owner_alone(key_path: Path) -> None:
    assert key_path.stat().st_mode & 0o777 == 0o600
    before = key_path.read_bytes()
    with pytest.raises(InputError, match="exists; keep it"):
        make_key_file(key_path)
    assert key_path.read_bytes() == before
    key_path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode is 640: others may get at the key; chmod 600"):
        keys.provider(f"file:{key_path}")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "say file:PATH"),
        ("file:", "say file:PATH"),
        ("gcp:x", "say file:PATH"),
        ("file:/nowhere/key", "cannot be read"),
        ("vault:vault.example/transit/k", "say vault:https://HOST"),
        ("vault:https://vault.example/k", "say vault:https://HOST"),
        ("kms:alias/x?zone=1", "unknown zone"),
    ],
)
def test_addresses_that_cannot_be_used(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        keys.provider(address, "checkpoint.key")
    assert str(caught.value).startswith("checkpoint.key = ")


def test_a_file_that_holds_no_key(tmp_path: Path) -> None:
    for number, text in enumerate(("", "meshwright-key-1 AAAA\n", "x" * 61)):
        path = tmp_path / str(number)
        path.touch(0o600)
        path.write_text(text)
        with pytest.raises(ConfigError, match="holds no key"):
            keys.provider(f"file:{path}")


def test_secrets_are_not_shown(key_path: Path) -> None:
    master = keys.provider(f"file:{key_path}")
    assert isinstance(master, KeyFile)
    assert "secret" not in repr(master) + repr(DataKey("00" * 16, b"secret"))
