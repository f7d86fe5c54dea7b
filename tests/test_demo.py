"""`gati demo`: its files, what it says, and that it can be trusted to end the same way twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gati
from gati.cli.demo import train_digits, write_digits
from tests.conftest import Demo


def test_digits_are_split_without_overlap(tmp_path: Path) -> None:
    write_digits(tmp_path)
    rows = []
    for name, count in (("train", 898), ("val", 539), ("test", 360)):
        with np.load(tmp_path / f"{name}.npz") as arrays:
            images, labels = arrays["images"], arrays["labels"]
        assert (images.dtype, images.shape, images.max()) == (np.uint8, (count, 8, 8, 1), 255)
        assert set(labels) == set(range(10))
        rows += [image.tobytes() for image in images]
    assert len(rows) == 1797
    assert len(set(rows)) > 1790  # scikit-learn holds a few scans twice


def test_training_is_the_same_twice_and_leaves_the_random_state_alone(tmp_path: Path) -> None:
    import torch

    write_digits(tmp_path)
    before = torch.get_rng_state()
    train_digits(tmp_path, epochs=1)
    first = (tmp_path / "model.safetensors").read_bytes()
    train_digits(tmp_path, epochs=1)
    assert (tmp_path / "model.safetensors").read_bytes() == first
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_the_demo_ends_with_a_library_that_answers_like_the_network(demo: Demo) -> None:
    assert demo.agreement > 0.9
    library = gati.Library.open(demo.library)
    assert [block.name for block in library.manifest.blocks][0] == "input"
    assert len(library.manifest.blocks) == 10
    assert sum(trial.status == "trained" for trial in library.trials) > 9
    assert library.composition_path("default").is_file()


@pytest.mark.slow
def test_the_demo_names_files_that_are_there_and_what_to_run_next(demo: Demo) -> None:
    named = [line.split()[0] for line in demo.said.splitlines() if line.strip().startswith(str(demo.library))]
    assert len(named) == 3
    assert all(Path(name).is_file() for name in named)
    assert "gati compose" in demo.said.split("Next", 1)[1]


@pytest.mark.slow
def test_the_engine_of_the_demo_equals_the_network_where_it_misses(demo: Demo) -> None:
    """A miss costs no accuracy: what left at `base` has the network's class."""
    with gati.load(demo.library) as engine, np.load(demo.folder / "test.npz") as arrays:
        inputs = engine.preprocessing(arrays["images"][:64])
        ours, base = engine(inputs), engine.base(inputs)
    missed = [(mine, theirs) for mine, theirs in zip(ours, base, strict=True) if mine.exit == "base"]
    assert all(mine.class_index == theirs.class_index for mine, theirs in missed)
    assert len(missed) < len(ours)
