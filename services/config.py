"""The configuration of `gati serve`, with the origin of each value: file, environment or command line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gati.adaptation.settings import AdaptSettings
from gati.errors import AdaptError, ConfigError
from gati.types import NAME_RULE, is_name
from gati.variants import SCENE
from services.config_files import flat, read_target
from services.invalid import ApiKey, first_invalid, matching, no_such_setting
from services.model_settings import ModelSettings

ENVIRONMENT_PREFIX = "GATI_SERVE_"
MIB = 2**20
MOST_REPLICAS = 1000
_LEAST_VERSIONS = 3  # to follow a repository
_SECRET = ("api_key", "management_key")
_LOGIN = re.compile(r"(\w://)[^\s?]*@")
_QUERY = re.compile(r"(\w://[^\s?]*)\?\S+")
# Of variables such as GATI_SERVE_SERVICE_HOST and GATI_SERVE_PORT_8000_TCP_ADDR, after the prefix.
_SERVICE_LINK = re.compile(r"(\w+_)?(service_host|service_port(_\w+)?|port_\d+_(tcp|udp|sctp)(_\w+)?)")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
_LARGEST_PORT = 65_535
_MOST_MS = 2**31 - 1  # 24 days: services get it as a number of 32 bits
_ALSO_WITH_ADDRESS = ("library", "model", "checkpoint", "composition", "state", "records", "repository")
# Settings of a process that this server starts; a running service has its own.
_OF_PROCESS = tuple(name for name in ModelSettings.model_fields if name not in _ALSO_WITH_ADDRESS)
_OF_ADDRESS = ("secret_file", "authority")
_OF_SCALING = ("replicas_delay_ms", "replicas_cooldown_s", "replicas_idle_s")
_OF_SLEEP = ("replicas_idle_s",)
_OF_LIBRARY = ("composition", "caches")
_OF_MODEL = ("checkpoint", "size")
_OF_ADAPTATION = ("records", "repository", "adaptation_share")

M = TypeVar("M", bound=BaseModel)
_Address = Annotated[str, matching(r"(\[[^\]\s]+\]|[^:\s]+):\d{1,5}", "HOST:PORT or [IPv6]:PORT")]
_Url = Annotated[str, matching(r"https?://\S+", "an http:// or https:// URL")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(ModelSettings):
    """One model: a cache library or plain model to serve, or the address of a service that serves it."""

    caches: bool = True  # False: only the base model of the library
    address: _Address | None = None
    secret_file: Path | None = None  # the secret shared with the service at `address`
    authority: Path | None = None  # CA certificates; with them, calls to `address` use TLS
    adaptation_share: float = Field(default=1.0, gt=0.0)  # of retraining time, relative to other models
    replicas: int | None = Field(default=None, ge=1, le=MOST_REPLICAS)  # services that share the requests
    # From replicas_min to replicas_max, the fewest with which nine of ten requests wait at most the delay.
    replicas_min: int = Field(default=1, ge=0)  # 0: none while there are no requests
    replicas_max: int | None = Field(default=None, ge=1, le=MOST_REPLICAS)
    replicas_delay_ms: float = Field(default=50.0, gt=0.0)
    replicas_cooldown_s: float = Field(default=60.0, gt=0.0)  # remove one if one fewer was enough this long
    replicas_idle_s: float = Field(default=300.0, gt=0.0)  # with replicas_min = 0: idle time until all stop

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.library is not None and self.model is not None:
            raise ValueError("give a library or a model, not both")
        if self.library is None and self.model is None and self.address is None:
            raise ValueError("give a library, a model or an address")
        if self.address is not None and int(self.address.rpartition(":")[2]) > _LARGEST_PORT:
            raise ValueError(f"the port of {self.address} is too large; give one up to {_LARGEST_PORT}")
        if self.address is not None and (self.replicas is not None or self.replicas_max is not None):
            raise ValueError("an address names one service; set replicas only with a library or a model")
        if self.replicas_max is None and self.replicas_min != 1:
            raise ValueError("replicas_min needs replicas_max; give both, or replicas")
        if needless := self._needless():
            raise ValueError(needless)
        if self.replicas_max is not None and not self.replicas_min <= (self.replicas or self.replicas_min):
            raise ValueError("replicas is the number at startup; give at least replicas_min")
        if self.replicas_max is not None and max(self.replicas_min, self.replicas or 1) > self.replicas_max:
            raise ValueError("replicas and replicas_min must not be above replicas_max")
        if self.repository is not None and self.most_versions < _LEAST_VERSIONS:
            raise ValueError(
                f"most_versions is {self.most_versions}, but a repository takes {_LEAST_VERSIONS}: the first "
                "version, the one that serves, and a newer one"
            )
        if self.unguarded and self.audit_budget > 0.0:
            raise ValueError("unguarded caches are not audited; give audit_budget = 0 with unguarded = true")
        return self

    def _needless(self) -> str | None:
        """What is wrong with settings that are given but would have no effect; None without any."""
        rules = (
            (self.address is not None, _OF_PROCESS, "with an address; set it where that service is started"),
            (self.address is None, _OF_ADDRESS, "without an address; give that, or remove it"),
            (self.replicas_max is None, _OF_SCALING, "without replicas_max; give that, or remove it"),
            (self.replicas_min > 0, _OF_SLEEP, "without replicas_min = 0; give that, or remove it"),
            (self.model is not None, _OF_LIBRARY, "with a model; remove it, or give a library instead"),
            (self.model is None, _OF_MODEL, "without a model; remove it, or give a model"),
            (not self.caches, ("composition",), "with caches = false; remove one of them"),
            (
                self.address is not None and self.library is None,
                _OF_ADAPTATION,
                "with an address but no library; set it where that service is started, or give its library",
            ),
        )
        for applies, names, why in rules:
            given = [name for name in names if self._gives(name)]
            if applies and given:
                return f"{', '.join(given)} would have no effect {why}"
        return None

    def _gives(self, name: str) -> bool:
        return name in self.model_fields_set and getattr(self, name) is not None

    @property
    def served_composition(self) -> str | None:
        """The composition that the model is served with; None without caches, and for a plain model."""
        return self.composition if self.caches and self.model is None else None


class PipelineConfig(_Strict):
    """One pipeline. Models of this configuration serve its options; missing models are added."""

    file: Path
    policy: str = "dynamic"
    attainment: float = Field(default=0.95, gt=0.0, lt=1.0)
    latency_slo_ms: float | None = Field(default=None, gt=0.0)  # of queries without their own
    live: bool = True  # figures follow the traffic; False: only offline measurements count
    half_life: float = Field(default=256.0, gt=0.0)  # queries of a stage after which evidence counts half
    # One in this many queries runs the option not seen for longest, to update its figures; 0: none.
    explore_every: int = Field(default=128, ge=0)


class AdaptationConfig(_Strict):
    """The service that retrains the caches of every model with `records` and a `repository`."""

    interval_s: float = Field(default=600.0, gt=0.0)
    window_s: float = Field(default=3600.0, gt=0.0)
    window_inputs: int = 1400
    held_share: float = Field(default=0.25, gt=0.0, lt=1.0)  # of the samples, to choose settings on
    blocks: tuple[str, ...] | None = None  # where new caches are tried; default: three early blocks
    variants: tuple[str, ...] = (SCENE,)  # predictors of new caches
    look_every_s: float = Field(default=5.0, gt=0.0)
    niceness: int = Field(default=15, ge=0, le=19)  # above 0, it computes when no other program does

    @model_validator(mode="after")
    def _can_retrain(self) -> Self:
        try:
            self.of_each_model()
        except AdaptError as error:
            raise ValueError(str(error)) from None
        return self

    def of_each_model(self) -> AdaptSettings:
        """The settings of the retraining of each model."""
        return AdaptSettings(
            interval_s=self.interval_s,
            window_s=self.window_s,
            window_inputs=self.window_inputs,
            held_share=self.held_share,
            blocks=self.blocks,
            variants=self.variants,
        )


class ServeConfig(_Strict):
    """All settings of `gati serve`."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    hosts: tuple[str, ...] = ()  # additional host names that clients without a key may use
    api_key: ApiKey | None = Field(default=None, repr=False)
    management_key: ApiKey | None = Field(default=None, repr=False)
    keys_file: Path | None = None  # several keys, each with rights and a quota; SIGHUP reloads it
    certificate: Path | None = None  # for HTTPS: PEM, with the intermediate certificates
    certificate_key: Path | None = None
    most_connections: int = Field(default=1000, ge=1)
    largest_head_bytes: int = Field(default=65_536, ge=1024)  # request line and headers
    head_timeout_s: float = Field(default=10.0, gt=0.0)  # for the request line and headers
    body_timeout_s: float = Field(default=30.0, gt=0.0)  # for a slow body, or a reply that is not read
    request_timeout_ms: float = Field(default=10_000.0, gt=0.0, le=_MOST_MS)  # default of requests
    longest_timeout_ms: float = Field(default=600_000.0, gt=0.0, le=3_600_000.0)  # that a client may set
    highest_priority: int = Field(default=1, ge=1, le=10)  # that a client may set; 1 is served first
    late_factor: float = Field(default=2.0, ge=1.0)  # default timeout of a request, in multiples of its SLO
    largest_body_bytes: int = Field(default=64 * MIB, ge=1024, le=64 * MIB)  # a process takes no more
    largest_json_bytes: int = Field(default=80 * MIB, ge=1024)  # memory for JSON and its values
    largest_held_bytes: int = Field(default=448 * MIB, ge=1024)  # for requests; as much for unread replies
    largest_image_pixels: int = Field(default=12_500_000, ge=1, le=64 * MIB // 3)
    replicas: int | None = Field(default=None, ge=1, le=MOST_REPLICAS)  # of models without this setting
    ray: str | None = Field(default=None, min_length=1)  # address of the Ray cluster whose nodes serve
    drain_s: float = Field(default=0.0, ge=0.0)  # after SIGTERM: report not ready, keep answering
    drain_timeout_s: float = Field(default=10.0, ge=0.0)
    hang_timeout_s: float = Field(default=60.0, gt=0.0)  # kill a process that does not respond for this long
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otlp_endpoint: _Url | None = None  # of an OpenTelemetry collector
    trace_sampling: float = Field(default=1.0, ge=0.0, le=1.0)  # share of requests that are traced
    log_sampling: float = Field(default=1.0, ge=0.0, le=1.0)  # share of requests that are logged, at info
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
        """Split comma-separated names, the form that an environment variable has."""
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value


_TABLES: dict[str, type[BaseModel]] = {
    "adaptation": AdaptationConfig,
    "models": ModelConfig,
    "pipelines": PipelineConfig,
}


@dataclass(frozen=True)
class Effective:
    """A configuration with the origin of each value, by setting: `port`, `models.NAME.library`."""

    config: ServeConfig
    origins: Mapping[str, str]

    def rows(self) -> list[tuple[str, str, str]]:
        """Every setting with its value and origin; keys, and logins and queries in URLs, are hidden."""
        found = []
        for name, value in flat(self.config.model_dump(mode="json")):
            shown = "(hidden)" if name in _SECRET and value is not None else _shown(value)
            found.append((name, shown, self.origins.get(name, "default")))
        return found


def read_config(
    target: Path,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    composition: str | None = None,
) -> Effective:
    """Read the configuration from `target`: a TOML file, a pipeline file, a cache library, or a folder.

    A folder may contain cache libraries or pipeline files; if it has both, the pipelines are served.
    `overrides` (from the command line) take precedence over `environment` (variables such as
    `GATI_SERVE_PORT`), and these over the file. Paths in a file are relative to it. `composition` is the one
    that libraries in a folder are served with.

    **Raises:** `ConfigError`, one line that names the invalid setting and its file.
    """
    values, origins = read_target(target)
    if composition is not None:
        _set_composition(target, values, origins, composition)
    given = os.environ if environment is None else environment
    in_pod = "KUBERNETES_SERVICE_HOST" in given
    for name, text in sorted(given.items()):
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not name.startswith(ENVIRONMENT_PREFIX) or (in_pod and _is_service_link(key, text)):
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
            raise ConfigError(f"{target}: {name!r} cannot be a name; use {NAME_RULE}")
    if not (config.models or config.pipelines):
        raise ConfigError(f"{target}: nothing to serve; name a cache library or a pipeline")
    return Effective(config, origins)


def validated(kind: type[M], **given: Any) -> M:
    """Settings from keyword arguments; None means not given. Raises `ConfigError`."""
    try:
        return kind.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        invalid = first_invalid(error.errors(include_input=False))
        # `from None`: the original error may show a key.
        raise ConfigError(f"{invalid.where}: {invalid.message}") from None


def _set_composition(target: Path, values: dict[str, Any], origins: dict[str, str], composition: str) -> None:
    """Set the composition of the libraries in a folder. Raises `ConfigError` for anything else."""
    if not os.path.isdir(target) or values.get("pipelines"):
        raise ConfigError(f"--composition is for a cache library; set the compositions in {target} itself")
    for name, entry in values["models"].items():
        entry["composition"] = composition
        origins[f"models.{name}.composition"] = "command line --composition"


def _is_service_link(key: str, text: str) -> bool:
    """Whether Kubernetes has set a variable: pods get some for each Service, such as a gati-serve."""
    address = key.endswith("port") and _SERVICE_ADDRESS.match(text) is not None
    return address or _SERVICE_LINK.fullmatch(key) is not None


def _shown(value: Any) -> str:
    return "none" if value is None else without_password(str(value))


def without_password(text: str) -> str:
    """A text with the user names, passwords and queries of its URLs masked."""
    return _QUERY.sub(r"\1?***", _LOGIN.sub(r"\1***@", text))


def _message(target: Path, error: ValidationError, origins: Mapping[str, str]) -> str:
    invalid = first_invalid(error.errors(include_input=False))
    where = origins.get(invalid.where, str(target))
    reason = invalid.reason
    if invalid.kind == "extra_forbidden":
        *table, given = map(str, invalid.place)
        known: type[BaseModel] = _TABLES[table[0]] if table else ServeConfig
        reason = no_such_setting(given, known.model_fields)
    if not invalid.place:  # it is about several settings, and names them
        return f"{target}: {reason}"
    return f"{where}: setting '{invalid.where}': {reason}"
