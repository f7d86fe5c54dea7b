"""A real `gati serve` for tests: its own process, with an inference process for each model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
import pytest

from gati.composition.composition import Composition
from gati.composition.walk import certify as walk
from gati.exploration.library import Library
from gati.pipelines.measurements import Measurements, OptionMeasurement, StageMeasurement, measurements_file
from tests.conftest import REPOSITORY
from tests.engine.served import images, make_served
from tests.waiting import LONG_S, until

CLASSES = ("north", "east", "south", "west")
LITTLE = 0.02


def assert_same_outputs(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """Two replies are equal; floats but for rounding, as rows may be computed in one batch or two."""
    for first, second in zip(one, other, strict=True):
        same = pytest.approx(second["data"], rel=1e-5) if second["datatype"] == "FP32" else second["data"]
        assert first == {**second, "data": same}


def make_folder(folder: Path) -> Path:
    """A folder to serve: one cache library with two compositions, and a pipeline of two stages on it."""
    library = make_served(folder)
    default = library / "compositions" / "default.json"
    other = library / "compositions" / "other.json"
    certify(library)
    other.write_bytes(default.read_bytes())
    (folder / "pipeline.toml").write_text(PIPELINE, encoding="utf-8")
    _measured().save(measurements_file(folder / "pipeline.toml"))
    (folder / "serve.toml").write_text(SERVE, encoding="utf-8")
    return folder


def certify(library: Path, accuracy: float = LITTLE, **changes: Any) -> Composition:
    """Certify the default composition; so little, by default, that even untrained caches keep the promise."""
    certificate = walk([(0, 1500)], accuracy, 0.05)
    path = Library(library).composition_path()
    fields = {"accuracy_target": accuracy, "confidence": 0.95, "certificate": certificate} | changes
    chosen = replace(Composition.load(path), **fields)
    chosen.save(path)
    return chosen


LARGEST_BODY_BYTES = 400_000
SERVE = f"""
late_factor = 4.0
largest_body_bytes = {LARGEST_BODY_BYTES}
largest_image_pixels = 4096
[models.small]
library = "library"
queue_capacity = 16
workers = 1
threads = 1
[models.other]
library = "library"
composition = "other"
threads = 1
[pipelines.sides]
file = "pipeline.toml"
"""

PIPELINE = """
name = "sides"
class_names = ["north", "east", "south", "west"]
edges = [{ from = "axis", to = "vertical", when = "vertical" }, { from = "axis", to = "horizontal", when = "horizontal" }]
[stages.axis.groups]
vertical = ["north", "south"]
horizontal = ["east", "west"]
[stages.axis.options]
small = { library = "library" }
other = { library = "library", composition = "other" }
[stages.vertical]
classes = ["north", "south"]
[stages.vertical.options]
small = { library = "library" }
other = { library = "library", composition = "other" }
[stages.horizontal]
classes = ["east", "west"]
[stages.horizontal.options]
small = { library = "library" }
"""  # noqa: E501


def _measured() -> Measurements:
    def option(source: str, accuracy: float, latency_ms: float) -> OptionMeasurement:
        return OptionMeasurement(source, accuracy, (latency_ms, 2 * latency_ms), {}, "torch", (), ())

    small, other = option("library default", 0.8, 1.0), option("library other", 0.9, 4.0)
    both = {"small": small, "other": other}
    return Measurements(
        "sides", "test", "0" * 64, "cpu", 1, "2026-01-01T00:00:00+00:00",
        {
            "axis": StageMeasurement(100, {"vertical": 0.5, "horizontal": 0.5}, both),
            "vertical": StageMeasurement(50, {"north": 0.5, "south": 0.5}, both),
            "horizontal": StageMeasurement(50, {"east": 0.5, "west": 0.5}, {"small": small}),
        },
    )  # fmt: skip


class Asked:
    """A server that answers at `url`; `said` is what it wrote."""

    url: str
    said: list[str]
    client: httpx.Client

    def connect(self) -> Self:
        """Open the client, once the server has a URL."""
        self.client = httpx.Client(base_url=self.url, timeout=LONG_S)
        return self

    def infer(self, model: str = "small", **parameters: Any) -> httpx.Response:
        """One request for the first image."""
        return self.client.post(f"/v2/models/{model}/infer", json=request(**parameters))


class Serving(Asked):
    """`gati serve`, or another verb that serves, as a context manager."""

    def __init__(
        self,
        target: Path,
        *options: str,
        environment: dict[str, str] | None = None,
        verb: Sequence[str] = ("serve",),
    ) -> None:
        self.said: list[str] = []
        self.url = ""
        self._announced = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gati", *verb, str(target), "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
            cwd=target.parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        if not self._announced.wait(LONG_S):
            self.process.kill()
            raise AssertionError("it did not start: " + "".join(self.said[-20:]))
        assert self.url, "".join(self.said[-20:])
        return self.connect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.stop()

    def stop(self) -> int:
        """Ask it to end, as an operator would, and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(LONG_S)
        self._reader.join(LONG_S)
        return status

    def processes(self) -> dict[str, int]:
        """Process ids of the inference processes, by model."""
        found = {}
        for line in subprocess.run(
            ["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
        ).stdout.splitlines():
            if "services.inference" in line and f" {self.process.pid} " in line:
                name = re.search(r"services\.inference - (\S+)", line)
                assert name is not None
                found[name[1]] = int(line.split()[0])
        return found

    def wait_until_ready(self) -> None:
        """Until every model answers again."""
        until(lambda: self.client.get("/v2/health/ready").status_code == 200, every_s=0.05)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if match := re.match(r"serving at (\S+)", line):
                self.url = match[1]
                self._announced.set()
        self._announced.set()


def request(count: int = 1, **parameters: Any) -> dict[str, Any]:
    """A request of the Open Inference Protocol for some images."""
    data = images(count)
    tensor = {"name": "input", "shape": list(data.shape), "datatype": "UINT8", "data": data.ravel().tolist()}
    return {"inputs": [tensor], "parameters": parameters}


def png(side: int | None = None) -> bytes:
    """The first image as a file, as it is or resized to a square."""
    import io

    from PIL import Image

    out = io.BytesIO()
    image = Image.fromarray(np.asarray(images(1)[0, ..., 0]))
    (image if side is None else image.resize((side, side))).save(out, "PNG")
    return out.getvalue()
