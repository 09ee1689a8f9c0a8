"""A master key in AWS KMS, which never leaves it.

API: https://docs.aws.amazon.com/kms/latest/APIReference (GenerateDataKey, Decrypt, ReEncrypt,
Encrypt). The encryption context is {"meshwright:data-key": key id}, so that a policy can ask for
it, and the trail of KMS names each data key that was opened.
"""

from __future__ import annotations

import base64
from binascii import Error as NotBase64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.checkpoint.keys.base import Provider
from meshwright.checkpoint.seal import SealError

_CONTEXT = "meshwright:data-key"
_REASONS = {
    "NotFoundException": "there is no such key; check its name and region",
    "IncorrectKeyException": "wrong key: another one wrapped this; give that one's ARN",
    "InvalidCiphertextException": "the wrapping was changed; restore it from a copy",
    "AccessDeniedException": "these credentials may not use the key, or another one wrapped this",
    "DisabledException": "the key is disabled; enable it",
    "KMSInvalidStateException": "the key is disabled or to be deleted; cancel that",
}


@dataclass(frozen=True)
class Kms:
    """A key of AWS KMS by alias or ARN; `endpoint` is for servers other than Amazon's.

    Credentials and, unless given, the region are found as boto3 finds them.
    """

    key: str
    region: str | None
    endpoint: str | None
    client: Any = field(repr=False, compare=False)  # of boto3, which is untyped

    @property
    def label(self) -> str:
        """The key as it was given."""
        return f"kms {self.key}"

    def new(self, key_id: str) -> tuple[bytes, str]:
        """GenerateDataKey."""
        reply = self._call(
            "generate_data_key", KeyId=self.key, KeySpec="AES_256", EncryptionContext=_of(key_id)
        )
        return reply["Plaintext"], _text(reply["CiphertextBlob"])

    def unwrap(self, wrapped: str, key_id: str) -> bytes:
        """Decrypt, by this key only."""
        reply = self._call(
            "decrypt",
            CiphertextBlob=_blob(wrapped),
            KeyId=self.key,
            EncryptionContext=_of(key_id),
        )
        secret: bytes = reply["Plaintext"]
        return secret

    def rewrap(self, wrapped: str, key_id: str, old: Provider) -> str:
        """ReEncrypt within one KMS, where the secret does not leave it; else Encrypt."""
        if isinstance(old, Kms) and (old.region, old.endpoint) == (self.region, self.endpoint):
            reply = self._call(
                "re_encrypt",
                CiphertextBlob=_blob(wrapped),
                SourceKeyId=old.key,
                DestinationKeyId=self.key,
                SourceEncryptionContext=_of(key_id),
                DestinationEncryptionContext=_of(key_id),
            )
        else:
            secret = old.unwrap(wrapped, key_id)
            reply = self._call(
                "encrypt", KeyId=self.key, Plaintext=secret, EncryptionContext=_of(key_id)
            )
        return _text(reply["CiphertextBlob"])

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        call: Callable[..., dict[str, Any]] = getattr(self.client, method)
        try:
            return call(**arguments)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            reason = _REASONS.get(code, f"{code}: {error.response['Error'].get('Message', '')}")
            raise SealError(f"{self.label}: {reason}") from error
        except BotoCoreError as error:
            raise SealError(f"{self.label}: cannot be reached ({error})") from error


def open_kms(key: str, region: str | None, endpoint: str | None, config_key: str) -> Kms:
    """A key of AWS KMS; asks nothing of it yet. Raises ConfigError naming `config_key` without
    boto3 or without a region."""
    address = f"kms:{key}"
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        fix = "needs boto3; pip install 'meshwright[kms]'"
        raise ConfigError(config_key, address, fix) from error
    patience = Config(
        connect_timeout=5, read_timeout=10, retries={"mode": "standard", "max_attempts": 4}
    )
    try:
        client = boto3.client("kms", region_name=region, endpoint_url=endpoint, config=patience)
    except (BotoCoreError, ValueError) as error:
        fix = f"{error}; say {address}?region=NAME, or set AWS_DEFAULT_REGION"
        raise ConfigError(config_key, address, fix) from error
    return Kms(key, region, endpoint, client)


def _of(key_id: str) -> dict[str, str]:
    return {_CONTEXT: key_id}


def _text(blob: bytes) -> str:
    return base64.b64encode(blob).decode()


def _blob(wrapped: str) -> bytes:
    try:
        return base64.b64decode(wrapped, validate=True)
    except (ValueError, NotBase64) as error:
        raise SealError(_REASONS["InvalidCiphertextException"]) from error
