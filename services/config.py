"""The configuration of `gati serve`, and where each value came from: file, environment, command line."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gati.errors import ConfigError
from gati.types import NAME_PATTERN, is_name

ENVIRONMENT_PREFIX = "GATI_SERVE_"
MIB = 2**20
MOST_REPLICAS = 1000
_PATHS = (
    "library",
    "checkpoint",
    "file",
    "state",
    "secret_file",
    "authority",
    "keys_file",
    "certificate",
    "certificate_key",
)
_SECRET = ("api_key", "management_key")
_LOGIN = re.compile(r"(\w://)[^\s?]*@")
_QUERY = re.compile(r"(\w://[^\s?]*)\?\S+")
_LARGEST_PORT = 65_535


M = TypeVar("M", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Strict):
    """One model: a cache library or plain model to be served from here, or the address of who serves it."""

    library: Path | None = None
    composition: str | None = Field(default="default", pattern=NAME_PATTERN)
    caches: bool = True  # False: the base model of the library alone
    model: str | None = None
    checkpoint: Path | None = None
    size: str | None = Field(default=None, pattern=r"^\d+x\d+$")  # HEIGHTxWIDTH a plain model's inputs have
    address: str | None = Field(default=None, pattern=r"^[^:\s]+:\d{1,5}$")
    secret_file: Path | None = None  # what the service at the address must have, too
    authority: Path | None = None  # calls to the address go by TLS, to who has a certificate of these
    device: str | None = None  # the one the library was measured on unless given; cpu for a plain model
    threads: int | None = Field(default=None, ge=1)
    workers: int | None = Field(default=None, ge=1)
    queue_capacity: int = Field(default=128, ge=1)
    largest_batch: int = Field(default=64, ge=1)
    # Share of the base model's time for audits. 0 switches the guard off: caches that no certificate covers
    # then never answer, because nothing can prove them, and those that are covered answer unwatched.
    audit_budget: float = Field(default=0.05, ge=0.0, le=1.0)
    trials: float = Field(default=0.2, gt=0.0, le=1.0)  # share of requests tried on unproven caches
    memory: bool = True  # requests that name a `place` may be answered from memory, once that is proven
    places: int = Field(default=64, ge=1)  # places in memory; the least recently used is forgotten
    unguarded: bool = False  # with audit_budget = 0: unproven caches answer all the same, nothing is promised
    # Folder where it is kept how versions stand, and which were loaded; LIBRARY/standing unless given.
    state: Path | None = None
    records: str | None = None  # URL of the record store for samples; sqlite:///FILE or postgresql://...
    sampling: float = Field(default=0.2, ge=0.0, le=1.0)
    records_limit_bytes: int = Field(default=2**30, ge=1)  # that the record store may hold; the oldest go
    most_versions: int = Field(default=8, ge=2)  # loaded at a time
    adaptation_share: float = Field(default=1.0, gt=0.0)  # of retraining's time, against that of other models
    replicas: int | None = Field(default=None, ge=1, le=MOST_REPLICAS)  # services that share the requests
    # A started process, without the model, for each replica: it takes over in about the time of loading.
    spare: bool = False
    # Between these as many replicas as it takes for nine of ten requests to wait no longer than the delay.
    replicas_min: int = Field(default=1, ge=0)  # 0: none without requests; the next one starts one
    replicas_max: int | None = Field(default=None, ge=1, le=MOST_REPLICAS)
    replicas_delay_ms: float = Field(default=50.0, gt=0.0)
    replicas_cooldown_s: float = Field(default=60.0, gt=0.0)  # one less would have done for so long: it goes
    replicas_idle_s: float = Field(default=300.0, gt=0.0)  # with a minimum of 0: without a request
    repository: str | None = None  # folder or URL of the model repository; its active version serves

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.library is not None and self.model is not None:
            raise ValueError("give a library or a model, not both")
        if self.library is None and self.model is None and self.address is None:
            raise ValueError("give a library, a model or an address")
        if self.address is not None and int(self.address.rpartition(":")[2]) > _LARGEST_PORT:
            raise ValueError(f"{self.address} has no port; give one up to {_LARGEST_PORT}")
        if self.address is not None and (self.replicas is not None or self.replicas_max is not None):
            raise ValueError("an address is of one service; give replicas with a library or a model")
        if self.replicas_max is None and self.replicas_min != 1:
            raise ValueError("replicas_min needs replicas_max; give both, or replicas")
        if self.replicas_max is not None and not self.replicas_min <= (self.replicas or self.replicas_min):
            raise ValueError("replicas is what a model begins with; give at least replicas_min")
        if self.replicas_max is not None and max(self.replicas_min, self.replicas or 1) > self.replicas_max:
            raise ValueError("replicas and replicas_min must not be above replicas_max")
        if self.unguarded and self.audit_budget > 0.0:
            raise ValueError("unguarded caches are not audited; give audit_budget = 0 with unguarded = true")
        return self

    @property
    def height_and_width(self) -> tuple[int, int] | None:
        """`size` as numbers."""
        if self.size is None:
            return None
        height, _, width = self.size.partition("x")
        return int(height), int(width)


class PipelineConfig(_Strict):
    """One pipeline. Its options are served by models of this configuration, added if there is none."""

    file: Path
    policy: str = "dynamic"
    attainment: float = Field(default=0.95, gt=0.0, lt=1.0)
    latency_slo_ms: float | None = Field(default=None, gt=0.0)  # of queries that name none
    live: bool = True  # figures follow the traffic; False: only what was measured offline
    half_life: float = Field(default=256.0, gt=0.0)  # queries of a stage after which evidence counts half
    # One query of so many may run an option that was not seen for long, to see how it does now; 0: none.
    explore_every: int = Field(default=128, ge=0)


class AdaptationConfig(_Strict):
    """The service that retrains the caches of every model with `records` and a `repository`."""

    interval_s: float = Field(default=600.0, gt=0.0)
    window_s: float = Field(default=3600.0, gt=0.0)
    window_inputs: int = Field(default=1400, ge=100)
    held_share: float = Field(default=0.25, gt=0.0, lt=1.0)  # of the samples, to lay settings on
    blocks: tuple[str, ...] | None = None  # where new caches are tried; three early blocks unless given
    variants: tuple[str, ...] = ("scene(8,64,64)",)  # kinds of new caches that are tried
    look_every_s: float = Field(default=5.0, gt=0.0)


class ServeConfig(_Strict):
    """Everything that `gati serve` can be told."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    hosts: tuple[str, ...] = ()  # further host names that clients without a key may use
    api_key: str | None = Field(default=None, min_length=1, repr=False)
    management_key: str | None = Field(default=None, min_length=1, repr=False)
    keys_file: Path | None = None  # several keys, each with rights and a quota; read again on SIGHUP
    certificate: Path | None = None  # for HTTPS, in PEM, with the certificates between it and its authority
    certificate_key: Path | None = None
    most_connections: int = Field(default=1000, ge=1)
    largest_head_bytes: int = Field(default=65_536, ge=1024)  # request line and headers
    head_timeout_s: float = Field(default=10.0, gt=0.0)  # until a connection has sent a whole head
    body_timeout_s: float = Field(default=30.0, gt=0.0)  # for a slow body, or a reply that is not read
    request_timeout_ms: float = Field(default=10_000.0, gt=0.0)
    longest_timeout_ms: float = Field(default=600_000.0, gt=0.0)  # that a client may ask for
    highest_priority: int = Field(default=1, ge=1, le=10)  # that a client may ask for; 1 is first
    late_factor: float = Field(default=2.0, ge=1.0)  # a query is given up at so many times its SLO
    largest_body_bytes: int = Field(default=64 * MIB, ge=1024)
    largest_json_bytes: int = Field(default=80 * MIB, ge=1024)  # of the memory: JSON and what is read of it
    largest_held_bytes: int = Field(default=448 * MIB, ge=1024)  # of the memory, for all requests under way
    largest_image_pixels: int = Field(default=12_500_000, ge=1)
    replicas: int | None = Field(default=None, ge=1, le=MOST_REPLICAS)  # of models that do not say it
    ray: str | None = Field(default=None, min_length=1)  # address of the Ray cluster whose nodes serve
    drain_s: float = Field(default=0.0, ge=0.0)  # after SIGTERM: not ready any more, but still answering
    drain_timeout_s: float = Field(default=10.0, ge=0.0)
    hang_timeout_s: float = Field(default=60.0, gt=0.0)  # a process that says nothing for so long is ended
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otlp_endpoint: str | None = Field(
        default=None, pattern=r"^https?://\S+$"
    )  # of an OpenTelemetry collector
    trace_sampling: float = Field(default=1.0, ge=0.0, le=1.0)  # share of requests that are traced
    log_sampling: float = Field(default=1.0, ge=0.0, le=1.0)  # share of requests that get a line, at info
    adaptation: AdaptationConfig | None = None
    models: dict[str, ModelConfig] = Field(default_factory=dict)
    pipelines: dict[str, PipelineConfig] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _whole_certificate(self) -> ServeConfig:
        if self.certificate_key is not None and self.certificate is None:
            raise ValueError("certificate_key needs its certificate; give both")
        return self

    @field_validator("hosts", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """Of the environment, as text: names with commas between."""
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value


@dataclass(frozen=True)
class Effective:
    """A configuration, and where each value came from: `port` or `models.NAME.library` to a few words."""

    config: ServeConfig
    origins: Mapping[str, str]

    def rows(self) -> list[tuple[str, str, str]]:
        """Every setting with its value and origin; keys, and what URLs have of passwords, are hidden."""
        found = []
        for name, value in _flat(self.config.model_dump(mode="json")):
            shown = "(hidden)" if name in _SECRET and value is not None else _shown(value)
            found.append((name, shown, self.origins.get(name, "default")))
        return found


def read_config(
    target: Path,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    composition: str | None = None,
) -> Effective:
    """Read the configuration of `target`: a TOML file, a pipeline file, a cache library, a folder of these.

    `overrides` (of the command line) win over `environment` (variables `GATI_SERVE_PORT` and so on), and
    these over the file. Paths in a file are relative to it. `composition` is that of the libraries of a
    folder.

    **Raises:** `ConfigError`, one line that says which setting of which file is wrong.
    """
    values, origins = _from_target(target)
    if composition is not None:
        _compose(target, values, origins, composition)
    for name, text in sorted((os.environ if environment is None else environment).items()):
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if key not in ServeConfig.model_fields or key in ("adaptation", "models", "pipelines"):
            raise ConfigError(f"no setting is called {name}; see gati serve --dry-run for their names")
        values[key] = text
        origins[key] = f"environment {name}"
    for key, value in (overrides or {}).items():
        if value is not None:
            values[key] = value
            origins[key] = f"command line --{key.removesuffix('_s').removesuffix('_file').replace('_', '-')}"
    try:
        config = ServeConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_message(target, error, origins)) from error
    for name in (*config.models, *config.pipelines):
        if not is_name(name):
            raise ConfigError(f"{target}: {name!r} cannot be a name; use letters, digits and . _ -")
    if not (config.models or config.pipelines):
        raise ConfigError(f"{target}: nothing to serve; name a cache library or a pipeline")
    return Effective(config, origins)


def validated(kind: type[M], **given: Any) -> M:
    """Settings that no file names; None stands for what was not given. Raises `ConfigError`."""
    try:
        return kind.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        # Without the cause, which may show a key.
        raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _from_target(target: Path) -> tuple[dict[str, Any], dict[str, str]]:
    if target.is_dir():
        return _from_folder(target)
    document = _toml(target)
    if "stages" in document:
        return _origins({"pipelines": {document.get("name", target.stem): {"file": target}}}, str(target))
    for table in ("models", "pipelines"):
        entries = document.get(table, {})
        for entry in entries.values() if isinstance(entries, dict) else ():
            _resolve(entry, target.parent)
    _resolve(document, target.parent)
    for entry in document.get("models", {}).values():
        if isinstance(entry, dict) and "://" not in str(entry.get("repository", "://")):
            entry["repository"] = str(target.parent.absolute() / entry["repository"])
    return _origins(document, str(target))


def _compose(target: Path, values: dict[str, Any], origins: dict[str, str], composition: str) -> None:
    """Set the composition of the libraries in a folder. Raises `ConfigError` where there is no library."""
    if not target.is_dir() or values.get("pipelines"):
        raise ConfigError(f"--composition is for a cache library; {target} says itself which it serves")
    for name, entry in values["models"].items():
        entry["composition"] = composition
        origins[f"models.{name}.composition"] = "command line --composition"


def _from_folder(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    if (folder / "manifest.json").is_file():
        return _origins({"models": {folder.resolve().name: {"library": folder}}}, str(folder))
    models = {path.parent.name: {"library": path.parent} for path in sorted(folder.glob("*/manifest.json"))}
    pipelines = {}
    for file in sorted(folder.glob("*.toml")):
        document = _toml(file)
        if "stages" in document:
            pipelines[document.get("name", file.stem)] = {"file": file}
    if pipelines:
        models = {}  # the pipelines say which compositions they want
    if not (models or pipelines):
        raise ConfigError(
            f"{folder} holds no cache library and no pipeline; give what gati explore --out wrote, "
            "or a TOML file"
        )
    return _origins({"models": models, "pipelines": pipelines}, str(folder))


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no file or folder {file}; give a cache library or a TOML file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: not readable as TOML ({error}); correct it") from error


def _resolve(entry: Any, folder: Path) -> None:
    for key in _PATHS:
        if isinstance(entry, dict) and isinstance(entry.get(key), str):
            entry[key] = folder / entry[key]


def _origins(values: dict[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, str]]:
    return values, {name: origin for name, _ in _flat(values)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return found


def _shown(value: Any) -> str:
    return "none" if value is None else without_password(str(value))


def without_password(text: str) -> str:
    """A text of which the URLs show neither who logs in nor with what."""
    return _QUERY.sub(r"\1?***", _LOGIN.sub(r"\1***@", text))


def _message(target: Path, error: ValidationError, origins: Mapping[str, str]) -> str:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    where = origins.get(name, str(target))
    reason = first["msg"].removeprefix("Value error, ")
    return f"{where}: setting '{name}': {reason[:1].lower()}{reason[1:]}"
