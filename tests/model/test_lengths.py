"""Lengths of sequences: which one an input takes, what is measured, and when a network has several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gati.costs.graph import GraphCosts
from gati.costs.lengths import mean_costs
from gati.model.inputs import TensorInputs
from gati.model.lengths import Lengths, TracedSequences, at_lengths, length_shares, with_lengths
from gati.model.packed import packed
from gati.model.preprocess import Preprocessing
from gati.model.segments import trace
from gati.model.tensors import TensorData
from gati.model.text import bucket_lengths
from gati.types import BlockProfile, Profile
from tests.text_networks import VOCABULARY, Reader, reader

few = settings(max_examples=40, deadline=None)
LONGEST = 48


def sequences(tokens: list[int], longest: int = LONGEST) -> dict[str, np.ndarray]:
    """Ids and masks of so many tokens each, in a row of their own."""
    mask = (np.arange(longest) < np.array(tokens)[:, None]).astype(np.int64)
    ids = np.random.default_rng(sum(tokens)).integers(1, VOCABULARY, mask.shape)
    return {"input_ids": ids * mask, "attention_mask": mask}


def taken(longest: int = LONGEST) -> TensorInputs:
    return TensorInputs.of(sequences([longest, 3], longest), "test")


@given(st.integers(1, 3000))
def test_lengths_double_up_to_the_longest(longest: int) -> None:
    every = bucket_lengths(longest)
    assert every[-1] == longest and list(every) == sorted(set(every))
    assert all(later <= 2 * earlier for earlier, later in zip(every, every[1:], strict=False))


@few
@given(st.lists(st.integers(0, LONGEST), min_size=1, max_size=6))
def test_an_input_takes_the_least_length_that_holds_its_tokens(tokens: list[int]) -> None:
    lengths = Lengths(taken(), [(16, 0.5), (32, 0.25), (48, 0.25)])
    x = torch.from_numpy(taken().pack(sequences(tokens), "test"))
    assert lengths.of(x) == [next(each for each in (16, 32, 48) if each >= count) for count in tokens]


def test_examples_take_their_length_and_short_inputs_are_filled_up() -> None:
    lengths = Lengths(taken(), [(16, 0.5), (48, 0.5)])
    for length in lengths.every:
        x = lengths.example(length)
        assert lengths.of(x) == [length]
        assert torch.equal(lengths.padded(x[..., :length]), x)


def shares_of(module: nn.Module, longest: int = LONGEST) -> tuple[tuple[int, float], ...]:
    arrays = sequences([5, 16, 17, longest], longest)
    data = TensorData("test", arrays, None, None, "test")
    return length_shares(packed(module.eval(), data.tensors), data.tensors, data)


class Padded(Reader):
    """Looks at padding, too."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(input_ids)).amax(1))


class Faint(Reader):
    """Its scores are nearly equal, and padding decides."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        padding = (attention_mask == 0).float().mean(1, keepdim=True)
        scores = super().forward(input_ids, attention_mask).softmax(1)
        return 1e-3 * (scores + padding * nn.functional.one_hot(torch.tensor(0), scores.shape[1]))


def test_shares_are_counted_where_padding_is_nothing() -> None:
    assert shares_of(reader()) == ((16, 0.5), (32, 0.25), (48, 0.25))
    assert shares_of(reader(), 16) == ()
    assert shares_of(Padded()) == ()
    assert shares_of(Faint()) == (), "the network that is cut would answer otherwise, and nobody count it"


@pytest.fixture(scope="module")
def network() -> TracedSequences:
    module, shares = packed(reader().eval(), taken()), ((16, 0.5), (32, 0.25), (48, 0.25))
    preprocessing = replace(Preprocessing(), tensors=taken(), lengths=shares)
    traced = trace(module, taken().example(), ["encoder.layers.0"])
    found = with_lengths(traced, module, taken().example(), preprocessing)
    assert isinstance(found, TracedSequences)
    return found


@pytest.mark.parametrize(
    ("shares", "measured"),
    [
        ((0.5, 0.25, 0.25), {16: 0.5, 32: 0.25, 48: 0.25}),
        ((0.9, 0.02, 0.08), {16: 0.9, 48: 0.1}),
        ((0.0, 0.0, 1.0), {48: 1.0}),
        ((0.99, 0.01, 0.0), {16: 1.0}),
    ],
)
def test_rare_lengths_are_counted_with_the_next(
    network: TracedSequences, shares: tuple[float, ...], measured: dict[int, float]
) -> None:
    lengths = Lengths(taken(), tuple(zip((16, 32, 48), shares, strict=True)))
    found = at_lengths(replace(network, lengths=lengths))
    assert {each.input_shape[-1]: share for share, each in found} == pytest.approx(measured)


def test_the_network_is_the_same_at_every_length(network: TracedSequences) -> None:
    x = torch.from_numpy(taken().pack(sequences([9, 14]), "test"))
    with torch.inference_mode():
        expected = network.base(x.clone())
        for length in (16, 32, 48):
            at = network.at(length)
            assert at.hidden_shapes == {"encoder.layers.0": (length, 16)}
            torch.testing.assert_close(at.base(x[..., :length].contiguous()), expected)
    assert network.at(16) is network.at(16)


TIMES = st.tuples(st.floats(0.01, 50.0), st.floats(0.0, 1.0))


@few
@given(st.lists(TIMES, min_size=1, max_size=3), st.floats(0.05, 0.95))
def test_mean_costs_are_those_of_the_inputs(
    network: TracedSequences, times: list[tuple[float, float]], first: float
) -> None:
    shares = [1.0] if len(times) == 1 else [first, *[(1.0 - first) / (len(times) - 1)] * (len(times) - 1)]
    parts = []
    for share, (base_ms, reach) in zip(shares, times, strict=True):
        block = BlockProfile(0, "encoder.layers.0", "Layer", (16, 16), reach * base_ms, reach * base_ms)
        profile = Profile("torch", "cpu", 1, base_ms, (block,))
        parts.append((share, GraphCosts(profile, base_ms / 8, {"tokens-mean(8)": base_ms / 4})))
    costs = mean_costs(parts, network)
    found = costs.profile
    assert found.base_ms == pytest.approx(sum(share * each.profile.base_ms for share, each in parts))
    assert costs.if_ms == pytest.approx(found.base_ms / 8)
    assert costs.lookup_ms["tokens-mean(8)"] == pytest.approx(found.base_ms / 4)
    assert found.blocks[0].reach_ms <= found.base_ms * (1.0 + 1e-9)
    assert found.blocks[0].output_shape == (LONGEST, 16)
