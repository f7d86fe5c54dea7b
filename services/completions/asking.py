"""Requests to `/v1/completions`, parsed and validated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, field_validator

from gati.errors import RequestError
from gati.evict.engine.generation import GenerationRequest, Sampling
from gati.evict.engine.tokens import Vocabulary
from services.invalid import first_invalid

_MOST_PROMPTS = 64
_DEFAULT_TOKENS = 16  # OpenAI's default
_LONGEST_STOP = 256  # characters

# fail_fast: a list of a million invalid tokens gives one error, not a million
_Ids = Annotated[list[StrictInt], Field(fail_fast=True)]
_Texts = Annotated[list[StrictStr], Field(fail_fast=True)]
_Lists = Annotated[list[_Ids], Field(fail_fast=True)]
_Stop = Annotated[StrictStr, Field(min_length=1, max_length=_LONGEST_STOP)]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class _Body(BaseModel):
    """The parameters of OpenAI's API, and two of ours.

    Unsupported ones, also of vLLM, are accepted with values that change nothing.
    """

    model_config = ConfigDict(extra="forbid")

    model: StrictStr
    prompt: StrictStr | _Ids | _Texts | _Lists
    max_tokens: StrictInt | None = None
    temperature: float | None = None
    seed: StrictInt | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # say whose request it is and what for, which changes nothing
    user: StrictStr | None = None
    metadata: dict[str, Any] | None = None
    # Gati's
    ignore_eos: bool = False
    continue_probability: float | None = Field(default=None, ge=0.0, le=1.0)
    # unsupported
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: Literal[False] | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=0)
    top_p: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    suffix: Literal[""] | None = None
    store: Literal[False] | None = None
    # vLLM's, which its benchmark sends
    repetition_penalty: Literal[1] | None = None
    top_k: Literal[-1, 0] | None = None
    min_p: Literal[0] | None = None
    min_tokens: Literal[0] | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_logprobs(cls, value: Any) -> Any:
        if value is not None and value is not False:  # 0, too, asks for those of the generated tokens
            raise ValueError("input should be null or false")
        return value


@dataclass(frozen=True)
class AskedCompletion:
    """A request: one generation per prompt, their stops, and the format of the answer."""

    model: str
    requests: Sequence[GenerationRequest]
    stops: Sequence[str]
    streams: bool
    tells_usage: bool


def read_completion(body: bytes, tokens: Vocabulary) -> AskedCompletion:
    """Parse a request. Raises a RequestError that names the invalid parameter."""
    try:
        asked = _Body.model_validate_json(body)
    except ValidationError as error:
        raise RequestError(_message(error)) from None
    prompts = _prompts(asked.prompt, tokens)
    if not 1 <= len(prompts) <= _MOST_PROMPTS:
        raise RequestError(f"prompt: the list has {len(prompts)} prompts; give 1 to {_MOST_PROMPTS}")
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    return AskedCompletion(
        asked.model,
        [
            GenerationRequest(
                prompt,
                _DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens,
                _sampling(asked, number),
                ends_early=not asked.ignore_eos,
                goes_on=asked.continue_probability,
            )
            for number, prompt in enumerate(prompts)
        ],
        stops,
        bool(asked.stream),
        bool(asked.stream_options and asked.stream_options.include_usage),
    )


def _sampling(asked: _Body, number: int) -> Sampling:
    """Return settings for each prompt of a request, with seeds that differ but are reproducible."""
    seed = None if asked.seed is None else (asked.seed + number) % 2**63
    return Sampling(1.0 if asked.temperature is None else asked.temperature, seed)


def _prompts(prompt: Any, tokens: Vocabulary) -> list[tuple[int, ...]]:
    if isinstance(prompt, str):
        return [tuple(tokens.encode(prompt))]
    if prompt and isinstance(prompt[0], int):
        return [tuple(prompt)]
    return [tuple(tokens.encode(each) if isinstance(each, str) else each) for each in prompt]


def _message(error: ValidationError) -> str:
    invalid = first_invalid(error.errors(include_input=False, include_url=False))
    where = str(invalid.place[0]) if invalid.place else ""
    if invalid.kind == "extra_forbidden":
        return f"unknown parameter {where[:40]!r}"
    if where == "prompt" and invalid.kind != "missing":
        return "prompt: give a text, a list of tokens, or a list of texts or of lists of tokens"
    if where == "stop":  # pydantic names only the last of the forms that it may have
        return (
            "stop: give a text or up to four texts, none of them empty or longer than "
            f"{_LONGEST_STOP} characters"
        )
    return f"{where or 'the body'}: {invalid.reason}"
