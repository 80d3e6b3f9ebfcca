"""What the store may know of a session: nothing without the key, and without a key nothing at all."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

NONCE_BYTES = 12


class Sealer:
    """Names and contents of store entries. Without a secret names are plain hashes and contents are left out."""

    def __init__(self, secret: str | None) -> None:
        self._name_key = _derive(secret, b"names") if secret else b""
        self._cipher = AESGCM(_derive(secret, b"contents")) if secret else None

    def name(self, *parts: str) -> str:
        """A name that tells nothing of its parts (session ids are random, so a hash of one can't be guessed)."""
        text = "\0".join(parts).encode()
        return hmac.new(self._name_key, text, hashlib.sha256).hexdigest()[:40]

    def seal(self, content: bytes, name: str) -> bytes:
        """The content encrypted, bound to the name that it is kept under; empty without a secret."""
        if self._cipher is None:
            return b""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, content, name.encode())

    def unseal(self, sealed: bytes, name: str) -> bytes | None:
        """The content again; None if it was left out, or sealed under another key or name."""
        if self._cipher is None or not sealed:
            return None
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.encode())
        except InvalidTag:
            return None


def _derive(secret: str, purpose: bytes) -> bytes:
    return HKDF(SHA256(), 32, None, b"souschef store " + purpose).derive(secret.encode())
