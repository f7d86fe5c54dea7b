"""What the verbs have in common that ask a running `gati serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from gati.errors import GatiError, RequestError, UnavailableError

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class AskedServer:
    """A `gati serve` at `url`; `api_key` if it requires one. What it refuses is raised as `refused`."""

    url: str
    api_key: str | None
    refused: type[GatiError] = RequestError

    def ask(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, Any] | None = None,
        content: bytes | None = None,
        kind: str | None = None,
        *,
        head_length: int | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> Any:
        """Its reply as JSON. Raises `UnavailableError` where nothing answers, and `refused`.

        Of `content`, `head_length` bytes are JSON if binary tensors follow it.
        """
        if find_spec("httpx") is None:
            raise UnavailableError("asking a server needs httpx; install it with pip install 'gati[serve]'")
        import httpx

        headers = {} if kind is None else {"Content-Type": kind}
        if head_length is not None:
            headers["Inference-Header-Content-Length"] = str(head_length)
        if self.api_key is not None:
            headers["X-API-Key"] = self.api_key
        try:
            reply = httpx.request(
                method,
                f"{self.url}{path}",
                content=content,
                params=dict(parameters or {}),
                headers=headers,
                timeout=timeout_s,
            )
            document = reply.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise UnavailableError(
                f"no Gati answers at {self.url} ({error}); start one with gati serve"
            ) from error
        if reply.is_error:
            again = reply.headers.get("Retry-After")
            message = f"{document.get('error', reply.reason_phrase)} (status {reply.status_code})"
            raise self.refused(message + (f"; ask again in {again} s" if again else ""))
        return document
