"""Networks that return more than class scores, as those of Hugging Face do."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gati.errors import ModelError
from gati.exploration.inspect import blocks
from gati.model.adapted import Forward, adapted
from gati.model.checkpoint import state_sha256
from gati.model.hooks import collect_hidden
from gati.model.inputs import TensorInputs
from gati.model.load import LoadedModel, load_model
from gati.model.packed import fit_tensors
from gati.model.segments import trace

HERE = "tests.model.test_adapted"


class Results(OrderedDict[str, Any]):
    """As `ModelOutput` of Hugging Face: values by name, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class Named(NamedTuple):
    hidden_states: Tensor
    logits: Tensor


FORMS: dict[str, Any] = {
    "results": lambda logits, hidden: Results(logits=logits, hidden_states=hidden),
    "dict": lambda logits, hidden: {"hidden_states": hidden, "logits": logits},
    "object": lambda logits, hidden: SimpleNamespace(logits=logits),
    "named tuple": lambda logits, hidden: Named(hidden, logits),
    "tuple": lambda logits, hidden: (logits,),
    "tensor": lambda logits, hidden: logits,
}
UNCLEAR: dict[str, tuple[Any, str]] = {
    "no head": (
        lambda logits, hidden: Results(last_hidden_state=hidden, pooler_output=logits),
        "Results with last_hidden_state, pooler_output",
    ),
    "tuple of two": (lambda logits, hidden: (logits, hidden), "tuple of Tensor, Tensor"),
    "two heads": (
        lambda logits, hidden: Results(logits=(logits, logits)),
        "Results whose logits are a tuple of Tensor, Tensor",
    ),
    "nothing": (lambda logits, hidden: None, "NoneType"),
}


class Layer(nn.Module):
    """Returns a dict of its result, or a tuple, which networks of Hugging Face have done."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.first, self.second = name, nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, hidden: Tensor) -> Any:
        hidden = hidden + self.second(self.first(hidden).relu())
        return {"hidden": hidden} if self.name == "dict" else (None, hidden)


class Classifier(nn.Module):
    """Pictures of 8 x 8 pixels -> 5 classes, in one of the forms above."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.stem, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 5)
        self.layers = nn.ModuleList([Layer("dict"), Layer("tuple")])

    def scores(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.stem(pixel_values)
        for layer in self.layers:
            hidden = tuple(layer(hidden).values())[0] if layer.name == "dict" else layer(hidden)[1]
        return self.head(hidden.mean((2, 3))), hidden

    def forward(self, pixel_values: Tensor | None = None, return_dict: bool | None = None) -> Any:
        assert pixel_values is not None
        form = FORMS[self.form] if self.form in FORMS else UNCLEAR[self.form][0]
        return form(*self.scores(pixel_values))


class Reader(nn.Module):
    """Ids and mask [B, 6] -> class scores among other results."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        kept = torch.ones_like(hidden) if attention_mask is None else attention_mask.unsqueeze(2)
        return Results(logits=self.head((hidden * kept).mean(1)), hidden_states=hidden)


def halved() -> nn.Module:
    network = Reader()
    network.register_forward_hook(lambda _module, _arguments, output: Results(logits=output.logits / 2))
    return network


HALVED = halved()


def loaded_as(form: str, folder: Path) -> LoadedModel:
    file = folder / "own.py"
    file.write_text(
        f"from {HERE} import Classifier\ndef build():\n    return Classifier({form!r})\n", encoding="utf-8"
    )
    return load_model(f"{file}:build")


@pytest.mark.parametrize("form", FORMS)
def test_the_class_scores_are_found_in_what_a_network_returns(form: str, tmp_path: Path) -> None:
    module = loaded_as(form, tmp_path).module
    assert type(module) is Classifier
    x = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        expected, last = module.scores(x)
        for network in (module, pickle.loads(pickle.dumps(module))):
            assert torch.equal(network(x), expected)
        traced = trace(module, x, ["layers.0", "layers.1"])
        assert torch.equal(traced.base(x), expected)
        hidden = traced.cut(["layers.1"])[0].run(x)[0]
        assert torch.equal(hidden, last)
        with collect_hidden(module, ["layers.0", "layers.1"]) as found:
            module(x)
        assert torch.equal(found["layers.1"], last)
    assert state_sha256(module) == state_sha256(loaded_as("tensor", tmp_path).module)


@pytest.mark.parametrize("form", UNCLEAR)
def test_results_without_class_scores_are_told(form: str, tmp_path: Path) -> None:
    expected = (
        f"the network returns {UNCLEAR[form][1]}; a classifier must return one tensor [batch, classes], "
        "alone or as `logits`"
    )
    loaded_as(form, tmp_path)  # only running it tells
    with pytest.raises(ModelError) as told:
        blocks(f"{tmp_path}/own.py:build", size=(8, 8))
    assert str(told.value) == expected


NETWORK = Classifier("results").eval()


def test_the_users_own_network_is_not_changed() -> None:
    module = load_model(f"{HERE}:NETWORK").module
    x = torch.randn(2, 3, 8, 8)
    assert isinstance(NETWORK(x), Results) and torch.equal(module(x), NETWORK(x).logits)
    assert module.head.weight is NETWORK.head.weight
    load_model(f"{HERE}:NETWORK")
    assert not NETWORK._forward_hooks


class Registry(nn.Linear):
    """Keeps its subclasses by name."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, name: str) -> None:
        cls.known.append(name)


class Registered(Registry, name="registered"):
    pass


REGISTERED = Registered(4, 3)


def test_a_network_of_a_registry_is_taken_and_not_registered_again() -> None:
    module, x = load_model(f"{HERE}:REGISTERED").module, torch.randn(2, 4)
    assert isinstance(module, Registered) and Registry.known == ["registered"]
    assert torch.equal(module(x), REGISTERED(x))


class Keeping(nn.Module):
    """Reads a layer's output from where a hook and a step of its own put it."""

    def __init__(self, kept: Tensor | None) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()), nn.Linear(8, 5)
        self.other = nn.Linear(192, 5)
        self.seen, self.steps = kept, [self.first]
        self.body[1].register_forward_hook(self.keep)

    def keep(self, _module: nn.Module, _arguments: Any, output: Tensor) -> None:
        self.seen = output

    def first(self, x: Tensor) -> None:
        self.flat = self.other(x.flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        for step in (*self.steps, self.body):
            step(x)
        assert self.seen is not None
        return self.head(self.seen.mean((2, 3))) + self.flat


def keeping() -> nn.Module:
    return Keeping(None)


def keeping_another() -> nn.Module:
    return Keeping(torch.randn(1, 8, 8, 8))  # which fits any batch


def by_name(module: nn.Module) -> Forward:
    return lambda x: module(x=x)


KEEPING, KEEPING_ANOTHER = keeping(), keeping_another()


@pytest.mark.parametrize("name", ["keeping", "keeping_another", "KEEPING", "KEEPING_ANOTHER"])
@pytest.mark.parametrize("takes", ["positions", "names"])
def test_a_network_that_refers_to_itself_computes_what_it_did(name: str, takes: str) -> None:
    loaded = load_model(f"{HERE}:{name}")
    x = torch.randn(3, 3, 8, 8)
    module = loaded.module if takes == "positions" else adapted(loaded.module, by_name)
    with torch.inference_mode():
        hidden = loaded.module.body(x)
        expected = loaded.module.head(hidden.mean((2, 3))) + loaded.module.other(x.flatten(1))
        for network in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(network(x), expected)
            assert torch.equal(trace(network, x, ["body"]).base(x), expected)


def test_a_copy_of_an_adapted_network_has_weights_of_its_own_and_runs_with_them() -> None:
    module = load_model(f"{HERE}:NETWORK").module
    x = torch.randn(2, 3, 8, 8)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x)) and other.head.weight is not module.head.weight
        with torch.no_grad():
            other.head.weight.zero_()
        assert torch.equal(other(x), other.head.bias.expand(2, 5)) and not torch.equal(other(x), module(x))


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(192, 5)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return {"hidden": x, "logits": self.head(x.flatten(1))}


def graph() -> nn.Module:
    return torch.fx.symbolic_trace(Told())


@pytest.mark.parametrize("name", ["graph", "NETWORK"])
def test_copies_return_the_class_scores_too(name: str) -> None:
    module = load_model(f"{HERE}:{name}").module
    x = torch.randn(2, 3, 8, 8)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x)) and torch.equal(trace(other, x, []).base(x), module(x))


def test_a_network_is_loaded_as_it_is_and_hooks_of_its_own_run_before() -> None:
    module = load_model(f"{HERE}:halved").module
    assert type(module) is Reader and load_model(f"{HERE}:HALVED").module.words is HALVED.words
    values = np.random.default_rng(0).integers(1, 20, (4, 6))
    inputs = TensorInputs.of({"input_ids": values, "attention_mask": values % 2}, "data")
    for name in ("halved", "HALVED"):
        loaded = load_model(f"{HERE}:{name}")
        network, x = fit_tensors(loaded, inputs, "--data").module, inputs.example(3)
        expected = Reader.forward(loaded.module, **inputs.unpack(x))["logits"] / 2
        with torch.inference_mode():
            assert torch.equal(network(x), expected)
            assert torch.equal(trace(network, x, ["layers.0"]).base(x), expected)


@pytest.mark.parametrize("names", [("input_ids",), ("input_ids", "attention_mask")])
def test_a_text_network_is_cut_at_its_tokens(names: tuple[str, ...]) -> None:
    loaded = load_model(f"{HERE}:Reader")
    values = np.random.default_rng(0).integers(1, 20, (4, 6))
    inputs = TensorInputs.of({name: values if name == "input_ids" else values % 2 for name in names}, "data")
    module = fit_tensors(loaded, inputs, "--data").module
    x = inputs.example(3)
    with torch.no_grad():
        expected = loaded.module(**inputs.unpack(x))
        traced = trace(module, x, ["layers.0", "layers.1"])
        assert torch.equal(module(x), expected)
        assert torch.allclose(traced.base(x), expected, 1e-5, 1e-6)
        (hidden, *_), kept = traced.cut(["layers.1"])[0].run(x), inputs.unpack(x)
        if "attention_mask" in names:
            assert not hidden[kept["attention_mask"] == 0].any()
