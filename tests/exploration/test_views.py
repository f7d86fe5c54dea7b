"""What is shown in training: drawn from (seed, step), coming round again, sane for every kind of input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gati.exploration.augment import Augmentation, choose_augmentation
from gati.exploration.views import ViewedBatch, Viewer, Views


class Numbered:
    """Inputs [1, 6, 6] (or vectors) that say by their value which one they are."""

    def __init__(self, count: int, shape: tuple[int, ...] = (1, 6, 6)) -> None:
        self.tensor = torch.arange(count, dtype=torch.float32).view(-1, *[1] * len(shape)).expand(-1, *shape)

    def __len__(self) -> int:
        return len(self.tensor)

    def images(self, indices: np.ndarray) -> Tensor:
        return self.tensor[torch.from_numpy(indices)].clone()


def viewer(mixed: float = 0.0, rounds: int | None = None, seed: int = 0, count: int = 50) -> Viewer:
    return Viewer(Numbered(count), Views(Augmentation(), mixed, rounds), 8, seed)


@settings(max_examples=40, deadline=None)
@given(st.integers(8, 60), st.integers(1, 8), st.integers(1, 4), st.integers(0, 5))
def test_every_epoch_shows_each_batch_of_one_round_once(
    count: int, batch_size: int, rounds: int, seed: int
) -> None:
    shown = Viewer(Numbered(count), Views(rounds=rounds), batch_size, seed)
    for epoch in range(2 * rounds + 1):
        batches = [shown.batch(epoch * shown.places + position) for position in range(shown.places)]
        assert sorted(batches) == [ViewedBatch(epoch % rounds, place) for place in range(shown.places)]
        values = torch.cat([shown.show(batch).images[:, 0, 0, 0] for batch in batches])
        assert len(set(values.tolist())) == shown.places * batch_size, "no input twice in an epoch"


def test_a_round_of_a_few_batches_shows_these_again() -> None:
    shown = Viewer(Numbered(100), Views(rounds=1), 8, 0, places=3)
    whole = Viewer(Numbered(100), Views(rounds=1), 8, 0)
    assert (shown.places, whole.places) == (3, 12)
    assert {shown.batch(step) for step in range(30)} == {ViewedBatch(0, place) for place in range(3)}
    for place in range(3):
        batch = ViewedBatch(0, place)
        assert torch.equal(shown.show(batch).images, whole.show(batch).images)
    assert Viewer(Numbered(20), Views(rounds=1), 8, 0, places=5).places == 2


def test_views_that_come_round_are_the_same_in_another_order() -> None:
    shown = viewer(mixed=0.5, rounds=2)
    first = [shown.batch(step) for step in range(shown.places)]
    again = [shown.batch(step) for step in range(2 * shown.places, 3 * shown.places)]
    assert sorted(first) == sorted(again) and first != again
    for batch in first:
        assert torch.equal(shown.show(batch).images, viewer(mixed=0.5, rounds=2).show(batch).images)
        assert shown.show(batch).mixed == viewer(mixed=0.5, rounds=2).show(batch).mixed


def test_the_order_of_a_round_is_drawn_once_while_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million inputs it takes longer than many a step."""
    drawn, rng = [], np.random.default_rng

    class Counted(np.random.Generator):
        def permutation(self, x: int) -> np.ndarray:  # type: ignore[override]
            drawn.append(x)
            return super().permutation(x)

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Counted(rng(seed).bit_generator))
    shown = viewer(rounds=2)
    for step in range(2 * shown.places):
        shown.show(shown.batch(step))
    assert drawn == [50, 50]


def test_rounds_and_seeds_differ() -> None:
    same = ViewedBatch(0, 3)
    assert not torch.equal(viewer().show(same).images, viewer().show(ViewedBatch(1, 3)).images)
    assert not torch.equal(viewer().show(same).images, viewer(seed=1).show(same).images)
    assert viewer(rounds=None).batch(1000).round == 1000 // viewer().places, "without rounds none comes again"


def test_about_the_share_that_was_asked_for_is_mixed() -> None:
    shown = viewer(mixed=0.3, count=4000)
    mixed = [shown.show(ViewedBatch(0, place)).mixed for place in range(shown.places)]
    assert 0.22 < np.mean(mixed) < 0.38
    assert not any(viewer(mixed=0.0).show(ViewedBatch(0, place)).mixed for place in range(6))
    assert all(viewer(mixed=1.0).show(ViewedBatch(0, place)).mixed for place in range(6))


def test_a_mixture_is_of_two_inputs_of_the_batch_by_a_rectangle_or_by_fading() -> None:
    shown = viewer(mixed=1.0, count=800)
    kinds = set()
    for place in range(shown.places):
        order = np.random.default_rng((0, 1, 0)).permutation(800)
        owners = np.sort(order[place * 8 : place * 8 + 8]).tolist()
        for own, image in zip(owners, shown.show(ViewedBatch(0, place)).images[:, 0], strict=True):
            values = set(image.unique().tolist())
            if values == {own}:  # of an input with itself, or a rectangle of nothing
                continue
            if values <= set(owners):
                kinds.add("rectangle")
                assert len(values) <= 2
                (other,) = values - {own}
                rows, columns = (image == other).nonzero().T
                filled = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
                assert filled == len(rows), "what is pasted is a rectangle"
            else:
                kinds.add("fading")
                assert len(values) == 1 and min(owners) < image[0, 0] < max(owners)
    assert kinds == {"rectangle", "fading"}


def test_a_rectangle_covers_its_share_on_average() -> None:
    """A little less than half: rectangles are cut off at the margins."""
    shown = Viewer(Numbered(16_000, (1, 16, 16)), Views(mixed=1.0), 8, 0)
    covered = []
    for place in range(400):
        images = shown.show(ViewedBatch(0, place)).images[:, 0]
        order = np.random.default_rng((0, 1, 0)).permutation(16_000)
        owners = torch.from_numpy(np.sort(order[place * 8 : place * 8 + 8]).astype(np.float32))
        if bool((images[0].unique().numel() == 2) | (images[1].unique().numel() == 2)):
            covered.append(float((images != owners[:, None, None]).float().mean()))
    assert 0.2 < np.mean(covered) < 0.5


@pytest.mark.parametrize("shape", [(7,), (5, 3)], ids=["vectors", "tokens"])
def test_what_is_no_picture_is_faded(shape: tuple[int, ...]) -> None:
    shown = Viewer(Numbered(40, shape), Views(mixed=1.0), 8, 0)
    images = shown.show(ViewedBatch(0, 0)).images
    assert images.shape == (8, *shape) and torch.isfinite(images).all()
    assert all(len(row.unique()) == 1 for row in images)


def test_tokens_are_not_mixed() -> None:
    class Tokens(Numbered):
        def images(self, indices: np.ndarray) -> Tensor:
            return super().images(indices).long()

    shown = Viewer(Tokens(40, (5,)), Views(mixed=1.0), 8, 0).show(ViewedBatch(0, 0))
    assert not shown.mixed and shown.images.dtype == torch.int64


# Augmentation -------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(8, 40), st.integers(8, 40)),
    st.floats(0.3, 1.0),
    st.floats(0.0, 0.5),
    st.integers(0, 100),
)
def test_the_same_generator_gives_the_same_sane_views(
    shape: tuple[int, int, int], least_side: float, light: float, seed: int
) -> None:
    images = torch.randn(6, *shape, generator=torch.Generator().manual_seed(seed))
    augment = Augmentation(True, 1, least_side, light)
    first, second = (augment(images, np.random.default_rng(seed)) for _ in range(2))
    assert first.shape == images.shape and first.dtype == images.dtype
    assert torch.equal(first, second) and torch.isfinite(first).all()
    assert float(first.abs().max()) <= (1 + 4 * light) * float(images.abs().max()) + 6 * light


def test_a_crop_shows_a_part_of_the_input_and_half_of_them_stay_whole() -> None:
    slope = torch.linspace(0, 1, 32).expand(1, 32, 32).repeat(400, 1, 1, 1)
    cropped = Augmentation(least_side=0.5)(slope, np.random.default_rng(0))
    spans = cropped.amax((1, 2, 3)) - cropped.amin((1, 2, 3))
    whole = torch.isclose(cropped, slope, atol=1e-5).flatten(1).all(1)
    assert 0.4 < float(whole.float().mean()) < 0.6
    assert float(spans[~whole].min()) > 0.4 and float(spans[~whole].max()) < 1.0
    assert float(cropped.min()) >= 0 and float(cropped.max()) <= 1


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Brightness(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((1, 2, 3))
        return torch.stack([mean, -mean], 1)


class Texture(nn.Module):
    """Its class depends on single pixels' neighbours, which crops and shifts keep, and light keeps, too."""

    def forward(self, x: Tensor) -> Tensor:
        rough = (x[..., 1:] - x[..., :-1]).abs().mean((1, 2, 3)) - 0.6 * x.flatten(1).std(1)
        return torch.stack([rough, -rough], 1)


def test_light_is_not_used_where_it_changes_the_class() -> None:
    rough = noise(400, 3, 16, 16)
    images = 0.005 * noise(400, 1, 1, 1, seed=1) + rough - rough.mean((1, 2, 3), keepdim=True)
    assert choose_augmentation(Brightness(), images).light == 0
    smooth = nn.functional.avg_pool2d(noise(200, 3, 22, 22), 7, 1)
    assert choose_augmentation(Texture(), torch.cat([smooth, noise(200, 3, 16, 16)])).light > 0


def test_crops_are_not_used_where_they_change_the_class() -> None:
    class Corner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            corner = x[:, :, :1, :1].mean((1, 2, 3))
            return torch.stack([corner, -corner], 1)

    images = noise(400, 1, 32, 32)
    chosen = choose_augmentation(Corner(), images)
    assert chosen.least_side == 1.0 and chosen.shift_pixels == 0
    even = noise(400, 1, 1, 1).expand(400, 1, 16, 16)
    assert choose_augmentation(Brightness(), even).shift_pixels
