"""A network for sound and folders of recordings: every verb reads them in the same way, without a script."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file
from scipy.io import wavfile
from torch import nn
from tritonclient.http import InferenceServerClient, InferInput

import gati
from gati.cli import run
from gati.exploration import candidates, stages
from gati.exploration.library import Library
from gati.model.data import load_data
from gati.model.load import load_model
from gati.model.preprocess import Preprocessing
from gati.model.sound import LogMel
from gati.pipelines import Planner
from gati.pipelines.read import parse_pipeline
from services.inference.service import InferenceService
from services.inference.settings import InferenceSettings
from services.scheduler.models import Model
from services.scheduler.pipelines import ServedPipeline
from tests.services.engines import reply_of, served

RATE, SECONDS = 4000, 0.25
SOUND = ("--sample-rate", str(RATE), "--seconds", str(SECONDS))
HERTZ = {"high": 1400.0, "low": 250.0, "middle": 700.0}
NETWORK = """
from torch import nn
from tests.exploration.networks import Block

def build():
    stem, pooled = nn.Conv2d(1, 8, 3, stride=2), (nn.AdaptiveAvgPool2d((4, 1)), nn.Flatten())
    return nn.Sequential(stem, nn.Sequential(*(Block(8) for _ in range(3))), *pooled, nn.Linear(32, 3))
"""

PIPELINE = {
    "class_names": sorted(HERTZ),
    "stages": {
        "hear": {"options": {"tones": {"model": "own.py:build", "accuracy": 0.9, "latency_ms": [1.0]}}}
    },
}


def write_tones(folder: Path, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    folder.mkdir()
    for number in range(count):
        name, hertz = list(HERTZ.items())[number % 3]
        moments = np.arange(int(RATE * random.uniform(0.15, 0.35))) / RATE
        wave = np.sin(2 * np.pi * hertz * random.uniform(0.8, 1.25) * moments)
        noisy = 0.3 * wave + 0.05 * random.standard_normal(len(moments))
        wavfile.write(folder / f"{name}_{number}.wav", RATE, np.round(noisy * 32767).astype(np.int16))


@pytest.fixture(scope="module")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of recordings and a network that tells them apart."""
    folder = tmp_path_factory.mktemp("tones")
    for part, (name, count) in enumerate((("val", 150), ("train", 90), ("test", 30))):
        write_tones(folder / name, count, part)
    (folder / "own.py").write_text(NETWORK)
    loaded = load_model(f"{folder / 'own.py'}:build", sample_rate=RATE, seconds=SECONDS)
    data = load_data(folder / "train", loaded.preprocessing)
    inputs, labels = data.images(range(len(data))), torch.from_numpy(data.labels)
    network = loaded.module.train().requires_grad_(True)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(40):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimiser.step()
    save_file(network.state_dict(), folder / "net.safetensors")
    return folder


def command(verb: str, tones: Path, *more: str) -> list[str]:
    checkpoint = str(tones / "net.safetensors")
    return [verb, f"{tones / 'own.py'}:build", "--checkpoint", checkpoint, *more]


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "too_slow", lambda *arguments: "")
        patch.setattr(stages, "LEAST_EXIT_STEPS", 60)
        yield


@pytest.fixture(scope="module")
def library(tones: Path) -> Path:
    out = tones / "library"
    places = ("--blocks", "1.0,1.1", "--variants", "grid(16)", "--epochs", "1")
    folders = ("--data", str(tones / "val"), "--train-data", str(tones / "train"))
    assert run([*command("explore", tones, *folders, "--out", str(out)), *SOUND, *places]) == 0
    gati.compose(out, accuracy=0.6, confidence=None, backend="torch")
    return out


def test_the_library_keeps_the_front_end_and_the_names(library: Path) -> None:
    manifest = Library(library).manifest
    assert Preprocessing.from_json(manifest.preprocessing).sound == LogMel(RATE, SECONDS)
    assert manifest.class_names == ("high", "low", "middle")
    assert manifest.input_shape == (1, 40, 16)


def test_folders_are_evaluated_and_files_predicted_as_the_network_answers(library: Path, tones: Path) -> None:
    evaluation = gati.evaluate(library, tones / "test")
    assert evaluation.n == 30
    assert evaluation.base_accuracy is not None and evaluation.base_accuracy > 0.8
    paths = sorted((tones / "test").iterdir())[:4]
    answers = gati.predict(library, paths)
    preprocessing = Preprocessing.from_json(Library(library).manifest.preprocessing)
    inputs = load_data(tones / "test", preprocessing).images(range(4))
    with gati.load(library) as engine:
        assert [answer.class_name for answer in answers] == [one.class_name for one in engine(inputs)]


@pytest.mark.slow
def test_what_is_exported_says_how_its_input_is_made(library: Path, tmp_path: Path) -> None:
    gati.export(library, tmp_path / "tones.onnx")
    written = {entry.key: entry.value for entry in onnx.load(tmp_path / "tones.onnx").metadata_props}
    assert json.loads(written["preprocessing"])["sound"]["sample_rate"] == RATE
    assert run(["export", str(library), "--out", str(tmp_path / "raw.onnx"), "--raw-input"]) == 2
    assert not (tmp_path / "raw.onnx").exists()


@pytest.fixture(scope="module")
def address(library: Path) -> Iterator[str]:
    """Where a service answers for the library."""
    settings = InferenceSettings(name="tones", library=library, threads=1, workers=1, unguarded=True)
    with served(InferenceService(settings)) as address:
        yield address


def asked(address: str, method: str, path: str, **request: Any) -> httpx.Response:
    """What a scheduler in this process replies."""

    def pipelines(model: Model) -> dict[str, ServedPipeline]:
        pipeline = parse_pipeline(PIPELINE, "hearing.toml")
        return {"hearing": ServedPipeline(pipeline, Planner(pipeline), {("hear", "tones"): model}, None)}

    return reply_of("tones", address, method, path, pipelines, **request)


def sent(address: str, contents: list[bytes]) -> httpx.Response:
    """The reply to recordings, as another project's client sends them."""
    given = InferInput("recording", [len(contents)], "BYTES")
    given.set_data_from_numpy(np.array(contents, dtype=object))
    body, length = InferenceServerClient.generate_request_body([given])
    headers = {"Inference-Header-Content-Length": str(length)}
    return asked(address, "POST", "/v2/models/tones/infer", content=bytes(body), headers=headers)


def test_clients_send_what_was_recorded(address: str, library: Path, tones: Path) -> None:
    metadata = asked(address, "GET", "/v2/models/tones").json()
    assert [(each["name"], each["shape"]) for each in metadata["inputs"]] == [
        ("recording", [-1]),
        ("input", [-1, 1, 40, 16]),
    ]
    assert metadata["parameters"]["input_alternatives"] == [["recording"], ["input"]]
    assert metadata["parameters"]["sound"] == {"sample_rate": RATE, "seconds": SECONDS}
    paths = sorted((tones / "test").iterdir())[::10]
    reply = sent(address, [path.read_bytes() for path in paths])
    length = int(reply.headers["Inference-Header-Content-Length"])
    found = InferenceServerClient.parse_response_body(reply.content, header_length=length)
    answers = gati.predict(library, paths)
    assert [each.decode() for each in found.as_numpy("class_name")] == [each.class_name for each in answers]
    told = np.stack([answer.probabilities for answer in answers])
    np.testing.assert_allclose(found.as_numpy("probabilities"), told, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_query_command_sends_a_file(
    address: str, tones: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(
        method: str, url: str, *, timeout: float, verify: Any, trust_env: bool, **more: Any
    ) -> httpx.Response:
        return asked(address, method, httpx.URL(url).path, **more)

    monkeypatch.setattr(httpx, "request", request)
    assert run(["query", "tones", str(tones / "test" / "low_1.wav")]) == 0
    assert re.search(r"low_1\.wav.* low ", capsys.readouterr().out)
    assert run(["query", "hearing", str(tones / "test" / "low_1.wav")]) == 0
    assert re.search(r"hear: low .*\n.*tones \(tones, version default\)", capsys.readouterr().out)
    (tones / "fast.wav").write_bytes(wav(2 * RATE))
    for name in ("tones", "hearing"):
        assert run(["query", name, str(tones / "fast.wav")]) == 1
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1 and f"recording 0 has {2 * RATE} samples a second" in said[0]


def wav(rate: int = RATE, samples: int = 100) -> bytes:
    file = io.BytesIO()
    wavfile.write(file, rate, np.ones(samples, dtype=np.int16))
    return file.getvalue()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([b""], "recording 0 is neither WAV nor FLAC"),
        ([b"RIFF" + bytes(100)], "recording 0 is not a readable WAV"),
        ([b"fLaC" + bytes(100)], "recording 0 is damaged ("),
        ([wav(), wav(samples=0)], "recording 1 is empty"),
        ([wav(8000)], "recording 0 has 8000 samples a second and the network's front end takes 4000"),
        ([b"RIFF" + bytes(8 * 200_000)], "no samples in the first 64 chunks"),
    ],
    ids=["nothing", "broken WAV", "broken FLAC", "empty", "another rate", "many chunks"],
)
def test_bytes_that_are_no_recording_get_one_line(address: str, contents: list[bytes], message: str) -> None:
    error = sent(address, contents).json()["error"]
    assert message in error and "\n" not in error and "BytesIO" not in error


@pytest.mark.parametrize(
    ("files", "sound", "message"),
    [
        pytest.param({"a_1.wav": 8000}, SOUND, "has 8000 samples a second .* takes 4000", id="another rate"),
        pytest.param({"a_1.wav": b"RIFF"}, SOUND, "is not a readable WAV", id="broken"),
        pytest.param(
            {"a_1.wav": RATE}, (), "holds recordings; describe the network's input", id="no front end"
        ),
        pytest.param({"a.txt": b"a"}, SOUND, "no recordings", id="nothing there"),
    ],
)
def test_bad_folders_get_one_line(
    tones: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, int | bytes],
    sound: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    (tmp_path / "val").mkdir()
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / "val" / name).write_bytes(content)
        else:
            wavfile.write(tmp_path / "val" / name, content, np.ones(2 * content, dtype=np.int16))
    out = tmp_path / "library"
    folders = ("--data", str(tmp_path / "val"), "--out", str(out))
    assert run([*command("explore", tones, *folders), *sound]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert re.search(message, said[0])
