"""A client of `POST /v1/continue`: the probability that a conversation continues, for engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as shortened
from types import TracebackType
from typing import Any, Self

from gati.errors import EvictError, RequestError, UnavailableError
from gati.hosts import is_loopback

Message = Mapping[str, Any]  # role and content

_LONGEST_PAUSE_S = 3600.0


class ContinuationClient:
    """A client of `gati evict serve` at `url`. It reuses its connection, so keep one for many requests.

        with ContinuationClient("http://127.0.0.1:8001") as client:
            p = client.probability([{"role": "user", "content": "Thanks, bye!"}])
            cache.insert(match, hints={"continue": p})

    A service on this machine is asked without the proxy that the environment may name. Raises EvictError if
    httpx is not installed (`pip install 'gati[serve]'`), or cannot use the address, the proxy, or the
    certificates that the environment names.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 1.0) -> None:
        try:
            import httpx
        except ImportError:
            raise EvictError("ContinuationClient needs httpx: pip install 'gati[serve]'") from None
        self._url = url
        # RecursionError for a reply of thousands of brackets
        self._errors = (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError)
        headers = {"Content-Type": "application/json"}
        if api_key is not None:
            headers["X-API-Key"] = api_key
        try:
            # for https only: the certificates of all authorities take long to read
            verify = url.lower().startswith("https:") and httpx.create_ssl_context()
            # a proxy would look for this machine's service on the proxy's; with a transport, none is used
            direct = httpx.HTTPTransport(verify=verify) if is_loopback(httpx.URL(url).host) else None
            self._client = httpx.Client(
                base_url=url, headers=headers, timeout=timeout_s, verify=verify, transport=direct
            )
        # ImportError and OSError: of a SOCKS proxy and of a file of certificates
        except (httpx.InvalidURL, ValueError, ImportError, OSError) as error:
            raise EvictError(
                f"the eviction service at {url} cannot be asked ({error}): correct the address, or the proxy "
                "or the certificates that ALL_PROXY, HTTP_PROXY, HTTPS_PROXY or SSL_CERT_FILE name"
            ) from error

    def probability(self, messages: Sequence[Message]) -> float:
        """The probability that another prompt follows the newest one; like `probabilities`, for one."""
        found = self._ask(lambda: _with_messages(messages))
        if not _is_probability(found):
            raise self._unusable(found)
        return float(found)

    def probabilities(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """The probability that another prompt follows, for each conversation, [conversations].

        Raises:
            UnavailableError: no answer in time, the service cannot answer now, or what answers is not it.
            RequestError: the service refuses the request, with its reason, or the messages are not JSON.
        """
        sent = list(conversations)
        found = self._ask(lambda: {"conversations": [*map(_with_messages, sent)]})
        if not isinstance(found, list) or len(found) != len(sent) or not all(map(_is_probability, found)):
            raise self._unusable(found)
        return [float(p) for p in found]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, document: Callable[[], dict[str, Any]]) -> Any:
        """The field `p` of the answer, of any type. Raises UnavailableError, RequestError."""
        try:
            body = json.dumps(document(), ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(
                f"a conversation cannot be written as JSON ({error}); give a list of "
                '{"role": "user", "content": "..."}'
            ) from error
        try:
            reply = self._client.post("/v1/continue", content=body)
            found = reply.json()
        except self._errors as error:
            raise UnavailableError(f"no eviction service responds at {self._url}: {error}") from error
        if not isinstance(found, dict):
            raise self._unusable(found)
        if reply.is_success:
            return found.get("p")
        told = found.get("error")
        reason = f"{told if isinstance(told, str) else reply.reason_phrase} (status {reply.status_code})"
        if reply.status_code == 429 or not reply.is_client_error:
            raise UnavailableError(reason, retry_after_s=_seconds(reply.headers.get("Retry-After", "")))
        raise RequestError(reason)

    def _unusable(self, found: Any) -> UnavailableError:
        return UnavailableError(
            f"what responds at {self._url} is no eviction service: it answered {shortened(found)} instead of "
            "a probability per conversation"
        )


def _with_messages(messages: Sequence[Message]) -> dict[str, Any]:
    return {"messages": list(map(dict, messages))}


def _is_probability(value: Any) -> bool:
    return type(value) in (int, float) and 0.0 <= value <= 1.0


def _seconds(text: str) -> float:
    """The pause that a Retry-After header asks for; one second for a date, or anything else."""
    return min(float(text), _LONGEST_PAUSE_S) if text.isascii() and text.isdigit() else 1.0
