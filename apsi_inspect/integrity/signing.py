"""HMAC signatures of .apsim files, and the keys for them (`docs/apsim-format.md`, section 7).

Contract: key material and secrets never appear in a repr, an error, a log or a file of ours other than the per-user key
file, which only its owner can read (mode 0600). MACs are compared in constant time. What the signature proves, and to
whom, is in `docs/threat-model.md`. `tests/test_signing.py` derives every value with hashlib and hmac alone.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import unicodedata
from typing import NamedTuple

from ..errors import ValueRefusedError, visible
from ..permit import check_read, check_write
from .digests import jcs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

MIN_BYTES = 16
_KEY_FILE = 1 << 20  # bytes that are read of a key file
USER_KEY_BYTES = 32
_SCRYPT = {"n": 32768, "r": 8, "p": 1}
_SCRYPT_MEMORY = 64 << 20
_KEY, _KEY_ID, _SIGNATURE = b"apsi-model key 1\n", b"apsi-model key id", b"apsi-model signature 1\n"


class Key:
    """A signing key: the per-user key, bytes, or a shared secret.

    Parameters
    ----------
    given
        True: the per-user key; bytes: at least 16; str: a secret.
    create
        With True: make the per-user key where there is none yet (for signing).

    Raises
    ------
    ValueRefusedError
        An empty secret, bytes that are too few, anything else; or there is no per-user key.
    """

    __slots__ = ("_material", "_secret")

    def __init__(self, given: bool | bytes | bytearray | memoryview | str, create: bool = False) -> None:
        self._material, self._secret = b"", b""
        if given is True:
            self._material = user_key(create)
        elif isinstance(given, (bytes, bytearray, memoryview)):
            self._material = bytes(given)
            if len(self._material) < MIN_BYTES:
                raise ValueRefusedError(f"a key has at least {MIN_BYTES} bytes, this one {len(self._material)}")
        elif isinstance(given, str):
            self._secret = _normalised(given)
        else:
            kind = type(given).__name__
            raise ValueRefusedError(f"a key is True (the per-user key), bytes or a secret string, not {kind}")

    def __repr__(self) -> str:
        return "<Key: a shared secret>" if self._secret else "<Key: bytes>"

    def __reduce__(self) -> Any:
        raise TypeError("a key is not pickled")

    @property
    def is_secret(self) -> bool:
        """True for a shared secret, which goes through scrypt."""
        return bool(self._secret)

    def derive(self, kdf: dict[str, Any] | None) -> bytes | None:
        """The HMAC key under a signature's `kdf`; None where this kind of key cannot have made it."""
        if (kdf is None) == self.is_secret:
            return None
        material = self._material
        if kdf is not None:
            salt = bytes.fromhex(kdf["salt"])
            material = hashlib.scrypt(self._secret, salt=salt, **_SCRYPT, maxmem=_SCRYPT_MEMORY, dklen=32)
        return hashlib.sha256(_KEY + material).digest()


class Signer(NamedTuple):
    """A derived key, ready to sign."""

    key: bytes
    kdf: dict[str, Any] | None

    def __repr__(self) -> str:
        return "<Signer>"


def signer(key: Key, salt: bytes | None = None) -> Signer:
    """Derive what signs; a secret gets a fresh salt unless one is given."""
    kdf = None
    if key.is_secret:
        kdf = {"name": "scrypt", **_SCRYPT, "salt": (secrets.token_bytes(16) if salt is None else salt).hex()}
    derived = key.derive(kdf)
    assert derived is not None
    return Signer(derived, kdf)


def _normalised(secret: str) -> bytes:
    if not secret:
        raise ValueRefusedError("the key is empty: a secret has at least one character")
    if any("\ud800" <= c <= "\udfff" for c in secret):
        raise ValueRefusedError("the key holds a lone surrogate, which is no text")
    return unicodedata.normalize("NFC", secret).encode("utf-8")


def key_id(key: bytes) -> str:
    """Public name of a derived key: tells "another key" from "changed after signing"."""
    return hmac.digest(key, _KEY_ID, "sha256")[:8].hex()


def _payload(kid: str, kdf: dict[str, Any] | None, shards: Sequence[tuple[str, str]], index: str | None) -> bytes:
    rows = [{"sha256": sha256, "meta_sha256": meta} for sha256, meta in shards]
    return jcs({"alg": "HMAC-SHA256", "key_id": kid, "kdf": kdf, "shards": rows, "index_sha256": index})


def sign(by: Signer, shards: Sequence[tuple[str, str]], index_sha256: str | None = None) -> dict[str, Any]:
    """The ``signature`` object over the digests (sha256, meta_sha256) of the shards in order."""
    kid = key_id(by.key)
    mac = hmac.digest(by.key, _SIGNATURE + _payload(kid, by.kdf, shards, index_sha256), "sha256").hex()
    return {"alg": "HMAC-SHA256", "key_id": kid, "kdf": by.kdf, "mac": mac}


def check(
    key: Key, signature: dict[str, Any], shards: Sequence[tuple[str, str]], index_sha256: str | None = None
) -> str:
    """``"authentic"``, ``"other-key"`` or ``"damaged"`` (the key is right, what it signed was another thing).

    The signature's form has been checked by the reader.
    """
    derived = key.derive(signature["kdf"])
    if derived is None or not hmac.compare_digest(key_id(derived), signature["key_id"]):
        return "other-key"
    message = _SIGNATURE + _payload(signature["key_id"], signature["kdf"], shards, index_sha256)
    good = hmac.compare_digest(hmac.digest(derived, message, "sha256"), bytes.fromhex(signature["mac"]))
    return "authentic" if good else "damaged"


def key_of_file(path: str) -> bytes:
    """What a key file holds; a pipe will do, too.

    Raises
    ------
    OSError
        It is missing or unreadable; PermissionError where `permissions` do not allow to read it.
    """
    check_read(path, local=True)
    with open(path, "rb") as f:
        return f.read(_KEY_FILE)


def user_key_path() -> str:
    """Where the per-user key is kept."""
    import platformdirs

    return os.path.join(platformdirs.user_config_dir("apsi_inspect", appauthor=False), "signing.key")


def user_key_id(create: bool = False) -> str:
    """The id of the per-user key."""
    derived = Key(True, create).derive(None)
    assert derived is not None
    return key_id(derived)


def user_key(create: bool = False) -> bytes:
    """The per-user key's bytes; made on first use where `create` is set.

    Raises
    ------
    ValueRefusedError
        There is none, others can read it, or the file is no key.
    """
    path = user_key_path()
    try:
        return _read_user_key(path)
    except FileNotFoundError:
        if not create:
            raise ValueRefusedError(
                f"there is no per-user key yet ({visible(path)}); it is made when you first sign with sign=True"
            ) from None
    _make_user_key(path)
    return _read_user_key(path)


def _read_user_key(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(fd).st_mode
        data = os.read(fd, USER_KEY_BYTES + 1)
    finally:
        os.close(fd)
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise ValueRefusedError(
            f"{visible(path)}: others can read the per-user key (mode {stat.S_IMODE(mode):04o}): chmod 600"
        )
    if len(data) != USER_KEY_BYTES:
        raise ValueRefusedError(f"{visible(path)}: is no per-user key ({USER_KEY_BYTES} bytes were expected)")
    return data


def _make_user_key(path: str) -> None:
    """Write a new key under another name and link it: a key that another process made first stays."""
    check_write(path)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    temporary = f"{path}.{secrets.token_hex(8)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        os.write(fd, secrets.token_bytes(USER_KEY_BYTES))
        os.fsync(fd)
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        os.close(fd)
        os.unlink(temporary)
