"""Where the master key of an encrypted store is kept, by address."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from meshwright.base.errors import ConfigError

if TYPE_CHECKING:
    from meshwright.checkpoint.files import Files
    from meshwright.checkpoint.keys.base import Provider
    from meshwright.checkpoint.keys.keyring import Keyring

_CONFIG_KEY = "checkpoint.key"
_WAYS = "say file:PATH, kms:ALIAS_OR_ARN[?region=NAME] or vault:https://HOST/MOUNT/KEY"


def provider(address: str, config_key: str = _CONFIG_KEY) -> Provider:
    """The master key at `address`: `file:/path`, `kms:ALIAS_OR_ARN[?region=..&endpoint=..]` or
    `vault:https://host/transit/NAME` (token in VAULT_TOKEN).

    Raises ConfigError naming `config_key` if the address cannot be used as it stands: a file that
    others may read, no region, no token, a package that is missing. Nobody is asked for anything.
    """
    kind, _, rest = address.partition(":")
    if kind not in ("file", "kms", "vault") or not rest:
        raise ConfigError(config_key, address, _WAYS)
    if kind == "file":
        from meshwright.checkpoint.keys.local import read_key_file

        return read_key_file(Path(rest).expanduser(), config_key)
    if kind == "vault":
        from meshwright.checkpoint.keys.vault import open_vault

        return open_vault(rest, config_key)
    from meshwright.checkpoint.keys.kms import open_kms

    key, _, query = rest.partition("?")
    options = {name: values[-1] for name, values in parse_qs(query).items()}
    if unknown := set(options) - {"region", "endpoint"}:
        raise ConfigError(config_key, address, f"unknown {', '.join(sorted(unknown))}; {_WAYS}")
    return open_kms(key, options.get("region"), options.get("endpoint"), config_key)


def open_seal(files: Files, address: str, config_key: str = _CONFIG_KEY) -> Keyring:
    """The seal of the store that `files` are, under the master key at `address`.

    Raises ConfigError as `provider` does.
    """
    master = provider(address, config_key)
    from meshwright.checkpoint.keys.keyring import Keyring

    return Keyring(files, master)
