"""Certificates for tests, generated on the fly."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

__all__ = ["EC", "RSA", "certify"]


EC = ("ec", "-pkeyopt", "ec_paramgen_curve:P-256")
RSA = ("rsa:2048",)


def certify(
    folder: Path, names: str = "IP:127.0.0.1,DNS:localhost", kind: tuple[str, ...] = EC
) -> tuple[Path, Path]:
    """A certificate for these names that no one else vouches for, and its key of that kind."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = (
        "openssl",
        "req",
        "-x509",
        "-newkey",
        *kind,
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-addext",
        f"subjectAltName={names}",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    )
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl to make a certificate")
    return certificate, key
