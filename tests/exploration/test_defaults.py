"""What is trained when nobody names blocks or variants: a student, and a few exits behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import gati
from gati.errors import VariantError
from gati.exploration import candidates, stages
from gati.exploration.candidates import Specification, UntrainedCosts, for_tokens, specify, wanted
from gati.exploration.explore import explore
from gati.model.blocks import find_blocks
from gati.model.inputs import TensorInputs
from gati.model.load import load_model
from gati.model.packed import fit_tensors
from gati.model.segments import TracedModel, trace
from gati.types import BlockProfile, Profile
from tests.exploration.networks import Net, Vectors, WideNet, trained_state, write_digits
from tests.exploration.quick import quick_selectors
from tests.token_networks import sentences

NETWORKS = Path(__file__).parent / "networks.py"
BASE_MS = 10.0


def traced(network: torch.nn.Module, example: torch.Tensor) -> TracedModel:
    network = network.eval().requires_grad_(False)
    return trace(network, example, ["input", *find_blocks(network, example=example)])


def profile_of(model: TracedModel) -> Profile:
    """Every block takes the same time, and the input none."""
    count = len(model.blocks) - 1
    blocks = (
        BlockProfile(at, name, model.block_kinds[name], model.hidden_shapes[name], 1.0, BASE_MS * at / count)
        for at, name in enumerate(model.blocks)
    )
    return Profile("torch", "cpu", 1, BASE_MS, tuple(blocks))


def chosen(
    network: torch.nn.Module,
    shape: tuple[int, ...] = (1, 8, 8),
    variants: tuple[str, ...] | None = None,
    blocks: str | None = None,
    students: int = 1,
    costs: UntrainedCosts = UntrainedCosts(1000, 1.0),  # noqa: B008
) -> tuple[Specification, ...]:
    model = traced(network, torch.randn(2, *shape))
    return specify(
        model, network, profile_of(model), wanted(variants, blocks, students), lambda variant, shape: costs
    )


def trained(rows: tuple[Specification, ...]) -> list[tuple[str, str]]:
    return [(row.trial.block, row.trial.variant) for row in rows if row.trial.status == "trained"]


def test_one_student_and_exits_at_four_blocks() -> None:
    rows = chosen(WideNet())
    first, *exits = trained(rows)
    assert first[0] == "input" and first[1].startswith("student(")
    assert {variant for _, variant in exits} == {"grid(256)", "pyramid(32)", "pyramid(64)"}
    assert len({block for block, _ in exits}) == 4
    reasons = {row.trial.block: row.trial.reason for row in rows if row.trial.status == "skipped"}
    assert reasons["blocks.9"].startswith("not one of the 4 blocks that are spaced evenly in time")
    assert "name it with --variants" in reasons["input"]


def test_two_spellings_of_a_variant_are_one_trial() -> None:
    spelt = ("pyramid(32)", "pyramid( 32)", "student(8)", "student( 8 )")
    rows = chosen(Net(), variants=spelt, blocks="blocks.*")
    names = [row.trial.trial_id for row in rows]
    assert len(names) == len(set(names)) == 5
    everywhere = chosen(WideNet(), variants=("default", "pyramid( 32)"))
    assert sum(row.trial.variant == "pyramid( 32)" for row in everywhere) == 10


def test_variants_of_sequences_that_are_named_beside_the_defaults_are_trained_once() -> None:
    tensors = TensorInputs.of(sentences(8), "--data")
    network = fit_tensors(load_model("tests.token_networks:small"), tensors, "--data").module
    model = traced(network, tensors.example())
    asked = for_tokens(wanted(("default", "tokens-mean(256)"), None, 1), model, tensors)
    assert "tokens-mean(256)" in asked.defaults
    assert asked.named == ()
    rows = specify(model, network, profile_of(model), asked, lambda variant, shape: UntrainedCosts(9, 1.0))
    names = [row.trial.trial_id for row in rows]
    assert len(names) == len(set(names))


def test_a_default_for_pictures_that_is_named_for_sequences_is_trained_or_refused() -> None:
    """It went with the defaults that it is among, without a word."""
    tensors = TensorInputs.of(sentences(8), "--data")
    network = fit_tensors(load_model("tests.token_networks:small"), tensors, "--data").module
    model = traced(network, tensors.example())

    def rows(*variants: str) -> tuple[Specification, ...]:
        asked = for_tokens(wanted(variants, None, 1), model, tensors)
        return specify(model, network, profile_of(model), asked, lambda *_: UntrainedCosts(9, 1.0))

    named = [each for each in trained(rows("default", "grid(256)")) if each[1] == "grid(256)"]
    assert named == [each for each in trained(rows("grid(256)"))] != []
    for variant in ("student", "reduced"):
        with pytest.raises(VariantError, match=f"^{variant} reads floating-point inputs, .*: leave it out$"):
            rows("default", variant)


def test_more_students_where_there_is_time() -> None:
    """The narrowest come first; a wider one is as good where it takes no longer."""
    network, model = WideNet(), traced(WideNet(), torch.randn(2, 1, 8, 8))

    def students(count: int, ms_per_width: float) -> list[str]:
        def costs(variant: str, shape: tuple[int, ...]) -> UntrainedCosts:
            width = int(variant.partition("(")[2].rstrip(")")) if variant.startswith("student") else 0
            return UntrainedCosts(1000, 1.0 + width * ms_per_width)

        rows = specify(model, network, profile_of(model), wanted(None, None, count), costs)
        return [variant for block, variant in trained(rows) if block == "input"]

    widths = ["student(24)", "student(32)", "student(48)"]
    assert [students(count, 0.02) for count in (1, 2, 3)] == [widths[:1], widths[:2], widths]
    assert students(1, 0.0) == ["student(48)"]


def test_a_student_that_costs_too_much_is_left_out_and_exits_get_its_place() -> None:
    rows = chosen(WideNet(), costs=UntrainedCosts(1000, 8.0))
    assert not any(block == "input" for block, _ in trained(rows))
    assert all(
        "unless it answers more than" in row.trial.reason for row in rows if row.trial.block == "input"
    )


def test_vectors_have_students_too() -> None:
    rows = chosen(Vectors(), (64,))
    ((block, variant), *behind) = trained(rows)
    assert block == "input" and variant.startswith("student(")
    assert len({block for block, _ in behind}) == 4


def test_what_is_named_is_trained_everywhere() -> None:
    rows = chosen(Net(), variants=("fc(16)", "student(24)"))
    assert trained(rows) == [("input", "student(24)"), *((f"blocks.{n}", "fc(16)") for n in range(3))]
    assert "the rest of the network" in rows[-1].trial.reason  # behind the last block nothing is saved
    named = chosen(WideNet(), blocks="blocks.*")
    assert not any(block == "input" for block, _ in trained(named))
    assert len({block for block, _ in trained(named)}) == 8  # a lookup takes what the last two would save


def test_a_default_exit_with_large_matrices_is_skipped_with_their_size() -> None:
    class Many(Vectors):
        def __init__(self) -> None:
            super().__init__()
            wide = torch.nn.Sequential(torch.nn.Linear(64, 3000), torch.nn.ReLU(), torch.nn.Linear(3000, 64))
            self.blocks = torch.nn.Sequential(wide, *list(self.blocks)[:3])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    network = Many()
    model = traced(network, torch.randn(2, 64))
    profile = profile_of(model)
    blocks = tuple(replace(block, output_shape=(3000,)) for block in profile.blocks)
    rows = specify(
        model,
        network,
        replace(profile, blocks=blocks),
        wanted(None, "blocks.*", 1),
        lambda *_: UntrainedCosts(1, 1.0),
    )
    reasons = [
        row.trial.reason for row in rows if row.trial.variant == "grid(256)" and "MiB" in row.trial.reason
    ]
    assert reasons and reasons[0].startswith("its weights take 5.9 MiB, and the default limit is 4.0 MiB")


@pytest.mark.slow
def test_defaults_end_with_a_library_from_which_compose_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "too_slow", lambda *_: "")
    monkeypatch.setattr(candidates, "too_dear", lambda *_: "")
    monkeypatch.setattr(stages, "LEAST_EXIT_STEPS", 15)
    monkeypatch.setattr(stages, "LEAST_STUDENT_STEPS", 40)
    monkeypatch.setattr("gati.exploration.itself.BACKENDS", {})  # none whose lookups need the network itself
    quick_selectors(monkeypatch)
    held, more = write_digits(tmp_path)
    save_file(trained_state(WideNet), tmp_path / "net.safetensors")
    library = explore(
        f"{NETWORKS}:WideNet", tmp_path / "net.safetensors", data=str(held), train_data=str(more),
        out=tmp_path / "out", epochs=0.1,
    )  # fmt: skip
    done = [trial for trial in library.trials if trial.status == "trained"]
    assert sum(trial.block == "input" for trial in done) == 2
    assert len({trial.block for trial in done}) == 5
    assert all(library.training_path(trial.trial_id).is_file() for trial in done)

    def at(share: float, exits_ms: float) -> str:
        """Where inputs leave when a student takes that share of the network's time."""
        base_ms = library.manifest.profile.base_ms
        rows = [
            replace(each, lookup_ms=share * base_ms if each.block == "input" else exits_ms) for each in done
        ]
        library.write_trials(rows, list(library.operating_points))
        composition = gati.compose(
            library.directory, accuracy=0.9, backend="torch", placement="inline", slowdown=None
        )
        return composition.exits[0].block if composition.exits else "nowhere"

    assert at(0.02, exits_ms=1e6) == "input"
    assert at(0.99, exits_ms=1e-4).startswith("blocks.")
    assert at(2.0, exits_ms=1e6) == "nowhere"
