"""The device that explore and its workers compute on is CUDA's current one. No GPU is needed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gati.errors import BackendError
from gati.exploration import explore as explored
from gati.exploration import further, workers
from gati.exploration.devices import on_device, resolve_device
from gati.exploration.explore import explore
from gati.exploration.further import explore_more
from gati.exploration.groups import Classroom
from tests.exploration.killing import Killed
from tests.exploration.networks import write_digits

NETWORK = f"{Path(__file__).parent / 'networks.py'}:Net"


class Current:
    """Notes which device is current."""

    def __init__(self) -> None:
        self.device: object = None

    @contextmanager
    def on_device(self, device: object) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def killed_on(self, device: object) -> Callable[..., Any]:
        """A function that ends everything, on that device."""

        def kill(*given: object, **options: object) -> None:
            assert self.device == device
            raise Killed

        return kill


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Current:
    made = Current()
    for room in (explored, further, workers):
        monkeypatch.setattr(room, "on_device", made.on_device)
    return made


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:1"])
def test_devices_that_are_there_are_found(name: str, two_gpus: None) -> None:
    assert resolve_device(name) == torch.device(name)


def test_a_device_that_is_not_there_says_which_are(two_gpus: None) -> None:
    with pytest.raises(BackendError) as error:
        resolve_device("cuda:2")
    assert str(error.value) == "device 'cuda:2' is not available here: choose one from cuda:0 to cuda:1"


def test_a_gpu_is_made_the_current_one_and_a_processor_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Current()
    monkeypatch.setattr(torch.cuda, "device", made.on_device)
    with on_device(torch.device("cuda:1")):
        assert made.device == torch.device("cuda:1")
    with on_device(torch.device("cpu")):
        assert made.device is None


def test_explore_prepares_and_trains_on_its_device(
    tmp_path: Path, current: Current, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, _ = write_digits(tmp_path)
    monkeypatch.setattr(explored, "prepare", current.killed_on(torch.device("cuda:1")))
    with pytest.raises(Killed):
        explore(NETWORK, data=str(held), out=tmp_path / "out", device="cuda:1")


def test_a_further_round_trains_on_the_device_of_the_library(
    tmp_path: Path, current: Current, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = SimpleNamespace(profile=SimpleNamespace(device="cuda:1"))
    library = SimpleNamespace(directory=tmp_path, manifest=manifest)
    monkeypatch.setattr(further.Library, "open", lambda directory: library)
    monkeypatch.setattr(further, "_to_train", lambda library, number: ((), {}))
    monkeypatch.setattr(further, "_prepare", current.killed_on(torch.device("cuda:1")))
    with pytest.raises(Killed):
        explore_more(tmp_path, epochs=1)


def test_a_worker_trains_on_its_device(current: Current, monkeypatch: pytest.MonkeyPatch) -> None:
    def training(*given: object) -> object:
        assert current.device == torch.device("cpu")
        return SimpleNamespace(step=0, run=lambda due: iter(()))

    def measured(*given: object) -> list[object]:
        assert current.device == torch.device("cpu")
        return []

    monkeypatch.setattr(workers, "group_training", training)
    monkeypatch.setattr(workers, "measured_trials", measured)
    module = torch.nn.Linear(2, 2)
    classroom = Classroom(module, None, None, None, None, "logits", 2, 1, 0, torch.device("cpu"))  # type: ignore[arg-type]
    worker = workers.WorkerProcess()
    worker.start(classroom, 1, "cpu")
    task: Any = SimpleNamespace(lesson=SimpleNamespace(emphasis=None), plan=None, specifications=())
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    worker.begin(task, None, None)
    worker.measure()
    assert current.device is None
