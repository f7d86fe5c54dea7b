"""The network itself, reduced: taught, kept, resumed, trained further, refused."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gati.caches import ReducedNetwork, default_reduced, load_cache
from gati.composition.load import open_model
from gati.engine.engine import Engine
from gati.engine.exits import EngineExit
from gati.errors import VariantError
from gati.exploration.candidates import UntrainedCosts, measured_costs, specify, wanted
from gati.exploration.explore import explore
from gati.exploration.further import explore_more
from gati.exploration.library import SELECT, Library
from gati.exploration.splits import held_out
from gati.model.blocks import find_blocks
from gati.model.preprocess import Preprocessing
from gati.model.segments import trace
from gati.types import BlockProfile, Profile, TrialId
from tests.exploration.killing import Killed, KilledAfter
from tests.exploration.networks import Block, fitted_on_digits, write_digits
from tests.exploration.quick import quick_selectors

pytestmark = pytest.mark.slow

REDUCED = TrialId("input--reduced-4")


class Pooled(nn.Module):
    """Takes grey pictures of any size."""

    preprocessing = Preprocessing((0.3,), (0.4,), channels=1)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.blocks = nn.Sequential(*(Block(24) for _ in range(3)))
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.relu(self.norm(self.stem(x)))).amax((2, 3)))


class Looped(Pooled):
    """Runs one block twice, and then another."""

    def __init__(self) -> None:
        super().__init__()
        again = Block(24)
        self.blocks = nn.Sequential(again, again, Block(24))


class Flattened(Pooled):
    """Takes pictures of 8 x 8 pixels alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.relu(self.norm(self.stem(x)))).flatten(1))


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    """Networks so small cost what calls cost: here what is measured decides nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gati.exploration.candidates.lookup_at_lengths", lambda *_: 1e-3)
        patch.setattr("gati.exploration.stages.LEAST_STUDENT_STEPS", 160)
        quick_selectors(patch)
        yield


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("digits")
    held, more = write_digits(folder)
    network = fitted_on_digits(Pooled, Pooled.preprocessing, seed=0, steps=120)
    save_file(network.state_dict(), folder / "net.safetensors")
    return {
        "model": f"{__file__}:Pooled",
        "checkpoint": folder / "net.safetensors",
        "data": held,
        "train_data": more,
        "variants": ["reduced(4)"],
        "epochs": 1,
    }


@pytest.fixture(scope="module")
def library(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Library:
    return explore(**given, out=tmp_path_factory.mktemp("out"))


def agreement(library: Library, predictor: nn.Module) -> float:
    """With the base model on the inputs to select on."""
    inputs, split = held_out(library)
    rows = (split == SELECT).nonzero()[0]
    with torch.inference_mode():
        found = predictor(inputs.images(rows)).argmax(1).numpy()
    return float((found == library.base_outcomes().base_class[rows]).mean())


def test_it_learns_to_answer_as_at_full_size(library: Library, given: dict[str, Any]) -> None:
    (trial,) = library.trials
    assert trial.variant == "reduced(4)" and trial.block == "input" and trial.status == "trained"
    assert trial.images_seen and trial.lookup_ms
    taught = load_cache(library.cache_path(REDUCED)).predictor
    network = Pooled()
    network.load_state_dict(load_file(given["checkpoint"]))
    network.eval()
    untaught = nn.Sequential(nn.AvgPool2d(2), network)
    assert agreement(library, taught) > agreement(library, untaught) + 0.1
    assert agreement(library, taught) == pytest.approx(trial.agreement, abs=0.01)


def test_it_answers_in_an_engine_or_the_network_does(library: Library) -> None:
    cache = load_cache(library.cache_path(REDUCED))
    inputs, _ = held_out(library)
    x = inputs.images(range(60))
    probabilities, scores = cache(x)
    ranked = scores.sort().values
    at = 20 + int(ranked[20:40].diff().argmax())
    threshold = float(ranked[at : at + 2].mean())
    traced = open_model(library.directory).traced
    answers = Engine(traced, [EngineExit("input", cache, threshold, "inline", "reduced(4)", 0)])(x)
    whole = traced.base(x.clone()).softmax(1)
    hits = scores >= threshold
    assert [answer.exit == "input" for answer in answers] == hits.tolist()
    given = torch.stack([answer.probabilities for answer in answers])
    torch.testing.assert_close(given, torch.where(hits[:, None], probabilities, whole))


class Stage(nn.Module):
    """Begins a stage: half of the pixels a side, other channels."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(before, channels, 3, 2, 1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Staged(nn.Module):
    """Three stages of two, three and two blocks, for grey pictures of any size."""

    preprocessing = Pooled.preprocessing

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(Stage(1, 16), Block(16)),
            *(Stage(16, 24), Block(24), Block(24)),
            *(Stage(24, 32), Block(32)),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


def test_it_is_trained_where_pictures_are_large_and_there_are_stages() -> None:
    def chosen(network: nn.Module, *shape: int) -> str | None:
        return default_reduced(network.eval(), torch.zeros(1, *shape))

    assert chosen(Staged(), 1, 224, 224) == "reduced(128,2)"
    assert chosen(Staged(), 1, 480, 270) == "reduced(154,2)"
    assert chosen(Staged(), 1, 95, 300) is None and chosen(Pooled(), 1, 224, 224) is None
    assert chosen(nn.Linear(8, 2), 8) is None


def test_with_all_stages_it_is_the_network_without_some_blocks() -> None:
    torch.manual_seed(0)
    network, x = Staged().eval(), torch.randn(3, 1, 16, 16)
    found = ReducedNetwork.of(network, "reduced(8,4)", x, "logits")
    kept = nn.Sequential(*(network.blocks[place] for place in (0, 2, 4, 5)))  # one more, in the middle
    expected = network.head(kept(nn.functional.avg_pool2d(x, 2)).mean((2, 3)))
    torch.testing.assert_close(found(x), expected)
    torch.testing.assert_close(found.companion(x)(x), expected)
    assert all(type(block) is not nn.Identity for block in network.blocks) and len(network.blocks) == 7


def test_with_fewer_it_ends_there_and_keeps_nothing_of_what_follows() -> None:
    network, x = Staged().eval(), torch.randn(3, 1, 16, 16)
    found = ReducedNetwork.of(network, "reduced(8,2)", x, "probabilities")
    companion = found.companion(x)
    torch.testing.assert_close(companion(x), found(x))
    found(x).sum().backward()
    head = sum(each.numel() for each in found[1].head.parameters())
    kept = sum(each.numel() for place in (0, 2) for each in network.blocks[place].conv.parameters())
    assert sum(each.numel() for each in companion.state_dict().values()) == kept + head
    behind = [each.grad for each in found[1].network.blocks[5].parameters()]
    assert behind and all(each is None for each in behind)


def test_one_with_a_new_head_learns_and_is_the_same_for_the_same_seed(
    given: dict[str, Any], tmp_path: Path
) -> None:
    network = fitted_on_digits(Staged, Staged.preprocessing, seed=0, steps=120)
    save_file(network.state_dict(), tmp_path / "net.safetensors")
    own = {"model": f"{__file__}:Staged", "checkpoint": tmp_path / "net.safetensors"}
    found = [
        explore(**{**given, **own, "variants": ["reduced(8,2)"]}, out=tmp_path / name) for name in ("a", "b")
    ]
    taught = [load_cache(each.cache_path(TrialId("input--reduced-8-2"))).predictor for each in found]
    assert agreement(found[0], taught[0]) > 0.5
    one, other = (each.state_dict() for each in taught)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_that_uses_a_block_twice_is_kept_and_trained_further(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gati.exploration.stages.LEAST_STUDENT_STEPS", 10)
    network = fitted_on_digits(Looped, Looped.preprocessing, seed=0, steps=120)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    save_file(state, tmp_path / "net.safetensors")
    own = {"model": f"{__file__}:Looped", "checkpoint": tmp_path / "net.safetensors"}
    library = explore(**{**given, **own, "epochs": 0.1}, out=tmp_path / "library")
    assert [trial.status for trial in library.trials] == ["trained"]
    cache = load_cache(library.cache_path(REDUCED))
    inputs, _ = held_out(library)
    assert torch.isfinite(cache(inputs.images([0, 1]))[0]).all()
    explore_more(library.directory, epochs=0.1)


@pytest.mark.parametrize(("share", "expected"), [(0.4, "reduced(54,2)"), (0.5, "student(")])
def test_by_default_it_takes_a_students_place_where_it_costs_little(share: float, expected: str) -> None:
    network = Staged().eval()
    model = trace(network, torch.randn(2, 1, 96, 96), ["input", *find_blocks(network)])
    blocks = tuple(
        BlockProfile(at, name, model.block_kinds[name], model.hidden_shapes[name], 1.0, float(at))
        for at, name in enumerate(model.blocks)
    )
    profile = Profile("torch", "cpu", 1, 10.0, blocks)

    def costs(variant: str, _shape: tuple[int, ...]) -> UntrainedCosts:
        return UntrainedCosts(1000, 10.0 * share if variant.startswith("reduced") else 1.0)

    rows = specify(model, network, profile, wanted(None, None, 1), costs)
    (first,) = [row.trial for row in rows if row.trial.block == "input" and row.trial.status == "trained"]
    assert first.variant.startswith(expected)
    others = [row.trial.reason for row in rows if row.trial.block == "input" and row.trial is not first]
    assert others and all("name it with --variants" in reason for reason in others)


class Uncopyable(Pooled):
    """Holds what can be neither copied nor pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_network_that_cannot_be_copied_is_one_line() -> None:
    network = Uncopyable().eval().requires_grad_(False)
    model = trace(network, torch.randn(2, 1, 96, 96), ["input"])
    with pytest.raises(VariantError, match=r"reduced\(48\) cannot be built \(.*lock"):
        measured_costs(model, network, 1.0)("reduced(48)", (1, 96, 96))


def test_interrupted_it_goes_on_and_ends_with_the_same_weights(
    library: Library, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gati.exploration.stages._SAVE_EVERY_S", 0.0)
    with pytest.raises(Killed):
        explore(**given, out=tmp_path, progress=KilledAfter(40))
    again = explore(**given, out=tmp_path)
    expected, found = (load_file(each.cache_path(REDUCED)) for each in (library, again))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_it_is_trained_further(library: Library, tmp_path: Path) -> None:
    before = library.trials[0]
    more = explore_more(shutil.copytree(library.directory, tmp_path / "library"), epochs=2)
    names = {trial.trial_id: trial.status for trial in more.trials}
    better = TrialId(f"{REDUCED}--r2")
    assert names in ({better: "trained", REDUCED: "replaced"}, {REDUCED: "trained"})
    if better in names:
        found = load_cache(more.cache_path(better)).predictor
        assert agreement(more, found) >= (before.agreement or 0.0) - 0.02


@pytest.mark.parametrize(
    ("model", "variant", "message"),
    [
        ("Pooled", "reduced(8)", r"reduced\(8\): the network takes images of 8 pixels: name fewer, such"),
        ("Pooled", "reduced(2,3,4)", r"reduced\(2,3,4\): the network takes images of 8 pixels: name"),
        ("Pooled", "reduced(8,3)", r"reduced\(8,3\): the network has 3 distinct blocks: keep"),
        ("Pooled", "reduced(8,0)", r"reduced\(8,0\): the network has 3 distinct blocks: keep"),
        ("Pooled", "reduced", r"the images are so small, or the blocks so alike, that reduced needs"),
        ("Flattened", "reduced(4)", r"reduced\(4\): the network takes no images of 4 x 4 pixels \("),
    ],
)  # fmt: skip
def test_what_it_cannot_be_is_one_line(
    model: str, variant: str, message: str, given: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(VariantError, match=message):
        network = {"model": f"{__file__}:{model}", "variants": [variant]}
        explore(**{**given, **network, "checkpoint": None}, out=tmp_path)
