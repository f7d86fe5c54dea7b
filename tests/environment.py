"""The environment of tests that need a certain one."""

from __future__ import annotations

import os

import pytest


def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the proxies, the exceptions to them, and the certificates that the environment may name."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
            monkeypatch.delenv(name)
