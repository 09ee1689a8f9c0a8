"""AES-256-GCM with nonces of 192 bits: XAES-256-GCM, https://c2sp.org/XAES-256-GCM.

Plain AES-GCM has 96 bits of nonce: too few to draw at random, without end, by ranks that share a
key and do not talk to each other. Here the first half of the nonce makes a key of its own by a
NIST SP 800-108 counter KDF (AES-CMAC), the second half is the nonce under it: 2^80 messages with
one key leave the chance of a repeat at 2^-32.
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB

from meshwright.checkpoint.seal import Bytes

KEY_BYTES = 32
NONCE_BYTES = 24
TAG_BYTES = 16
_BLOCK_BYTES = 16
_CMAC_POLYNOMIAL = 0x87


def new_nonce() -> bytes:
    """A random nonce, never to be used for a second message."""
    return os.urandom(NONCE_BYTES)


def encrypt(key: bytes, nonce: bytes, plain: Bytes, bound: bytes) -> bytes:
    """Ciphertext and tag: `TAG_BYTES` more than `plain`. `bound` is authenticated with it."""
    return _cipher(key, nonce).encrypt(nonce[12:], plain, bound)


def decrypt(key: bytes, nonce: bytes, body: Bytes, bound: bytes) -> bytes | None:
    """The plain bytes, or None if body or `bound` are not those of `encrypt` with this key."""
    try:
        return _cipher(key, nonce).decrypt(nonce[12:], body, bound)
    except InvalidTag:
        return None


def _cipher(key: bytes, nonce: bytes) -> AESGCM:
    block = Cipher(AES(key), ECB()).encryptor()
    mask = _doubled(block.update(bytes(_BLOCK_BYTES)))
    halves = (bytes((0, count, ord("X"), 0)) + nonce[:12] for count in (1, 2))
    return AESGCM(b"".join(block.update(_xor(half, mask)) for half in halves))


def _doubled(value: bytes) -> bytes:
    """Twice the value in GF(2^128), the first subkey of CMAC (RFC 4493)."""
    doubled = int.from_bytes(value) << 1
    carry = doubled >> 128
    return ((doubled & (2**128 - 1)) ^ (carry * _CMAC_POLYNOMIAL)).to_bytes(_BLOCK_BYTES)


def _xor(a: bytes, b: bytes) -> bytes:
    return bytes(x ^ y for x, y in zip(a, b, strict=True))
