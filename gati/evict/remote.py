"""A client of `POST /v1/continue`: the probability that a conversation continues, for engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from gati.errors import EvictError, RequestError, UnavailableError

Message = Mapping[str, str]  # role and content


class ContinuationClient:
    """A client of `gati evict serve` at `url`. It reuses its connection, so keep one for many requests.

        with ContinuationClient("http://127.0.0.1:8001") as client:
            p = client.probability([{"role": "user", "content": "Thanks, bye!"}])
            cache.insert(match, hints={"continue": p})

    Raises EvictError if httpx is not installed (`pip install 'gati[serve]'`).
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 1.0) -> None:
        try:
            import httpx
        except ImportError:
            raise EvictError("ContinuationClient needs httpx: pip install 'gati[serve]'") from None
        self._url = url
        self._errors = (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError)
        headers = {} if api_key is None else {"X-API-Key": api_key}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)

    def probability(self, messages: Sequence[Message]) -> float:
        """The probability that another prompt follows the newest one; like `probabilities`, for one."""
        return float(self._ask({"messages": list(map(dict, messages))}))

    def probabilities(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """The probability that another prompt follows, for each conversation, [conversations].

        Raises:
            UnavailableError: no answer in time, or the service cannot answer now.
            RequestError: the service refuses the request, with its reason.
        """
        rows = [{"messages": list(map(dict, messages))} for messages in conversations]
        return [float(p) for p in self._ask({"conversations": rows})]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, document: dict[str, Any]) -> Any:
        try:
            reply = self._client.post("/v1/continue", json=document)
            found = reply.json()
            if not reply.is_error:
                return found["p"]
        except self._errors as error:
            raise UnavailableError(f"no eviction service responds at {self._url}: {error}") from error
        reason = f"{found.get('error', reply.reason_phrase)} (status {reply.status_code})"
        if reply.status_code in (429, 503, 504):
            raise UnavailableError(reason, retry_after_s=float(reply.headers.get("Retry-After", 1.0)))
        raise RequestError(reason)
