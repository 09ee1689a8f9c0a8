"""A master key in the transit engine of HashiCorp Vault or OpenBao, which never leaves it.

API: https://developer.hashicorp.com/vault/api-docs/secret/transit (datakey/plaintext, encrypt,
decrypt, rewrap). The data key's id goes along as `context`: keys made with derived=true bind the
wrapping to it, others ignore it. Token, namespace and CA come from VAULT_TOKEN, VAULT_NAMESPACE
and VAULT_CACERT, as for Vault's own tools.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from binascii import Error as NotBase64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from meshwright.base.errors import ConfigError
from meshwright.checkpoint.keys.base import Provider
from meshwright.checkpoint.seal import SealError

_TIMEOUT_S = 10.0
_TRIES = 4
_PASSING = (412, 429, 500, 502, 503)  # sealed, standby, too many requests: may go away
_REASONS = (  # words of an answer, and what they mean for a person
    ("permission denied", "VAULT_TOKEN may not use this key, or has run out"),
    ("key not found", "there is no such key; check its name"),
    ("no handler", "there is no transit engine at this path"),
    ("message authentication failed", "wrong key, or the wrapping was changed"),
    ("ciphertext", "wrong key, or the wrapping was changed"),
)


@dataclass(frozen=True)
class Vault:
    """The key `name` of the transit engine mounted at `mount` of the server at `url`."""

    url: str
    mount: str
    name: str
    headers: Mapping[str, str] = field(repr=False, compare=False)
    tls: ssl.SSLContext | None = field(repr=False, compare=False, default=None)
    wait_s: float = 0.5  # before the second try; doubles

    @property
    def label(self) -> str:
        """Server, engine and key."""
        return f"vault {self.url}/{self.mount}/{self.name}"

    def new(self, key_id: str) -> tuple[bytes, str]:
        """datakey/plaintext."""
        reply = self._call("datakey/plaintext", {"context": _base64(key_id.encode()), "bits": 256})
        return _secret(reply["plaintext"]), reply["ciphertext"]

    def unwrap(self, wrapped: str, key_id: str) -> bytes:
        """decrypt."""
        asked = {"ciphertext": wrapped, "context": _base64(key_id.encode())}
        return _secret(self._call("decrypt", asked)["plaintext"])

    def rewrap(self, wrapped: str, key_id: str, old: Provider) -> str:
        """rewrap by the newest version of the key, where the secret does not leave the server; what
        another key wrapped is unwrapped and encrypted."""
        context = _base64(key_id.encode())
        if old.label == self.label:
            reply = self._call("rewrap", {"ciphertext": wrapped, "context": context})
        else:
            plain = _base64(old.unwrap(wrapped, key_id))
            self.new(key_id)  # fails if there is no such key, which `encrypt` would make
            reply = self._call("encrypt", {"plaintext": plain, "context": context})
        ciphertext: str = reply["ciphertext"]
        return ciphertext

    def _call(self, operation: str, body: Mapping[str, Any]) -> dict[str, Any]:
        path = quote(f"{self.mount}/{operation}/{self.name}")
        request = urllib.request.Request(
            f"{self.url}/v1/{path}", json.dumps(body).encode(), dict(self.headers), method="POST"
        )
        wait_s = self.wait_s
        for tries_left in reversed(range(_TRIES)):
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=self.tls) as reply:
                    data: dict[str, Any] = json.load(reply)["data"]
                    return data
            except urllib.error.HTTPError as error:
                said = error.read().decode(errors="replace")
                reason = next((told for words, told in _REASONS if words in said), None)
                if reason or error.code not in _PASSING or not tries_left:
                    told = reason or f"answered {error.code}: {said.strip()[:200]}"
                    raise SealError(f"{self.label}: {told}") from error
            except (OSError, ValueError, KeyError) as error:
                if not tries_left:
                    raise SealError(f"{self.label}: cannot be reached ({error})") from error
            time.sleep(wait_s)
            wait_s *= 2
        raise AssertionError("the last try returns or raises")


def open_vault(address: str, config_key: str) -> Vault:
    """A key by its address `https://host[:port]/mount/name`; asks nothing of it yet. Raises
    ConfigError naming `config_key` if the address or VAULT_TOKEN is missing."""
    scheme, _, rest = address.partition("://")
    host, _, path = rest.partition("/")
    mount, _, name = path.strip("/").rpartition("/")
    if scheme not in ("http", "https") or not (host and mount and name):
        fix = "say vault:https://HOST/MOUNT/KEY, as in vault:https://vault:8200/transit/training"
        raise ConfigError(config_key, f"vault:{address}", fix)
    token = os.environ.get("VAULT_TOKEN")
    if not token:
        fix = "VAULT_TOKEN is not set; set it to a token that may use this key"
        raise ConfigError(config_key, f"vault:{address}", fix)
    headers = {"X-Vault-Token": token, "Content-Type": "application/json"}
    if namespace := os.environ.get("VAULT_NAMESPACE"):
        headers["X-Vault-Namespace"] = namespace
    return Vault(f"{scheme}://{host}", mount, name, headers, _tls(scheme, address, config_key))


def _tls(scheme: str, address: str, config_key: str) -> ssl.SSLContext | None:
    if scheme == "http":
        return None
    try:
        return ssl.create_default_context(cafile=os.environ.get("VAULT_CACERT"))
    except OSError as error:
        fix = f"VAULT_CACERT cannot be read ({error})"
        raise ConfigError(config_key, f"vault:{address}", fix) from error


def _base64(plain: bytes) -> str:
    return base64.b64encode(plain).decode()


def _secret(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, NotBase64) as error:
        raise SealError("the server's answer holds no key") from error
