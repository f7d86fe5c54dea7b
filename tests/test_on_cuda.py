"""The way from `gati explore` to answers on a GPU; skipped where there is none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gati
from gati.composition.load import open_served
from gati.engine.backends.cuda_device import why_no_cuda
from gati.engine.concurrent import ConcurrentEngine
from gati.engine.engine import Engine
from gati.exploration import candidates, stages
from gati.types import Placement
from tests.engine.networks import moved, selective_exits, traced_network
from tests.exploration.networks import DeepNet, trained_state, write_digits
from tests.exploration.quick import quick_selectors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_no_cuda() is not None, reason=f"needs a CUDA device: {why_no_cuda()}"),
]
NET = f"{Path(__file__).parent / 'exploration' / 'networks.py'}:DeepNet"
BACKENDS_ON_CUDA = ("torch", "cuda-graph", "torch-compile")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> gati.Library:
    folder = tmp_path_factory.mktemp("cuda")
    held, more = write_digits(folder)
    save_file(trained_state(DeepNet), folder / "net.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "too_slow", lambda *_: "")
        patch.setattr(stages, "LEAST_EXIT_STEPS", 105)
        patch.setattr(stages, "LEAST_STUDENT_STEPS", 60)
        quick_selectors(patch)
        return gati.explore(
            NET,
            folder / "net.safetensors",
            data=str(held),
            train_data=str(more),
            out=folder / "library",
            variants=["student(8)", "fc(16)", "pyramid(4)"],
            epochs=3,
            device="cuda",
        )


def test_a_library_measured_on_the_gpu_is_served_there(library: gati.Library, tmp_path: Path) -> None:
    assert library.manifest.profile.device.startswith("cuda")
    images, _ = np.load(library.directory.parent / "more.npz").values()
    np.savez(tmp_path / "unseen.npz", images=images[:200])
    for backend in (*BACKENDS_ON_CUDA, "auto"):
        chosen = gati.compose(library.directory, accuracy=0.9, backend=backend, name=backend)
        measured = gati.evaluate(library.directory, str(tmp_path / "unseen.npz"), composition=backend)
        assert measured.device.startswith("cuda") and measured.backend in BACKENDS_ON_CUDA
        assert chosen.exits and measured.hit_rate > 0.0
        assert measured.agreement >= 0.8
    found = gati.certify(library.directory, str(tmp_path / "unseen.npz"), composition="torch")
    assert found.n > 0


def test_answers_of_a_gpu_do_not_depend_on_the_batch(library: gati.Library) -> None:
    data = np.load(library.directory.parent / "val.npz")["images"][:300]
    for backend in BACKENDS_ON_CUDA:
        gati.compose(library.directory, accuracy=0.9, backend=backend, name=f"batched-{backend}")
        with gati.load(library.directory, composition=f"batched-{backend}") as engine:
            assert engine.preprocessing is not None
            rows = engine.preprocessing(data)
            together = engine(rows)
            alone = [engine(row)[0] for row in rows.split(1)]
        assert [(one.exit, one.class_index) for one in together] == [
            (one.exit, one.class_index) for one in alone
        ]
        assert len({one.exit for one in alone}) > 1


def test_a_library_is_trained_on_where_it_was_explored(library: gati.Library) -> None:
    more = gati.explore_more(library.directory, budget_s=10.0)
    assert more.manifest.profile.device.startswith("cuda")


@pytest.mark.parametrize("backend", BACKENDS_ON_CUDA)
@pytest.mark.parametrize("placement", ["inline", "overlapped"])
def test_every_thread_gets_its_own_answers(backend: str, placement: Placement) -> None:
    engine = Engine(*moved("cuda", selective_exits(traced_network(), placement)), backend=backend)
    x = torch.randn(4000, 1, 6, 6, generator=torch.Generator().manual_seed(1)) * 2
    with engine:
        wanted = [engine(row)[0] for row in x.split(1)]
        with ThreadPoolExecutor(4) as clients:
            given = [found[0] for found in clients.map(engine, x.split(1))]
        with ConcurrentEngine(engine) as shared, ThreadPoolExecutor(8) as clients:
            joined = list(clients.map(shared, x.split(1)))
    expected = [(one.exit, one.class_index) for one in wanted]
    assert [(one.exit, one.class_index) for one in given] == expected
    assert [(one.exit, one.class_index) for one in joined] == expected
    assert len({exit for exit, _ in expected}) == 4


def test_a_served_library_says_where_it_runs(library: gati.Library) -> None:
    gati.compose(library.directory, accuracy=0.9, backend="cuda-graph", name="served")
    served = open_served(library.directory, composition="served")
    assert served.engine.traced.device.type == "cuda"
