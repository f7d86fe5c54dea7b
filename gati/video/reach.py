"""Restricts what FFmpeg may open for a source, and whose certificates it trusts.

Playlists, references within files, and redirects name what to open next, and are not trusted. So each kind of
source has a list of allowed protocols, and a network source never opens local files. Encrypted sources must
present a valid certificate.
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gati.errors import VideoError, first_line

_PROTOCOLS = {
    # HTTPS must not redirect to HTTP: an attacker could then replace the pictures
    "https": "https,tls,tcp,httpproxy,crypto",
    "http": "http,https,tls,tcp,httpproxy,crypto",
    "rtsps": "tls,tcp",
    "rtsp": "tcp",
}
_ENCRYPTED = ("https", "rtsps")
_PLAYLISTS = frozenset(("applehttp", "concat", "dash", "hls", "imf", "rtsp", "sdp", "webm_dash_manifest"))
_IS_PLAYLIST = "it is a playlist, or not a video of a known kind; give the video itself"
_LEADS_AWAY = "it leads to where such a source may not (from https:// to http://, or to a local file)"
_NOT_TRUSTED = (
    "the connection failed, or the certificate is not trusted; name the file of who issued it "
    "(--authority FILE.pem)"
)


@dataclass(frozen=True)
class Reach:
    """Options for FFmpeg, and the meaning of some of its errors (by number) when it opens the source."""

    options: Mapping[str, str] = field(default_factory=dict)
    meanings: Mapping[int, str] = field(default_factory=dict)

    def meaning_of(self, error: Exception) -> str | None:
        """The meaning of an error for this source; None if it has no specific one."""
        return self.meanings.get(getattr(error, "errno", None) or 0)


def reach_of_file(av: Any) -> Reach:
    """A local file opens nothing else: playlists, which name other files, are refused."""
    formats = ",".join(sorted(set(av.formats_available) - _PLAYLISTS))
    return Reach(
        {"protocol_whitelist": "file", "format_whitelist": formats},
        {errno.EINVAL: _IS_PLAYLIST, errno.EPERM: _IS_PLAYLIST},
    )


def reach_of_address(scheme: str, authority: Path | None = None) -> Reach:
    """A network address may use its own protocol and those below it.

    The certificate of an encrypted source must match its host, and be issued by an authority in the file
    `authority`, or by one that this system trusts.

    **Raises:** `VideoError` if `authority` has no certificate, or this kind of source is not encrypted.
    """
    options = {"protocol_whitelist": _PROTOCOLS[scheme]}
    meanings = {errno.EINVAL: _LEADS_AWAY, errno.EPERM: _LEADS_AWAY}
    if scheme.startswith("rtsp"):
        options["rtsp_transport"] = "tcp"
    if scheme in _ENCRYPTED:
        meanings[errno.EIO] = _NOT_TRUSTED
    if scheme != "rtsp":  # HTTP may redirect to HTTPS
        options["tls_verify"] = "1"
        if trusted := _trusted() if authority is None else _checked(authority):
            options["ca_file"] = str(trusted)
    elif authority is not None:
        raise VideoError("rtsp:// is not encrypted, so an authority has no effect; use rtsps://")
    return Reach(options, meanings)


def _trusted() -> str | None:
    """The system's file of trusted authorities: FFmpeg builds look for it elsewhere."""
    if found := ssl.get_default_verify_paths().cafile:
        return found
    try:
        import certifi
    except ImportError:
        return None
    return str(certifi.where())


def _checked(authority: Path) -> Path:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        raise VideoError(
            f"{authority} is not a PEM file of certificates ({first_line(error)}); give the certificate of "
            "the authority that issued the source's"
        ) from None
    return authority
