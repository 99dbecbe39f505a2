"""AES-256-GCM for the traffic of a connection, with keys that both ends exchange inside TLS.

The ssl module carries 4 to 6 Gbit/s, AES-GCM on whole chunks ten times that. Key agreement, certificates and forward
secrecy are TLS's: each side sends 32 random bytes inside TLS, and the keys are HKDF-SHA256 of both, one per direction
and connection. The nonce counts from zero for each key and never repeats. Knows no sockets and no certificates.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Any

from atlas.errors import MissingExtraError, WorkerError

TAG_BYTES = 16
"""Of AES-GCM."""
SECRET_BYTES = 32
MAX_KEY_BYTES = 1 << 42
"""4 TB with one key, far below the limits of AES-GCM. Then the stream is replaced by one with new keys."""
_NONCE = struct.Struct("!4xQ")


def _library() -> tuple[Any, type[Exception]]:
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise MissingExtraError("cryptography", "wan", "encryption between datacenters") from None
    return AESGCM, InvalidTag


class AeadCipher:
    """Encrypts one direction of a connection and decrypts the other. One thread may write while another reads."""

    def __init__(self, write_key: bytes, read_key: bytes) -> None:
        aes_gcm, self._forged = _library()
        self._writer, self._reader = aes_gcm(write_key), aes_gcm(read_key)
        self._num_written = self._num_read = 0
        self._encrypted_bytes = 0

    def encrypt(self, data: bytes | memoryview, out: memoryview) -> None:
        """`out` is longer than `data` by TAG_BYTES."""
        self._encrypted_bytes += len(data)
        if self._encrypted_bytes > MAX_KEY_BYTES:
            raise WorkerError("the key of this connection has reached the limit of bytes that one key may encrypt")
        self._writer.encrypt_into(_NONCE.pack(self._num_written), data, None, out)
        self._num_written += 1

    def decrypt(self, data: memoryview, out: memoryview) -> None:
        try:
            self._reader.decrypt_into(_NONCE.pack(self._num_read), data, None, out)
        except self._forged:
            raise WorkerError("encrypted bytes do not match their tag: the stream is damaged or forged") from None
        self._num_read += 1


def derive(secret: bytes, info: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869) with an empty salt, one block of output."""
    pseudo_random_key = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(pseudo_random_key, info + b"\x01", hashlib.sha256).digest()


def cipher_of(dialer_secret: bytes, listener_secret: bytes, *, is_dialer: bool) -> AeadCipher:
    both = dialer_secret + listener_secret
    there, back = derive(both, b"atlas wan 2: dialer to listener"), derive(both, b"atlas wan 2: listener to dialer")
    return AeadCipher(there, back) if is_dialer else AeadCipher(back, there)
