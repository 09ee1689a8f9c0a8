"""Master keys in services: AWS KMS (moto's server) and Vault's transit engine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_files import MemoryFiles
from transit_server import TOKEN, Transit, serving

from meshwright.base.errors import ConfigError
from meshwright.checkpoint import keys
from meshwright.checkpoint.keys.keyring import Keyring
from meshwright.checkpoint.keys.kms import Kms
from meshwright.checkpoint.keys.local import make_key_file
from meshwright.checkpoint.keys.rotation import rotate
from meshwright.checkpoint.keys.vault import Vault
from meshwright.checkpoint.seal import SealError

BOUND = b"bound"


@pytest.fixture
def files() -> MemoryFiles:
    return MemoryFiles()


def wrapping(files: MemoryFiles) -> dict[str, Any]:
    (content,) = files.held.values()
    found: dict[str, Any] = json.loads(content)
    return found


# AWS KMS


@pytest.fixture(scope="module")
def kms_endpoint() -> Iterator[str]:
    pytest.importorskip("moto.server")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture
def kms(kms_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Makes a key and gives its address."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")

    def make() -> str:
        where = f"?region=eu-west-1&endpoint={kms_endpoint}"
        client = opened(f"kms:none{where}").client
        return f"kms:{client.create_key()['KeyMetadata']['Arn']}{where}"

    return make


def opened(address: str) -> Kms:
    found = keys.provider(address)
    assert isinstance(found, Kms)
    return found


pytestmark = pytest.mark.filterwarnings("ignore")  # moto's and boto's own


def test_kms_seals_and_opens(files: MemoryFiles, kms: Callable[[], str]) -> None:
    address = kms()
    sealed = keys.open_seal(files, address).seal(b"weights", BOUND)
    assert keys.open_seal(files, address).open(sealed, BOUND) == b"weights"


def test_kms_by_alias(files: MemoryFiles, kms: Callable[[], str]) -> None:
    master = opened(kms())
    name = f"alias/training-{time.time_ns()}"
    master.client.create_alias(AliasName=name, TargetKeyId=master.key)
    address = f"kms:{name}?region=eu-west-1&endpoint={master.endpoint}"
    sealed = keys.open_seal(files, address).seal(b"weights", BOUND)
    assert wrapping(files)["by"] == f"kms {name}"
    assert keys.open_seal(files, address).open(sealed, BOUND) == b"weights"


def test_kms_binds_a_wrapping_to_its_key_id(kms: Callable[[], str]) -> None:
    master = opened(kms())
    secret, wrapped = master.new("aa")
    assert master.unwrap(wrapped, "aa") == secret
    with pytest.raises(SealError, match="the wrapping was changed"):
        master.unwrap(wrapped, "bb")


def test_kms_says_what_is_wrong(files: MemoryFiles, kms: Callable[[], str]) -> None:
    address = kms()
    sealed = keys.open_seal(files, address).seal(b"weights", BOUND)
    with pytest.raises(SealError, match="another one wrapped this"):
        Keyring(files, opened(kms())).open(sealed, BOUND)
    absent = address.replace("key/", "key/0")
    with pytest.raises(SealError, match="no such key"):
        Keyring(files, opened(absent)).open(sealed, BOUND)
    (name,) = files.held
    for wrapped in ("?", "AAAA"):
        files.held[name] = json.dumps(wrapping(files) | {"wrapped": wrapped}).encode()
        with pytest.raises(SealError, match="the wrapping was changed"):
            Keyring(files, opened(address)).open(sealed, BOUND)


def test_kms_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused
        nowhere = f"kms:a?region=eu-west-1&endpoint=http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(SealError, match="kms a: cannot be reached"):
            keys.open_seal(MemoryFiles(), nowhere).seal(b"weights", BOUND)


def test_kms_without_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    with pytest.raises(ConfigError, match=r"kms:alias/x\?region=NAME"):
        keys.provider("kms:alias/x")


def test_kms_rotates_by_reencryption(
    files: MemoryFiles, kms: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = opened(kms()), opened(kms())
    sealed = Keyring(files, old).seal(b"weights", BOUND)
    with monkeypatch.context() as patch:
        patch.setattr(type(old), "new", None)  # no new data key is made
        rotate(files, old, new)
    assert wrapping(files)["version"] == 2 and wrapping(files)["by"] == new.label
    assert Keyring(files, new).open(sealed, BOUND) == b"weights"
    with pytest.raises(SealError, match="another one wrapped this"):
        Keyring(files, old).open(sealed, BOUND)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("IncorrectKeyException", "wrong key: another one wrapped this"),
        ("DisabledException", "the key is disabled; enable it"),
        ("ThrottlingException", "ThrottlingException: "),
    ],
)
def test_kms_answers_that_moto_does_not_give(kms: Callable[[], str], code: str, words: str) -> None:
    from botocore.stub import Stubber

    master = opened(kms())
    with Stubber(master.client) as stub:
        stub.add_client_error("decrypt", code)
        with pytest.raises(SealError, match=words):
            master.unwrap("AAAA", "00")


# Vault's transit engine: the small server always, a real OpenBao or Vault where one is on the PATH


@pytest.fixture(scope="module", params=["small", "bao", "vault"])
def vault_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "small":
        with serving(Transit()) as url:
            yield url
        return
    beside = Path(sys.executable).parent  # where pip puts OpenBao
    program = shutil.which(request.param, path=f"{os.environ['PATH']}:{beside}")
    if not program:
        pytest.skip(f"no {request.param} on the PATH")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = (f"-dev-root-token-id={TOKEN}", f"-dev-listen-address={address}")
    command = [program, "server", "-dev", "-dev-no-store-token", *options]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: ask(f"http://{address}", "sys/mounts/transit", {"type": "transit"}))
        yield f"http://{address}"
    finally:
        server.terminate()
        server.wait(timeout=20)


def ask(url: str, path: str, body: dict[str, Any]) -> None:
    headers = {"X-Vault-Token": TOKEN}
    request = urllib.request.Request(f"{url}/v1/{path}", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=5).close()


def wait_until(works: Callable[[], None]) -> None:
    for _ in range(200):
        try:
            return works()
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not come up")


@pytest.fixture(params=[False, True], ids=["", "derived"])
def vault(
    vault_url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[[], str]:
    """Makes a key and gives its address."""
    monkeypatch.setenv("VAULT_TOKEN", TOKEN)

    def make() -> str:
        name = f"k{time.time_ns()}"
        ask(vault_url, f"transit/keys/{name}", {"derived": request.param})
        return f"vault:{vault_url}/transit/{name}"

    return make


def test_vault_seals_and_opens(files: MemoryFiles, vault: Callable[[], str]) -> None:
    address = vault()
    sealed = keys.open_seal(files, address).seal(b"weights", BOUND)
    assert wrapping(files)["wrapped"].startswith("vault:v1:")
    assert keys.open_seal(files, address).open(sealed, BOUND) == b"weights"


def test_vault_says_what_is_wrong(
    files: MemoryFiles, vault: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = vault()
    sealed = keys.open_seal(files, address).seal(b"weights", BOUND)

    def refused(words: str, of: str = address) -> None:
        with pytest.raises(SealError, match=words):
            keys.open_seal(files, of).open(sealed, BOUND)

    refused("wrong key, or the wrapping was changed", vault())
    refused("no such key", f"{address}x")
    refused("no transit engine at this path", address.replace("/transit/", "/other/"))
    with monkeypatch.context() as patch:
        patch.setenv("VAULT_TOKEN", "stolen")
        refused("VAULT_TOKEN may not use this key")
    (name,) = files.held
    sound = wrapping(files)["wrapped"]
    for wrapped in (
        "rubbish",
        "vault:v1:AAAA",
        sound.replace(":v1:", ":v9:"),
        sound[:-9] + "A" * 8,
    ):
        files.held[name] = json.dumps(wrapping(files) | {"wrapped": wrapped}).encode()
        refused("wrong key, or the wrapping was changed")


def test_vault_rewraps_by_the_newest_version(files: MemoryFiles, vault: Callable[[], str]) -> None:
    master = keys.provider(vault())
    assert isinstance(master, Vault)
    sealed = Keyring(files, master).seal(b"weights", BOUND)
    ask(master.url, f"transit/keys/{master.name}/rotate", {})
    rotate(files, master, master)
    assert wrapping(files)["version"] == 2
    assert wrapping(files)["wrapped"].startswith("vault:v2:")
    assert Keyring(files, master).open(sealed, BOUND) == b"weights"


def test_vault_rotates_from_a_key_file_and_to_another_key(
    files: MemoryFiles, vault: Callable[[], str], tmp_path: Path
) -> None:
    make_key_file(tmp_path / "key")
    local, first, second = keys.provider(f"file:{tmp_path / 'key'}"), vault(), vault()
    sealed = Keyring(files, local).seal(b"weights", BOUND)
    for old, new in ((local, first), (first, second), (second, local)):
        masters = [keys.provider(one) if isinstance(one, str) else one for one in (old, new)]
        rotate(files, *masters)
        assert Keyring(files, masters[1]).open(sealed, BOUND) == b"weights"
    assert wrapping(files)["version"] == 4


def test_vault_makes_no_key_by_a_wrong_name(
    files: MemoryFiles, vault: Callable[[], str], tmp_path: Path
) -> None:
    """`encrypt` makes a key that is not there; rotating to a misspelt one must not."""
    make_key_file(tmp_path / "key")
    local = keys.provider(f"file:{tmp_path / 'key'}")
    Keyring(files, local).seal(b"weights", BOUND)
    with pytest.raises(SealError, match="no such key"):
        rotate(files, local, keys.provider(f"{vault()}x"))
    assert wrapping(files)["version"] == 1


def quick(url: str) -> Vault:
    return Vault(url, "transit", "k", {"X-Vault-Token": TOKEN}, wait_s=0.001)


def test_vault_that_is_busy_is_asked_again() -> None:
    transit = Transit()
    transit.keys["k"] = [bytes(32)]
    with serving(transit) as url:
        transit.busy = 3
        assert quick(url).new("00")
        assert len(transit.calls) == 4
        transit.busy = 4
        with pytest.raises(SealError, match=r"answered 503: .*sealed"):
            quick(url).new("00")


def test_vault_out_of_reach() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(SealError, match="cannot be reached"):
            quick(f"http://127.0.0.1:{closed.getsockname()[1]}").new("00")


def test_vault_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VAULT_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="VAULT_TOKEN is not set"):
        keys.provider("vault:https://127.0.0.1:1/transit/k")


def test_vault_rewraps_on_the_server() -> None:
    """The data key is seen to check that it opens, and never sent."""
    transit = Transit()
    transit.keys["k"] = [bytes(32)]
    files = MemoryFiles()
    with serving(transit) as url:
        Keyring(files, quick(url)).seal(b"weights", BOUND)
        transit.calls.clear()
        rotate(files, quick(url), quick(url))
    assert transit.calls == ["decrypt", "rewrap", "decrypt", "decrypt"]
