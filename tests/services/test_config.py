"""The configuration of `gati serve`: sources of values, and messages for invalid ones."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from gati.errors import ConfigError
from services import serve
from services.config import AdaptationConfig, ModelConfig, ServeConfig, read_config
from services.hosted import Hosted
from services.inference.settings import InferenceSettings
from services.serve import ThisMachine, build_scheduler, with_pipeline_models
from services.supervisor import Supervised
from tests.permissions import close
from tests.waiting import LONG_S


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(folder: Path) -> None:
    file = folder / "ports.toml"
    text = 'port = 1\nhost = "h"\nlate_factor = 3\n[models.m]\nlibrary = "library"\n'
    file.write_text(text, encoding="utf-8")
    environment = {"GATI_SERVE_PORT": "2", "GATI_SERVE_LOG_LEVEL": "error"}
    found = read_config(file, {"port": 3, "host": None}, environment)
    rows = {name: (value, origin) for name, value, origin in found.rows()}
    assert rows["port"] == ("3", "command line --port")
    assert rows["log_level"] == ("error", "environment GATI_SERVE_LOG_LEVEL")
    assert rows["host"] == ("h", str(file)) and rows["late_factor"] == ("3.0", str(file))
    assert rows["drain_timeout_s"] == ("10.0", "default")
    assert found.config.models["m"].library == folder / "library"


def test_a_library_a_folder_and_a_pipeline_are_configurations(folder: Path) -> None:
    assert set(read_config(folder / "library", environment={}).config.models) == {"library"}
    pipeline = read_config(folder / "pipeline.toml", environment={}).config
    models, serving = with_pipeline_models(pipeline)
    assert set(pipeline.pipelines) == {"sides"} and set(models.models) == {"library", "library-other"}
    assert serving["sides", "axis", "other"] == "library-other"
    whole, serving = with_pipeline_models(read_config(folder / "serve.toml", environment={}).config)
    assert set(whole.models) == {"small", "other"} and serving["sides", "axis", "small"] == "small"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = 'x'\n[models.m]\nlibrary='l'", "setting 'port': input should be a valid integer"),
        ("prot = 1\n[models.m]\nlibrary='l'", "'prot': there is no such setting; did you mean 'port'?"),
        ("[model.m]\nlibrary='l'", "setting 'model': there is no such setting; did you mean 'models'?"),
        ("[models.m]\nlibrary='l'\nreplica=2", "'models.m.replica': there is no such setting; did you mean"),
        ("[models.m]\nlibrary='l'\nxyzzy=2", "setting 'models.m.xyzzy': there is no such setting"),
        ("[adaptation]\ninterval=2", "there is no such setting; did you mean 'interval_s'?"),
        (
            "[adaptation]\nwindow_inputs=120\n[models.m]\nlibrary='l'",
            "'adaptation': window_inputs is 120, must",
        ),
        (
            "[adaptation]\nheld_share=0.02\n[models.m]\nlibrary='l'",
            "must be at least 1750 with held_share 0.02",
        ),
        ("hang_timeout_s=inf\n[models.m]\nlibrary='l'", "setting 'hang_timeout_s': input should be a finite"),
        ("request_timeout_ms=3e9\n[models.m]\nlibrary='l'", "should be less than or equal to 2147483647"),
        ("[models.m]", "setting 'models.m': give a library, a model or an address"),
        ("[models.m]\nlibrary='l'\nmodel='x:y'", "give a library or a model, not both"),
        ("[models.'a b']\nlibrary='l'", "'a b' cannot be a name"),
        ("[models.m]\naddress='nowhere'", "setting 'models.m.address': give HOST:PORT"),
        ("[models.m]\nlibrary='l'\ncomposition='a b'", "'models.m.composition': a name has letters, digits"),
        ("[models.m]\nmodel='x:y'\nsize='32'", "setting 'models.m.size': give HEIGHTxWIDTH, such as"),
        ("otlp_endpoint='c:1'\n[models.m]\nlibrary='l'", "'otlp_endpoint': give an http:// or https:// URL"),
        ("[models.m]\naddress='a:1'\nreplicas=2", "an address names one service"),
        ("[models.m]\nlibrary='l'\nreplicas_min=2", "replicas_min needs replicas_max"),
        ("[models.m]\nlibrary='l'\nreplicas_min=0", "replicas_min needs replicas_max"),
        ("[models.m]\nlibrary='l'\nreplicas_max=2\nreplicas_min=3", "must not be above replicas_max"),
        ("[models.m]\nlibrary='l'\nreplicas_max=3\nreplicas_min=3\nreplicas=2", "give at least replicas_min"),
        ("[models.m]\nlibrary='l'\nreplicas=0", "setting 'models.m.replicas': input should be greater"),
        ("[[models]]\nname='m'\nlibrary='l'", "'models' must be a table with a name for each entry"),
        ("models='m'", "write [models.NAME]"),
        ("[[pipelines]]\nfile='f'\n[models.m]\nlibrary='l'", "write [pipelines.NAME]"),
        ("[models.m]\nlibrary='l'\nrepository=1", "setting 'models.m.repository': input should be a valid"),
        *(
            (
                f"[models.m]\naddress='a:1'\n{key}",
                f"setting 'models.m': {key.partition('=')[0]} would have no effect with an address; set it "
                "where that service is started",
            )
            for key in (
                "threads=2",
                "workers=2",
                "device='cuda'",
                "queue_capacity=9",
                "largest_batch=9",
                "audit_budget=0.0",
                "trials=0.1",
                "proof_s=1.0",
                "memory=true",  # the default, but given
                "places=9",
                "unguarded=true",
                "sampling=0.1",
                "records_limit_bytes=9",
                "most_versions=9",
                "spare=true",
            )
        ),
        (
            "[models.m]\naddress='a:1'\nspare=true\nthreads=2",
            "threads, spare would have no effect with an address",
        ),
        ("[models.m]\naddress='a:1'\nrecords='sqlite:///r.db'", "with an address but no library"),
        ("[models.m]\nlibrary='l'\nsecret_file='s'", "secret_file would have no effect without an address"),
        ("[models.m]\nmodel='x:y'\nauthority='s'", "authority would have no effect without an address"),
        *(
            (
                f"[models.m]\nlibrary='l'\nreplicas=2\n{key}=9",
                f"{key} would have no effect without replicas_max; give that, or remove it",
            )
            for key in ("replicas_delay_ms", "replicas_cooldown_s", "replicas_idle_s")
        ),
        ("[models.m]\nlibrary='l'\nreplicas_max=2\nreplicas_idle_s=9", "no effect without replicas_min = 0"),
        ("[models.m]\nlibrary='l'\nrepository='r'\nmost_versions=2", "but a repository takes 3: the first"),
        ("[models.m]\nmodel='x:y'\ncomposition='fast'", "composition would have no effect with a model"),
        ("[models.m]\nlibrary='l'\ncheckpoint='c'", "checkpoint would have no effect without a model"),
        ("[models.m]\nlibrary='l'\ncaches=false\ncomposition='c'", "no effect with caches = false"),
        ("certificate_key='k'\n[models.m]\nlibrary='l'", "serve.toml: certificate_key needs its certificate"),
        ("", "nothing to serve"),
        ("port =", "not readable as TOML"),
        ('[models.m]\nmodel = "a\\u0000.pt2"', "setting 'models.m.model' contains a null character"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_config(file, environment={})
    assert message in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_what_kubernetes_says_of_services_is_not_taken_for_settings(folder: Path) -> None:
    """With a Service called gati-serve, or of KubeRay, no pod of the namespace could start a server."""
    address, port = "tcp://10.0.0.11:8000", {"GATI_SERVE_PORT": "9000"}
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    for service in ("GATI_SERVE", "GATI_SERVE_SVC"):
        said = {f"{service}_SERVICE_{name}": "10.0.0.11" for name in ("HOST", "PORT", "PORT_HTTP")}
        said |= {f"{service}_PORT{name}": address for name in ("", "_8000_TCP", "_8000_TCP_ADDR")}
        assert read_config(folder / "library", environment=pod | said).config.port == 8000
        assert read_config(folder / "library", environment=pod | said | port).config.port == 9000
    mistakes = {"SUPPORT": "1", "OTLP_PORT": "http://collector:4318"}
    elsewhere = {"SERVICE_PORT": "9000", "SERVICE_HOST": "a", "GATI_PORT": address}
    for name, text in (mistakes | elsewhere).items():
        around = pod if name in mistakes else {}
        with pytest.raises(ConfigError, match=f"no setting is called GATI_SERVE_{name}"):
            read_config(folder / "library", environment=around | {f"GATI_SERVE_{name}": text})


def test_unknown_environment_and_missing_target(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no setting is called GATI_SERVE_PROT"):
        read_config(folder / "library", environment={"GATI_SERVE_PROT": "1"})
    with pytest.raises(ConfigError, match="no file or folder"):
        read_config(tmp_path / "none", environment={})
    with pytest.raises(ConfigError, match="contains no cache library and no pipeline"):
        read_config(tmp_path, environment={})


@pytest.mark.parametrize(
    ("name", "said"),
    [("", "cannot read the folder; check its permissions"), ("serve.toml", "Permission denied")],
    ids=["folder", "file"],
)
def test_a_target_that_is_closed_to_this_user(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "serve.toml").write_text("port = 1")
    close(monkeypatch, tmp_path / "home")
    target = tmp_path / "home" / name
    with pytest.raises(ConfigError, match=f"^{target}: [^\n]*{said}[^\n]*$"):
        read_config(target, environment={})


def test_what_is_shown_of_urls_has_no_password(folder: Path) -> None:
    file = folder / "urls.toml"
    lines = (
        'records = "postgresql://me:p%40ss/word@host/records?password=word"',
        'repository = "s3://key:word@bucket/versions"',
    )
    file.write_text('[models.m]\nlibrary = "library"\n' + "\n".join(lines), encoding="utf-8")
    rows = {name: value for name, value, _ in read_config(file, {}, {}).rows()}
    assert rows["models.m.records"] == "postgresql://***@host/records?***"
    assert rows["models.m.repository"] == "s3://***@bucket/versions"
    assert rows["models.m.library"] == str(folder / "library")


def test_the_composition_of_a_library_can_be_named(folder: Path) -> None:
    found = read_config(folder / "library", {}, {}, composition="other")
    assert found.config.models["library"].composition == "other"
    assert ("models.library.composition", "other", "command line --composition") in found.rows()
    for target in (folder / "serve.toml", folder / "pipeline.toml", folder):
        with pytest.raises(ConfigError, match="--composition is for a cache library"):
            read_config(target, {}, {}, composition="other")


def test_files_of_a_configuration_lie_beside_it(folder: Path) -> None:
    file = folder / "keyed.toml"
    file.write_text('keys_file = "keys.toml"\n[models.m]\nlibrary = "library"\n', encoding="utf-8")
    assert read_config(file, {}, {}).config.keys_file == folder / "keys.toml"
    rows = read_config(file, {"keys_file": Path("k"), "drain_s": 5.0}, {}).rows()
    assert ("keys_file", "k", "command line --keys") in rows
    assert ("drain_s", "5.0", "command line --drain") in rows
    with pytest.raises(ConfigError, match="certificate_key needs its certificate"):
        read_config(file, {"certificate_key": Path("k")}, {})


def test_replicas_are_of_a_model_or_of_all(folder: Path) -> None:
    file = folder / "replicas.toml"
    text = '[models.two]\nlibrary = "library"\nreplicas = 2\n[models.many]\nlibrary = "library"\n'
    file.write_text(text + '[models.far]\naddress = "far:1"\n', encoding="utf-8")
    scheduler = build_scheduler(read_config(file, {"replicas": 5}, {}).config)
    counts = {name: len(model.replicas) for name, model in scheduler.models.items()}
    assert counts == {"two": 2, "many": 5, "far": 1}


def test_a_model_that_is_scaled_begins_with_as_many_as_it_is_told(folder: Path) -> None:
    file = folder / "scaled.toml"
    bounds = 'library = "library"\nreplicas_min = 2\nreplicas_max = 4\n'
    none = bounds.replace("2", "0")
    text = f"[models.few]\n{bounds}[models.more]\n{bounds}replicas = 3\n[models.none]\n{none}"
    file.write_text(text, encoding="utf-8")
    scheduler = build_scheduler(read_config(file, {"replicas": 9}, {}).config)
    counts = {name: len(model.replicas) for name, model in scheduler.models.items()}
    assert counts == {"few": 2, "more": 3, "none": 1}


def test_a_setting_of_a_model_reaches_its_process_and_is_declared_once(tmp_path: Path) -> None:
    given = {
        "library": "l", "composition": "fast", "device": "cuda", "threads": 5, "workers": 3,
        "queue_capacity": 9, "largest_batch": 7, "audit_budget": 0.0, "trials": 0.3, "proof_s": 4.0,
        "memory": False, "places": 5,
        "unguarded": True, "state": "s", "records": "postgresql://h/r", "sampling": 0.6,
        "records_limit_bytes": 99, "repository": "s3://b/v", "most_versions": 3, "spare": True,
    }  # fmt: skip
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]
    (tmp_path / "serve.toml").write_text("\n".join(["[models.m]", *lines]), encoding="utf-8")
    told: list[InferenceSettings] = []

    class Told(ThisMachine):
        def host(self, settings: InferenceSettings) -> Hosted:
            told.append(settings)
            return super().host(settings)

    build_scheduler(read_config(tmp_path / "serve.toml", {}, {}).config, Told())
    paths = {"library": tmp_path / "l", "state": tmp_path / "s"}
    assert {name: getattr(told[0], name) for name in given} == given | paths
    both = ModelConfig.__annotations__.keys() & InferenceSettings.__annotations__.keys()
    assert both == {"replicas"}, "declared twice, with the same meaning?"  # at startup, and at most


def test_a_link_to_a_library_gives_its_own_name_and_is_followed_once(folder: Path, tmp_path: Path) -> None:
    """Each release had another name, and a process that was restarted served what the link led to by then."""
    link, told = tmp_path / "current", list[InferenceSettings]()
    link.symlink_to(folder / "library")

    class Told(ThisMachine):
        def host(self, settings: InferenceSettings) -> Hosted:
            told.append(settings)
            return super().host(settings)

    for target in (link, tmp_path):
        config = read_config(target, {}, {}).config
        assert set(config.models) == {"current"}
        build_scheduler(config, Told())
    assert [each.library for each in told] == 2 * [(folder / "library").resolve()]
    build_scheduler(config.model_copy(update={"ray": "auto"}), Told())
    assert told[-1].library == link, "on another machine the link may lead elsewhere"


@pytest.mark.parametrize("niceness", [15, 0])
def test_requests_pause_what_retrains_unless_that_need_not_give_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch, niceness: int
) -> None:
    told = dict[str, Any]()

    class Told(Supervised):
        def __init__(self, name: str, package: str, settings: Any, **options: Any) -> None:
            told[name] = settings.pausing
            super().__init__(name, package, settings, **options)

    monkeypatch.setattr(serve, "Supervised", Told)
    model = ModelConfig(library=folder / "library", records="sqlite:///r.db", repository="versions")
    config = ServeConfig(models={"m": model}, adaptation=AdaptationConfig(niceness=niceness))
    with serve._hosting(config) as hosting:
        build_scheduler(config, hosting)
        assert told["m"] == told["adaptation"]
        assert (told["m"] is not None and told["m"].is_file()) == (niceness > 0)


@pytest.mark.parametrize("name", ["gone", 300 * "n"])  # no file system has names of that length
def test_a_library_that_is_not_there_is_not_made(tmp_path: Path, name: str) -> None:
    """The list of loaded versions made a folder for its lock: what was moved there next ended up inside."""
    config = ServeConfig(models={"m": ModelConfig(library=tmp_path / name)})
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(ConfigError) as refused:
        asyncio.run(serve._serve(config, ThisMachine(), listening, print))
    assert str(refused.value).startswith(f"model 'm' cannot be served: no cache library in {tmp_path}")
    assert not list(tmp_path.iterdir())


def test_the_size_of_a_plain_model_reaches_its_process_in_the_form_of_the_configuration() -> None:
    """A service that is started by itself took two numbers instead."""
    settings = InferenceSettings(name="m", model="x:y", size="24x32")
    assert settings.height_and_width == (24, 32)
    assert InferenceSettings.model_validate_json(settings.model_dump_json()) == settings
    assert InferenceSettings.model_validate({"name": "m", "model": "x:y", "size": [24, 32]}) == settings
    assert InferenceSettings(name="m", model="x:y").height_and_width is None


def test_what_an_address_needs_or_a_pipeline_looks_for_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "far.toml"
    text = (
        '[models.far]\naddress = "far:1"\nsecret_file = "s"\nauthority = "a"\nstate = "standing"\n'
        'library = "l"\ncomposition = "fast"\nrecords = "postgresql://h/r"\nrepository = "s3://b/v"\n'
        '[models.plain]\naddress = "far:2"\nmodel = "x:y"\ncheckpoint = "c"\n'
        '[models.none]\nlibrary = "l"\nreplicas_min = 0\nreplicas_max = 2\nreplicas_idle_s = 9\n'
    )
    file.write_text(text, encoding="utf-8")
    assert set(read_config(file, {}, {}).config.models) == {"far", "plain", "none"}


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("model", "nets.py:build", "{}/nets.py:build"),
        ("model", "sub/nets.py:Nets.build", "{}/sub/nets.py:Nets.build"),
        ("model", "/nets.py:build", "/nets.py:build"),
        ("model", "net.pt2", "{}/net.pt2"),
        ("model", "bert", "{}/bert"),  # an existing folder
        ("model", "timm:resnet18", "timm:resnet18"),
        ("model", "package.module:build", "package.module:build"),
        ("records", "sqlite:///records.db", "sqlite:///{}/records.db"),
        ("records", "sqlite+pysqlite:///a/r.db?timeout=3", "sqlite+pysqlite:///{}/a/r.db?timeout=3"),
        ("records", "sqlite:////var/r.db", "sqlite:////var/r.db"),
        ("records", "sqlite:///:memory:", "sqlite:///:memory:"),
        ("records", "postgresql://h/r", "postgresql://h/r"),
        ("repository", "versions", "{}/versions"),
    ],
)
def test_what_a_file_names_is_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, given: str, expected: str
) -> None:
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    (own / "bert").mkdir(parents=True)
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    text = f'[models.m]\n{key} = "{given}"\n' + ("" if key == "model" else 'library = "l"\n')
    (own / "serve.toml").write_text(text, encoding="utf-8")
    for target in (own / "serve.toml", Path("../own/serve.toml")):
        found = read_config(target, {}, {}).config.models["m"]
        assert getattr(found, key) == expected.format(own)


def test_a_store_is_where_its_absolute_url_says(tmp_path: Path) -> None:
    folder = tmp_path / "50 % of what?"
    folder.mkdir()
    (folder / "serve.toml").write_text(
        '[models.m]\nlibrary = "l"\nrecords = "sqlite:///r.db"\n', encoding="utf-8"
    )
    url = read_config(folder / "serve.toml", {}, {}).config.models["m"].records
    assert url is not None and make_url(url).database == str(folder / "r.db")


def test_a_pipeline_finds_the_plain_models_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both files name them relative to themselves."""
    (tmp_path / "lines").mkdir()
    options = "".join(
        f'[stages.only.options.{name}]\nmodel = "{model}"\ncheckpoint = "../c.pt"\n'
        "accuracy = 0.9\nlatency_ms = 1\n"
        for name, model in (("ours", "../nets.py:build"), ("file", "net.pt2"))
    )
    (tmp_path / "lines" / "pipeline.toml").write_text(
        f'class_names = ["x", "y"]\n{options}', encoding="utf-8"
    )
    (tmp_path / "serve.toml").write_text(
        '[models.mine]\nmodel = "nets.py:build"\ncheckpoint = "c.pt"\n'
        '[pipelines.line]\nfile = "lines/pipeline.toml"\n',
        encoding="utf-8",
    )
    monkeypatch.chdir("/")
    config, serving = with_pipeline_models(read_config(tmp_path / "serve.toml", {}, {}).config)
    assert serving["line", "only", "ours"] == "mine"
    assert serving["line", "only", "file"] == "net.pt2"
    assert config.models["net.pt2"].model == str(tmp_path / "lines" / "net.pt2")


ONE_STAGE = (
    'class_names = ["x", "y"]\n[stages.only.options]\n'
    "one = {{ library = '{}', accuracy = 0.9, latency_ms = 1 }}\n"
)


@pytest.mark.parametrize(
    ("library", "name"), [("my nets", "my-nets"), ("_é", "model"), ("n" * 200, "n" * 100)]
)
def test_a_model_of_a_pipeline_has_a_valid_name_whatever_its_folder_is_called(
    tmp_path: Path, library: str, name: str
) -> None:
    """A name that cannot stand in a URL ended the server with a traceback."""
    file = tmp_path / "line.toml"
    file.write_text(ONE_STAGE.format(library), encoding="utf-8")
    scheduler = build_scheduler(read_config(file, {}, {}).config)
    assert set(scheduler.models) == {name} and set(scheduler.pipelines) == {"line"}


def test_a_configuration_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    file = tmp_path / "serve.toml"
    file.write_text('[models.m]\naddress = "a:1"\n', encoding="utf-8-sig")
    assert read_config(file, {}, {}).config.models["m"].address == "a:1"


def test_models_of_pipelines_count_towards_the_files_that_may_be_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes did not."""
    told: list[set[str]] = []

    def web_server(config: ServeConfig, app: Any) -> Any:
        told.append(set(config.models))
        raise ConfigError("no more is needed")

    monkeypatch.setattr(serve, "web_server", web_server)
    config = read_config(folder / "pipeline.toml", environment={}).config
    listening: Any = None
    with pytest.raises(ConfigError, match="no more is needed"):
        asyncio.run(serve._serve(config, ThisMachine(), listening, lambda _: None))
    assert told == [{"library", "library-other"}]


def test_two_pipelines_of_one_name_are_refused(tmp_path: Path) -> None:
    """One of them was not served."""
    for name in ("a.toml", "b.toml"):
        (tmp_path / name).write_text("name = 'line'\n" + ONE_STAGE.format("net"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"b\.toml and .*a\.toml are both called 'line'"):
        read_config(tmp_path, {}, {})


def test_an_address_has_a_port(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('[models.m]\naddress = "host:99999"', encoding="utf-8")
    with pytest.raises(ConfigError, match="the port of host:99999 is too large; give one up to 65535"):
        read_config(file, {}, {})


@pytest.mark.parametrize(
    "address", ["[::1]:9000", "[fe80::1%eth0]:9000", "127.0.0.1:9000", "far.example:9000"]
)
def test_an_address_may_be_one_of_ipv6_in_brackets(tmp_path: Path, address: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f'[models.m]\naddress = "{address}"', encoding="utf-8")
    assert read_config(file, {}, {}).config.models["m"].address == address


def gati(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gati", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, timeout=LONG_S)


@pytest.mark.slow
def test_a_dry_run_shows_everything_and_starts_nothing(folder: Path, repository: Path) -> None:
    done = gati("serve", str(folder / "serve.toml"), "--dry-run", "--port", "77", cwd=repository)
    assert done.returncode == 0 and "command line" in done.stdout and "Inference processes" in done.stdout
    assert "api_key" in done.stdout and "library other" in done.stdout.replace("\n", "")


@pytest.mark.slow
def test_a_port_that_is_taken(folder: Path, repository: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = gati("serve", str(folder / "library"), "--port", port, cwd=repository)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


@pytest.mark.slow
def test_a_plain_model_is_served_and_debug_logs_a_line_a_request(folder: Path, repository: Path) -> None:
    """A network without a cache library, by a file of its own; every request is a line at debug."""
    from tests.engine import networks
    from tests.services.running import Serving

    file = folder / "plain.toml"
    file.write_text(
        f'[models.plain]\nmodel = "{networks.__file__}:Network"\nsize = "6x6"\n'
        f'checkpoint = "{folder}/weights.safetensors"\nthreads = 1\n',
        encoding="utf-8",
    )
    tensor = {"name": "input", "shape": [1, 1, 6, 6], "datatype": "FP32", "data": [0.5] * 36}
    with Serving(file, "--log-level", "debug") as running:
        reply = running.client.post("/v2/models/plain/infer", json={"inputs": [tensor]})
        assert reply.status_code == 200, reply.text
        assert reply.json()["parameters"]["exit"] == "base" and reply.json()["model_version"] == "base"
        refused = running.client.post(
            "/v2/repository/models/plain/load", json={"parameters": {"composition": "default"}}
        )
        assert refused.status_code == 409
    lines = [line for line in running.said if '"message": "request"' in line]
    assert len(lines) == 1 and '"exits": ["base"]' in lines[0]
