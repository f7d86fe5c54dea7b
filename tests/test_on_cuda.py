"""The way from `gati explore` to answers on a GPU; skipped where there is none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
from tests.engine.served import composed, exit_at
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


def composed_by_hand(library: gati.Library, backend: str) -> str:
    """A composition of two exits that answer some inputs each; `gati compose` may find that none pay."""
    exits = []
    for trial in [each for each in library.trials if each.status == "trained"][:2]:
        thresholds = sorted(p.threshold for p in library.operating_points if p.trial_id == trial.trial_id)
        made = replace(exit_at(0, thresholds[len(thresholds) // 2]), trial_id=trial.trial_id)
        exits.append(replace(made, block=trial.block, block_index=trial.block_index, variant=trial.variant))
    name = f"by-hand-{backend}"
    composition = replace(
        composed(library.manifest.checkpoint_sha256, tuple(exits)), name=name, backend=backend
    )
    composition.save(library.composition_path(name))
    return name


@pytest.fixture(scope="module")
def unseen(library: gati.Library) -> str:
    path = library.directory.parent / "unseen.npz"
    images = np.load(library.directory.parent / "more.npz")["images"][:200].astype(np.int64)
    noise = np.random.default_rng(0).integers(-8, 9, images.shape)
    np.savez(path, images=(images + noise).clip(0, 255).astype(np.uint8))
    return str(path)


def test_a_library_measured_on_the_gpu_is_composed_and_served_there(
    library: gati.Library, unseen: str
) -> None:
    assert library.manifest.profile.device.startswith("cuda")
    for backend in (*BACKENDS_ON_CUDA, "auto"):
        gati.compose(library.directory, accuracy=0.9, backend=backend, name=backend)
        measured = gati.evaluate(library.directory, unseen, composition=backend)
        assert measured.device.startswith("cuda") and measured.backend in BACKENDS_ON_CUDA
        assert measured.agreement >= 0.8


@pytest.mark.parametrize("backend", BACKENDS_ON_CUDA)
def test_what_answers_early_on_the_gpu_is_what_the_cpu_answers_early(
    library: gati.Library, backend: str
) -> None:
    name = composed_by_hand(library, backend)
    plain = composed_by_hand(library, "torch")
    with gati.load(library.directory, composition=plain, device="cpu") as engine:
        rows = engine.preprocessing(np.load(library.directory.parent / "val.npz")["images"][:300])
        wanted = [(one.exit, one.class_index) for one in engine(rows)]
    assert len({exit for exit, _ in wanted}) == 3
    with gati.load(library.directory, composition=name) as engine:
        together = [(one.exit, one.class_index) for one in engine(rows)]
        alone = [(engine(row)[0].exit, engine(row)[0].class_index) for row in rows.split(1)]
    assert together == alone
    # TF32 rounds otherwise than the CPU, so an input at a threshold may leave elsewhere
    assert sum(ours == theirs for ours, theirs in zip(alone, wanted, strict=True)) >= 0.97 * len(wanted)


def test_a_composition_is_certified_where_it_is_served(library: gati.Library, unseen: str) -> None:
    name = composed_by_hand(library, "cuda-graph")
    assert gati.certify(library.directory, unseen, composition=name, accuracy=0.5).hit_rate > 0.0


def test_a_composition_is_compared_where_it_is_served(library: gati.Library, unseen: str) -> None:
    name = composed_by_hand(library, "cuda-graph")
    found = gati.bench(library.directory, unseen, composition=name, limit=40, repetitions=1, seconds=0.05)
    assert {"base torch", "gati cuda-graph", "gati torch-compile"} <= {row.name for row in found.rows}
    assert found.machine.gpu


def test_what_is_composed_for_the_gpu_is_exported_on_the_cpu(library: gati.Library) -> None:
    name = composed_by_hand(library, "cuda-graph")
    exported = gati.export(library.directory, library.directory / "early.onnx", composition=name)
    assert len(exported.exits) == 2


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
    served = open_served(library.directory, composition=composed_by_hand(library, "cuda-graph"))
    assert served.engine.traced.device.type == "cuda"
