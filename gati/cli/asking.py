"""Requests to a running `gati serve`, for the verbs that need them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from gati.errors import GatiError, RequestError, UnavailableError

TIMEOUT_S = 60.0  # more than the server may take by default
_NOT_TRUSTED = re.compile("self.signed|unable to get")  # else it has expired, or is for other names


@dataclass(frozen=True)
class AskedServer:
    """A `gati serve` at `url`, with `api_key` if it requires one. Error replies raise `refused`.

    `timeout_s` is how long it may take to reply.
    """

    url: str
    api_key: str | None
    refused: type[GatiError] = RequestError
    timeout_s: float = TIMEOUT_S

    def ask(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, Any] | None = None,
        content: bytes | None = None,
        kind: str | None = None,
        *,
        head_length: int | None = None,
    ) -> Any:
        """Send a request, return the JSON reply. Raises `UnavailableError` without a reply, else `refused`.

        If binary tensors follow JSON in `content`, `head_length` is the length of the JSON in bytes.
        """
        if find_spec("httpx") is None:
            raise UnavailableError(
                "requests to a server need httpx; install it with pip install 'gati[serve]'"
            )
        import httpx

        from gati.hosts import is_loopback

        headers = {} if kind is None else {"Content-Type": kind}
        if head_length is not None:
            headers["Inference-Header-Content-Length"] = str(head_length)
        if self.api_key is not None:
            headers["X-API-Key"] = self.api_key
        try:
            reply = httpx.request(
                method,
                f"{self.url.rstrip('/')}{path}",
                content=content,
                params=dict(parameters or {}),
                headers=headers,
                timeout=self.timeout_s,
                # for https only: the certificates of all authorities take long to read
                verify=self.url.lower().startswith("https:") and httpx.create_ssl_context(),
                # A proxy that the environment names would look for this machine's server on its own.
                trust_env=not is_loopback(httpx.URL(self.url).host),
            )
            document = reply.json()
            if not isinstance(document, dict):
                raise ValueError("its reply is no JSON object")
        except httpx.ReadTimeout as error:
            raise UnavailableError(
                f"gati serve at {self.url} has not replied for {self.timeout_s:g} s; see its log"
            ) from error
        except httpx.ConnectError as error:
            if "CERTIFICATE_VERIFY_FAILED" not in str(error):
                raise self._silent(error) from error
            if _NOT_TRUSTED.search(str(error)) is None:
                raise UnavailableError(
                    f"the certificate of {self.url} is not valid for it ({error})"
                ) from error
            raise UnavailableError(
                f"the certificate of {self.url} is not trusted ({error}); name the file of its authority's "
                "certificate in SSL_CERT_FILE"
            ) from error
        # ImportError and OSError: a SOCKS proxy or a file of certificates that the environment names.
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, ImportError, OSError) as error:
            raise self._silent(error) from error
        if reply.is_error:
            again = reply.headers.get("Retry-After")
            message = f"{document.get('error', reply.reason_phrase)} (status {reply.status_code})"
            raise self.refused(message + (f"; retry in {again} s" if again else ""))
        return document

    def _silent(self, error: Exception) -> UnavailableError:
        return UnavailableError(f"no gati serve responds at {self.url} ({error}); start one with gati serve")
