"""Padding is zero in hidden outputs, and the network itself goes on as it was."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.model.hooks import collect_hidden
from gati.model.inputs import TensorInputs
from gati.model.load import load_model
from gati.model.packed import packed
from gati.model.segments import trace
from tests.token_networks import LENGTH, VOCABULARY, sentences

BLOCKS = [f"encoder.layers.{number}" for number in range(4)]
INPUTS = TensorInputs.of(sentences(8), "data")
USERS = load_model("tests.token_networks:small").module
NETWORK = packed(USERS, INPUTS)
TRACED = trace(NETWORK, INPUTS.example(), BLOCKS)


def example(seed: int, length: int) -> torch.Tensor:
    """Packed sentences [4, 2, 16] of so many tokens, random ids at padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < length).long().expand(4, LENGTH)
    return torch.stack((ids, mask), 1)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 99), length=st.integers(1, LENGTH))
def test_hidden_outputs_end_with_the_sentence_and_answers_stay(seed: int, length: int) -> None:
    x = example(seed, length)
    with torch.inference_mode():
        expected = USERS(x[:, 0], x[:, 1])
        with collect_hidden(NETWORK, BLOCKS) as hidden:
            torch.testing.assert_close(NETWORK(x), expected)
        torch.testing.assert_close(TRACED.base(x.clone()), expected)
        first, second, last = TRACED.cut(["encoder.layers.0", "encoder.layers.2"])
        carried = first.run(x)
        for segment, block in ((second, "encoder.layers.0"), (last, "encoder.layers.2")):
            torch.testing.assert_close(carried[0], hidden[block])
            assert not carried[0][:, length:].any() and (carried[0][:, :length] != 0).any(2).all()
            carried = segment.run(*carried)
        torch.testing.assert_close(carried, expected)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 99), length=st.integers(1, LENGTH))
def test_what_stands_at_padding_changes_no_hidden_output(seed: int, length: int) -> None:
    x, other = example(seed, length), example(seed + 100, length)
    other[:, 0, :length] = x[:, 0, :length]
    with torch.inference_mode():
        first, _ = TRACED.cut(BLOCKS[1:2])
        torch.testing.assert_close(first.run(x)[0], first.run(other)[0])


def test_a_network_that_is_not_cut_does_nothing_for_caches() -> None:
    source: str = TRACED.base.source  # type: ignore[attr-defined]
    assert "logical_not" not in source
    assert not any(layer._forward_hooks for name, layer in USERS.named_modules() if name)
    assert len(USERS._forward_hooks) == 1  # for its class scores
