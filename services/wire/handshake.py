"""A shared secret between machines: each side proves that it has it without sending it.

The server sends a nonce; the client answers with its own and a code over both; the server answers with
another code over both. Nothing else is read before. The codes bind nothing to the connection: against who can
change what is on the wire, use TLS as well.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import ssl
from pathlib import Path

from gati.errors import ConfigError, NotAllowedError

_NONCE_BYTES = 32
_CODE_BYTES = 32
_LEAST_BYTES = 16


def read_secret(file: Path | None) -> bytes | None:
    """The secret in a file, without space around it. Raises `ConfigError` for none, or a short one."""
    if file is None:
        return None
    try:
        found = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the secret in {file} ({error.strerror}); name another") from error
    if len(found) < _LEAST_BYTES:
        raise ConfigError(f"the secret in {file} is short; make one with: openssl rand -hex 32")
    return found


def server_tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The server side of TLS; None without a certificate. Raises `ConfigError`."""
    if certificate is None:
        if key is not None:
            raise ConfigError("a key needs its certificate; give both")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use certificate {certificate} and its key ({error}); give both") from error
    return context


def client_tls(authority: Path | None) -> ssl.SSLContext | None:
    """Whom a client believes; None for no TLS. Raises `ConfigError`."""
    if authority is None:
        return None
    try:
        return ssl.create_default_context(cafile=authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use the certificates in {authority} ({error}); name others") from error


async def require(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Have a client prove that it has the secret. Raises `NotAllowedError`."""
    own = secrets.token_bytes(_NONCE_BYTES)
    writer.write(own)
    theirs = await reader.readexactly(_NONCE_BYTES)
    code = await reader.readexactly(_CODE_BYTES)
    if not hmac.compare_digest(code, _code(secret, b"client", own + theirs)):
        raise NotAllowedError("a client without the secret")
    writer.write(_code(secret, b"server", own + theirs))


async def prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Prove to a server that we have the secret, and have it prove that, too. Raises `NotAllowedError`."""
    theirs = await reader.readexactly(_NONCE_BYTES)
    own = secrets.token_bytes(_NONCE_BYTES)
    writer.write(own + _code(secret, b"client", theirs + own))
    code = await reader.readexactly(_CODE_BYTES)
    if not hmac.compare_digest(code, _code(secret, b"server", theirs + own)):
        raise NotAllowedError("a server without the secret")


def _code(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(secret, b"gati " + side + b"\0" + nonces, hashlib.sha256).digest()
