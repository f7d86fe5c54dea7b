"""Fixtures that several rooms share."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest

# Before torch is imported anywhere, and for the processes that tests start: networks as small as those of
# tests are many times faster on one core when another program keeps the other one busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # others would be processes that import torch

import torch  # noqa: E402

from gati import cores  # noqa: E402
from gati.costs import graph  # noqa: E402
from gati.costs.disturbance import measure_steadily  # noqa: E402
from gati.model import flatten  # noqa: E402
from tests.sharing import convert_once, made_once, shared_folder, trace_once  # noqa: E402
from tests.waiting import Clock  # noqa: E402

# How long an example takes depends on what else the machine does. The same commit gets the same examples each
# time, so that a red run is about the commit; `make test-random` looks for new ones.
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.register_profile("reproducible", deadline=None, derandomize=True)
hypothesis.settings.load_profile("reproducible")

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED_DATA = REPOSITORY.parent / "shared" / "data"

DEMO_BUDGET_S = 900.0  # see `budgets_of_steps`


# Whole files go to one process or another, in this order: what takes longest must not begin last. A process
# gets its next file before it has finished the one before, so the second goes to another one than the first,
# which makes the measured demo; others that use it come when it is there, so that no one waits for it.
FIRST = (
    "tests/test_notebooks.py",
    "tests/services/test_killed_served.py",
    "tests/services/test_following.py",
    "tests/exploration/test_ray.py",
    "tests/services/test_replicated.py",
    "tests/formats/test_export.py",
    "tests/engine/test_threads.py",
    "tests/services/test_killed.py",
    "tests/test_own_pictures.py",
    "tests/exploration/test_explore.py",
    "tests/composition/test_promise_offline.py",
    "tests/exploration/test_further.py",
    "tests/exploration/test_defaults.py",
    "tests/services/test_lifecycle.py",
    "tests/adaptation/test_streams.py",
    "tests/services/test_fuzz.py",
    "tests/services/test_operating.py",
    "tests/adaptation/test_adaptation.py",
    "tests/services/test_chaos.py",
    "tests/services/test_adaptation.py",
    "tests/exploration/test_reduced.py",
    "tests/adaptation/test_recall.py",
    "tests/services/test_live.py",
    "tests/exploration/test_companions.py",
    "tests/test_cli_stream.py",
    "tests/engine/test_input_exit.py",
    "tests/services/test_places.py",
    "tests/engine/test_apart.py",
    "tests/exploration/test_itself.py",
    "tests/test_end_to_end.py",
    "tests/evaluation/test_bench.py",
    "tests/evict/engine/test_engine.py",
    "tests/test_shapes.py",
    "tests/exploration/test_recipes.py",
    "tests/exploration/test_short_memory.py",
    "tests/exploration/test_slow_networks.py",
    "tests/test_text_inputs.py",
    "tests/test_timm.py",
    "tests/engine/test_graph_backends.py",
    "tests/engine/test_backends_conform.py",
    "tests/composition/test_compose_exact.py",
    "tests/adaptation/test_retrain.py",
    "tests/services/test_v2.py",
    "tests/services/test_eviction.py",
    "tests/evict/test_guard.py",
    "tests/composition/test_further.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only slow tests are wanted, files without any need not be imported, which takes a while."""
    wanted = config.option.markexpr != "slow" or not collection_path.match("test_*.py")
    return None if wanted or _names_slow(collection_path) else True


@cache
def _names_slow(path: Path) -> bool:
    return "mark.slow" in path.read_text(encoding="utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    passed_over = {
        item.path for item in items if item.get_closest_marker("slow") and not _names_slow(item.path)
    }
    if passed_over:
        raise pytest.UsageError(f"-m slow passes over {passed_over}, which do not say pytest.mark.slow")
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(FIRST)))


class Demo(NamedTuple):
    """What a short demo left behind: its folder, what it said, and what it measured."""

    folder: Path
    said: str
    agreement: float

    @property
    def library(self) -> Path:
        return self.folder / "library"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A cache library with two untrained caches, as `explore` and `compose` leave it."""
    from tests.engine.served import make_served

    return make_served(tmp_path)


@pytest.fixture(autouse=True)
def _no_log_of_a_test_goes_on() -> Iterator[None]:
    """A server that a test starts in this process logs to the stderr of that test, which ends with it."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in [each for each in root.handlers if type(each) is logging.StreamHandler]:
        root.removeHandler(handler)


@pytest.fixture(scope="session", autouse=True)
def _no_quota() -> Iterator[None]:
    """Tests say themselves how many cores there are; their container may have the time of fewer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cores, "_GROUPS", REPOSITORY / "no control groups")
        yield


PASSES = measure_steadily.__kwdefaults__["passes"], graph._PASSES


@pytest.fixture(scope="session", autouse=True)
def _measured_once() -> Iterator[None]:
    """What other tests disturb is told, but not measured again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(measure_steadily.__kwdefaults__, "passes", 1)
        patch.setattr(graph, "_PASSES", 1)
        yield


@pytest.fixture
def measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is disturbed is measured again, as users have it."""
    monkeypatch.setitem(measure_steadily.__kwdefaults__, "passes", PASSES[0])
    monkeypatch.setattr(graph, "_PASSES", PASSES[1])


@pytest.fixture(autouse=True)
def _gradients_stay_on() -> Iterator[None]:
    """A test that leaves them off fails itself, not all those after it that train."""
    yield
    off = not torch.is_grad_enabled() or torch.is_inference_mode_enabled()
    torch.set_grad_enabled(True)
    assert not off, "this test left torch without gradients"


@pytest.fixture(scope="session", autouse=True)
def _networks_traced_and_converted_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = shared_folder(tmp_path_factory) / "converted"
        patch.setattr(torch.onnx, "export", convert_once(folder, torch.onnx.export))
        patch.setattr(flatten, "export_program", trace_once(flatten.export_program))
        yield


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """A demo run once, with less training than the real one. Slow; tests must not change it."""
    folder = made_once(shared_folder(tmp_path_factory) / "demo", _make_demo)
    evaluation = json.loads((folder / "evaluation.json").read_text())
    return Demo(folder, (folder / "said.txt").read_text(), evaluation["agreement"])


@pytest.fixture(scope="session")
def measured_demo(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The demo, with all engines but PyTorch measured to be slow.

    That is not true, but to convert the network for them takes most of a minute each time, and what notebooks
    and guides show is alike on all.
    """
    from gati.engine.backends import BACKENDS

    def make(folder: Path) -> None:
        shutil.copytree(demo.folder, folder)
        slow = {name: 1e3 for name in BACKENDS if name != "torch"}
        found = {"format": 1, "threads": torch.get_num_threads(), "base_ms": slow, "disturbed": False}
        profiles = folder / "library" / "profiles"
        profiles.mkdir(exist_ok=True)
        (profiles / "networks.json").write_text(json.dumps(found))

    return demo._replace(folder=made_once(shared_folder(tmp_path_factory) / "measured", make))


def _make_demo(folder: Path) -> None:
    import gati
    from tests.exploration.quick import quick_selectors

    said: list[str] = []
    with budgets_of_steps(), pytest.MonkeyPatch.context() as patch:
        quick_selectors(patch)
        evaluation = gati.demo(folder, epochs=6, explore_budget_s=DEMO_BUDGET_S, say=said.append)
    (folder / "said.txt").write_text("\n".join(said))
    (folder / "evaluation.json").write_text(json.dumps({"agreement": evaluation.agreement}))


@contextmanager
def budgets_of_steps() -> Iterator[None]:
    """On the clock of budgets, a step takes a second for each cache that learns, and all else no time.

    So a slow machine trains no less, only longer.
    """
    from gati.exploration.budget import Budget
    from gati.exploration.state import RunState
    from gati.exploration.train import SharedTraining

    clock, loss = Clock(), SharedTraining._loss

    def counted(training: SharedTraining, *given: Any) -> Any:
        clock.now_s += 1.0
        return loss(training, *given)

    def made(budget_s: float | None, _clock: object, began: float, state: RunState) -> Budget:
        return Budget(budget_s, clock, clock(), state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedTraining, "_loss", counted)
        patch.setattr(import_module("gati.exploration.explore"), "Budget", made)
        yield
