"""A shared secret between machines: each side proves that it has the secret without sending it.

The server sends a nonce; the client answers with its own nonce and an HMAC of both; the server answers with
another HMAC of both. Nothing else is read before that. The handshake does not protect the connection itself:
against attackers who can modify the traffic, use TLS as well.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import ssl
from pathlib import Path

from gati.errors import ConfigError, NotAllowedError

_NONCE_BYTES = 32
_CODE_BYTES = 32
_LEAST_BYTES = 16


def read_secret(file: Path | None) -> bytes | None:
    """The secret in a file, without surrounding white space; None without a file.

    **Raises:** `ConfigError` for an unreadable file, or a secret of less than 16 bytes.
    """
    if file is None:
        return None
    try:
        found = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the secret in {file} ({error.strerror}); name another") from error
    if len(found) < _LEAST_BYTES:
        raise ConfigError(f"the secret in {file} is too short; make one with: openssl rand -hex 32")
    return found


def server_tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The server side of TLS; None without a certificate. Raises `ConfigError`."""
    if certificate is None:
        if key is not None:
            raise ConfigError("certificate_key needs its certificate; give both")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def ask() -> bytes:  # OpenSSL would ask on the terminal, and a server that renews it would stand still
        raise ConfigError(
            f"the key in {key or certificate} has a passphrase; write one without (openssl pkey)"
        )

    try:
        context.load_cert_chain(certificate, key, ask)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot use certificate {certificate} and its key ({error}); give both, as PEM files"
        ) from error
    return context


def renewed_tls(certificate: Path | None, key: Path | None, log: logging.Logger) -> ssl.SSLContext | None:
    """As `server_tls`, for new connections of a server that runs.

    None for an invalid certificate as well: the old one stays, and `log` says why.
    """
    try:
        # A new context: the old one would keep a certificate for another type of key, and serve that.
        context = server_tls(certificate, key)
    except ConfigError as error:
        log.error("invalid certificate; the old one stays", extra={"reason": str(error)})
        return None
    if context is not None:
        log.info("certificate read", extra={"file": str(certificate)})
    return context


def client_tls(authority: Path | None) -> ssl.SSLContext | None:
    """The client side of TLS, which trusts only this authority; None without one. Raises `ConfigError`."""
    if authority is None:
        return None
    try:
        return ssl.create_default_context(cafile=authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use the certificates in {authority} ({error}); give a PEM file") from error


async def require(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Require a client to prove that it has the secret, and prove it in turn. Raises `NotAllowedError`."""
    own = secrets.token_bytes(_NONCE_BYTES)
    writer.write(own)
    theirs = await reader.readexactly(_NONCE_BYTES)
    code = await reader.readexactly(_CODE_BYTES)
    if not hmac.compare_digest(code, _code(secret, b"client", own + theirs)):
        raise NotAllowedError("a client without the secret")
    writer.write(_code(secret, b"server", own + theirs))


async def prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Prove to a server that we have the secret, and require the same of it. Raises `NotAllowedError`."""
    theirs = await reader.readexactly(_NONCE_BYTES)
    own = secrets.token_bytes(_NONCE_BYTES)
    writer.write(own + _code(secret, b"client", theirs + own))
    code = await reader.readexactly(_CODE_BYTES)
    if not hmac.compare_digest(code, _code(secret, b"server", theirs + own)):
        raise NotAllowedError("a server without the secret")


def _code(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(secret, b"gati " + side + b"\0" + nonces, hashlib.sha256).digest()
