"""Inputs that are no pictures: arrays by name, packed to one tensor and taken apart inside the network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from gati.errors import DataError, GatiError, ModelError
from gati.model.data import load_data
from gati.model.inputs import TensorInputs
from gati.model.load import LoadedModel, load_model
from gati.model.packed import fit_tensors, fit_text, packed
from gati.model.preprocess import Preprocessing
from gati.model.text import TextTokens
from tests.token_networks import CLASSES, LENGTH, VOCABULARY, Transformer, sentences

HERE = "tests.token_networks"


def npz(folder: Path, **arrays: Any) -> Path:
    path = folder / "data.npz"
    np.savez(path, **arrays)
    return path


def network(name: str = "small") -> LoadedModel:
    return load_model(f"{HERE}:{name}")


SHAPES = st.lists(st.integers(1, 3), max_size=2).map(tuple)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_what_is_packed_comes_back(data: st.DataObject) -> None:
    kinds = data.draw(st.sampled_from([[np.float32, np.float64], [np.int64, np.bool_, np.uint8, np.int32]]))
    count, names = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    shapes = [data.draw(SHAPES) for _ in range(names)]
    shapes = [(2,)] if shapes == [()] else shapes
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    arrays: dict[str, NDArray[Any]] = {
        f"part{number}": random.integers(0, 2, (count, *shape)).astype(data.draw(st.sampled_from(kinds)))
        for number, shape in enumerate(shapes)
    }
    inputs = TensorInputs.of(arrays, "data")
    whole = torch.from_numpy(inputs.pack(arrays, "data"))
    assert (tuple(whole.shape[1:]), whole.dtype) == (inputs.shape, inputs.dtype)
    assert torch.equal(Preprocessing(tensors=inputs).from_arrays(arrays), whole)
    found = inputs.unpack(whole)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name].numpy(), array)
        assert (found[name].dtype == torch.bool) == (array.dtype == np.bool_)
    assert TensorInputs.from_json(inputs.to_json()) == inputs
    assert inputs.example(3).shape == (3, *inputs.shape)


def test_preprocessing_of_arrays_is_kept_and_that_of_images_says_nothing_of_them() -> None:
    inputs = TensorInputs.of(sentences(5), "data")
    kept = Preprocessing(tensors=inputs)
    assert Preprocessing.from_json(kept.to_json()) == kept
    assert "tensors" not in Preprocessing().to_json()
    with pytest.raises(DataError, match=r"takes input_ids int64 \[16\], attention_mask .*, not images"):
        kept(np.zeros((1, 4, 4, 3), np.uint8))
    with pytest.raises(DataError, match="the network takes no named arrays"):
        Preprocessing().from_arrays(sentences(5))
    ragged = {"input_ids": [[1, 2], [3]], "attention_mask": [[1, 1], [1]]}
    with pytest.raises(
        DataError, match=r"^the input is not numeric arrays \(ValueError.*; pad and convert it$"
    ):
        kept.from_arrays(ragged)


@pytest.mark.parametrize("mask", [np.int64, np.bool_, np.uint8])
def test_a_network_of_several_arrays_becomes_one_of_a_single_tensor(tmp_path: Path, mask: Any) -> None:
    arrays = sentences(6)
    arrays["attention_mask"] = arrays["attention_mask"].astype(mask)
    loaded = network()
    data = load_data(npz(tmp_path, **arrays, labels=np.arange(6)), loaded.preprocessing)
    assert data.tensors is not None
    fitted = fit_tensors(loaded, data.tensors, "--data")
    x = data.images(range(6))
    assert (x.dtype, tuple(x.shape)) == (torch.int64, (6, 2, LENGTH))
    with torch.inference_mode():
        expected = loaded.module(*(torch.from_numpy(array) for array in arrays.values()))
        torch.testing.assert_close(fitted.module(x), expected)
    assert list(fitted.module.state_dict()) == list(loaded.module.state_dict())
    assert type(fitted.module).__name__ == "Transformer" and type(loaded.module) is Transformer
    assert data.labels is not None and list(data.labels) == list(range(6))
    assert fitted.preprocessing.tensors is not None
    assert [part.rows for part in fitted.preprocessing.tensors.parts] == [VOCABULARY, None]


def test_a_network_of_one_array_stays_as_it_is(tmp_path: Path) -> None:
    loaded = network()
    for name in ("inputs", "input_ids"):
        ids = sentences(6)["input_ids"].astype(np.int32)
        data = load_data(npz(tmp_path, **{name: ids}), loaded.preprocessing)
        assert data.tensors is not None and not data.is_images
        assert fit_tensors(loaded, data.tensors, "--data").module is loaded.module
        np.testing.assert_array_equal(data.images([0, 3]).numpy(), ids[[0, 3]])


def test_logits_among_several_results_are_the_class_scores() -> None:
    loaded = network("answering")
    inputs = TensorInputs.of(sentences(6), "data")
    x = inputs.example(3)
    assert packed(loaded.module, inputs)(x).shape == (3, CLASSES)
    alone = TensorInputs.of({"inputs": sentences(6)["input_ids"]}, "data")
    assert packed(loaded.module, alone)(alone.example(3)).shape == (3, CLASSES)


def test_watching_the_packed_network_leaves_the_users_alone() -> None:
    loaded = network()
    inputs = TensorInputs.of(sentences(6), "data")
    watched = packed(loaded.module, inputs)
    calls: list[str] = []
    watched.register_forward_hook(lambda *_: calls.append("packed"))
    loaded.module(torch.from_numpy(sentences(2)["input_ids"]))
    watched(inputs.example())
    assert calls == ["packed"]


def test_fractions_and_whole_numbers_of_other_shapes_are_packed_flat() -> None:
    class Two(nn.Module):
        def forward(self, picture: Tensor, sound: Tensor) -> Tensor:
            return torch.stack((picture.sum((1, 2)), sound.sum(1)), 1)

    random = np.random.default_rng(0)
    arrays = {"sound": random.normal(size=(4, 5)), "picture": random.normal(size=(4, 2, 3))}
    inputs = TensorInputs.of(arrays, "data")
    x = torch.from_numpy(inputs.pack(arrays, "data"))
    assert x.shape == (4, 11)
    expected = np.stack((arrays["picture"].sum((1, 2)), arrays["sound"].sum(1)), 1)
    np.testing.assert_allclose(packed(Two(), inputs)(x).numpy(), expected, rtol=1e-4, atol=1e-5)


class Tabular(nn.Module):
    """Codes with embeddings of their own sizes, as whole numbers or next to other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Embedding(3, 4), nn.Embedding(40, 4)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        codes = inputs[:, :2].long()
        found = self.head(torch.cat((self.small(codes[:, 0]), self.large(codes[:, 1])), 1))
        return found + inputs[:, 2:].sum(1, keepdim=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("whole", [True, False])
def test_codes_of_several_sizes_in_one_array_are_inputs(tmp_path: Path, whole: bool) -> None:
    """Random values of the whole array's range have no row in the smaller embedding."""
    random = np.random.default_rng(0)
    codes = np.stack((random.integers(0, 3, 90), random.integers(0, 40, 90)), 1)
    arrays = codes if whole else np.concatenate((codes, random.normal(size=(90, 2))), 1).astype(np.float32)
    loaded = replace(load_model(f"{HERE}:small"), module=Tabular().eval())
    data = load_data(npz(tmp_path, inputs=arrays), loaded.preprocessing)
    assert data.tensors is not None
    fitted = fit_tensors(loaded, data.tensors, "--data", data.images([0, 1])).preprocessing
    assert fitted.tensors is not None
    assert Preprocessing.from_json(json.loads(json.dumps(fitted.to_json()))) == fitted
    example = fitted.tensors.example(200)
    assert loaded.module(example).isfinite().all()
    assert sorted(set(example[:, 0].tolist())) == [0, 1, 2] and example[:, 1].max() > 30
    np.testing.assert_array_equal(
        load_data(npz(tmp_path, inputs=arrays[:5]), fitted).images(range(5)), arrays[:5]
    )


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble])
def test_large_numbers_are_no_codes(kind: type[np.floating[Any]]) -> None:
    """They are all whole, and many exceed the integers: exploring ended in a ValueError of NumPy."""
    values = np.random.default_rng(0).normal(size=(50, 3))
    if kind is not np.float16:
        values[:, 0] *= 1e25
    arrays = {"inputs": values.astype(kind)}
    inputs = TensorInputs.of(arrays, "--data").with_ranges(arrays)
    assert not inputs.has_codes and inputs.example().isfinite().all()
    assert TensorInputs.from_json(json.loads(json.dumps(inputs.to_json()))) == inputs


def test_numbers_that_float32_does_not_have_are_one_line() -> None:
    """They became infinite, and the network's answers NaN."""
    with pytest.raises(
        DataError, match=r"^data: inputs holds 1\.8e\+308, which exceeds float32; give smaller"
    ):
        TensorInputs.of({"inputs": np.array([[1.0, -np.finfo(np.float64).max]])}, "data")


class Loudness(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.log().mean(2)


def test_a_network_of_positive_numbers_is_traced_on_such() -> None:
    """Normal ones made its scores NaN, and it was refused."""
    power = {"inputs": np.random.default_rng(0).uniform(0.5, 30.0, (50, 3, 4)).astype(np.float32)}
    loaded = replace(load_model(f"{HERE}:small"), module=Loudness().eval())
    inputs = TensorInputs.of(power, "--data").with_ranges(power)
    found = fit_tensors(loaded, inputs, "--data").preprocessing.tensors
    assert found is not None and found.example().min() >= 0.5
    others = fit_tensors(replace(loaded, module=nn.Flatten()), inputs, "--data").preprocessing.tensors
    assert others is not None and others.example().min() < 0.5, "those that take any keep to normal ones"


def test_a_data_set_of_dicts_is_as_good_as_a_file(tmp_path: Path) -> None:
    from_file = load_data(npz(tmp_path, **sentences(40)), Preprocessing())
    from_code = load_data(f"{HERE}:Sentences", Preprocessing())
    assert torch.equal(from_code.images(range(40)), from_file.images(range(40)))
    assert from_code.labels is not None and list(from_code.labels[:4]) == [0, 1, 2, 0]
    assert from_code.subset([1, 2]).tensors == from_code.tensors


IDS, MASK = sentences(6)["input_ids"], sentences(6)["attention_mask"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"input_ids": IDS, "attention_mask": MASK[:5]},
            "arrays differ in length (input_ids [6, 16], attention_mask [5, 16]); give one row of each",
        ),
        (
            {"input_ids": IDS + 40},
            f"input_ids holds {IDS.max() + 40}; ids run from 0 to 49, the rows of the network's embedding",
        ),
        ({"input_ids": IDS - 1}, "input_ids holds -1; ids run from 0 to 49"),
        (
            {"input_ids": np.tile(IDS, 2)},
            f"inputs are 32 long, {HERE}:small takes at most 16; cut them",
        ),
        (
            {"input_ids": IDS, "token_types": MASK},
            "Transformer takes input_ids, attention_mask, not token_types; name the arrays of the data after",
        ),
        ({"input_ids": IDS, "attention_mask": MASK * 0.5}, "integers mixed with floats"),
        (
            {"inputs": np.array(["a text"] * 6)},
            "inputs has dtype <U6; give integers, floats or booleans",
        ),
        ({"inputs": IDS[:, 0]}, "inputs has one number per input; give [N, 1] or [N, ...]"),
        ({"inputs": IDS[:0]}, "is empty; give at least a few hundred inputs"),
        ({"inputs": np.full((6, 4), np.nan)}, "inputs has NaN or infinite values"),
        ({"inputs": IDS, "labels": np.arange(5)}, "has labels of shape [5] for 6 inputs"),
        ({"inputs": np.zeros((6, 16))}, "does not take inputs float32 [16]"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "-".join(value),
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    loaded = network()
    with pytest.raises(GatiError) as refused:
        data = load_data(npz(tmp_path, **arrays), loaded.preprocessing, what="--data")
        assert data.tensors is not None
        fit_tensors(loaded, data.tensors, "--data")
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert isinstance(refused.value, (DataError, ModelError)) and refused.value.exit_status == 2


class EndsOfText(Transformer):
    """Requires as many ends of text, which have id 1, of every input of a batch, as T5 and BART do."""

    least = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        ends = (input_ids == 1).sum(1)
        if len(ends.unique()) > 1 or int(ends.min()) < self.least:
            raise ValueError("all examples must have the same number of ends")
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize("least", [0, 1])
def test_a_network_that_requires_certain_ids_is_not_said_to_take_short_texts_alone(least: int) -> None:
    """It was told the length at which random ids happened to do, and texts were cut to that."""
    arrays = {"input_ids": np.where(IDS == 1, 2, IDS), "attention_mask": MASK}
    arrays["input_ids"][:, 0] = 1
    inputs = TensorInputs.of(arrays, "--data")
    network = EndsOfText()
    network.least, network.encoder.use_nested_tensor = least, False
    loaded = replace(load_model(f"{HERE}:small"), module=network.eval(), source="mine")
    few = torch.from_numpy(inputs.pack(arrays, "--data"))[:2]
    with pytest.raises(ModelError) as refused:
        fit_tensors(loaded, inputs, "--data", few)
    assert str(refused.value).startswith(
        "mine takes the inputs of --data, but not others of the same shapes (ValueError: all examples must"
    )
    assert "wrap it so that it requires no particular values" in str(refused.value)
    text = TextTokens("", 64, path="tokenizer.json")
    given = replace(loaded, preprocessing=replace(loaded.preprocessing, text=text))
    found = fit_text(given).preprocessing.text
    assert found is not None and found.length == LENGTH


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"input_ids": IDS}, "has the arrays input_ids; the network takes input_ids, attention_mask"),
        (
            {"input_ids": IDS[:, :9], "attention_mask": MASK[:, :9]},
            "input_ids is int64 [9], the network was explored with int64 [16]; pad, truncate or convert it",
        ),
        (
            {"input_ids": IDS + 7 * (IDS.max() == IDS), "attention_mask": MASK},
            "; ids run from 0 to 49, the rows of the network's embedding: is this the network's tokenizer?",
        ),
        ({"images": np.zeros((6, 4, 4, 3), np.uint8)}, "holds images and this network takes input_ids int64"),
    ],
    ids=["one of two", "shorter", "beyond", "images"],
)
def test_later_data_must_be_like_that_of_the_exploration(
    tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    explored = TensorInputs.of({"input_ids": IDS, "attention_mask": MASK}, "data")
    fitted = fit_tensors(network(), explored, "--data")
    with pytest.raises(DataError) as refused:
        load_data(npz(tmp_path, **arrays), fitted.preprocessing, what="evaluation data")
    assert message in str(refused.value) and "\n" not in str(refused.value)
