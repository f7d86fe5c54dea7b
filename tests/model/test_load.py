"""Every form of MODEL, and one line for everything that can go wrong with it."""

import copy
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from gati import zoo
from gati.errors import CheckpointError, ModelError
from gati.model import source
from gati.model.data import load_data
from gati.model.load import load_model
from gati.model.preprocess import Preprocessing
from gati.model.published import timm_recipe
from gati.model.sound import LogMel
from gati.model.usable import frozen
from tests.model import user_code
from tests.permissions import close

HERE = "tests.model.user_code"
FILE = Path(__file__).with_name("user_code.py")
SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real checkpoints in ../shared/data")


def error_of(source: str, checkpoint: Path | None = None, **flags: object) -> str:
    with pytest.raises(ModelError) as error:
        load_model(source, checkpoint, **flags)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["own.py:build", "net.pt2", "classifier"])
def test_a_network_in_a_folder_that_is_closed_to_this_user_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "home" / name
    close(monkeypatch, tmp_path / "home")
    assert error_of(str(inside)) == f"model: cannot read {inside} (Permission denied); check its permissions"


@pytest.mark.parametrize("end", ["", ".pt2", ".py:build", ":build"])
def test_nothing_has_a_name_that_is_too_long(end: str) -> None:
    assert "check its permissions" not in error_of("long" * 100 + end)


@pytest.mark.parametrize("name", ["tiny", "FACTORY"])
def test_a_callable_of_a_module_is_loaded_ready_to_use(name: str) -> None:
    loaded = load_model(f"{HERE}:{name}")
    assert not loaded.module.training
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())
    assert loaded.preprocessing == Preprocessing()
    assert (loaded.checkpoint_path, loaded.class_names, loaded.note) == (None, None, "")


def test_a_callable_of_a_file_is_loaded_and_its_folder_goes_last(tmp_path: Path) -> None:
    shutil.copy(FILE, tmp_path / "mine.py")
    loaded = load_model(f"{tmp_path / 'mine.py'}:grey")
    assert sys.path[-1] == str(tmp_path)
    assert loaded.preprocessing == Preprocessing((0.0,), (1.0,), channels=1)


def test_a_file_is_run_as_it_is_now_however_fast_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytecode kept from before would count as current: size and time are the same."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "changing.py"
    for channels in (16, 32):
        file.write_text(f"from torch import nn\ndef net():\n    return nn.Linear({channels}, 4)\n")
        os.utime(file, (1e9, 1e9))
        linear = load_model(f"{file}:net").module
        assert isinstance(linear, nn.Linear) and linear.in_features == channels
    assert not (tmp_path / "__pycache__").exists()


def test_a_file_that_registers_something_may_be_read_again(tmp_path: Path) -> None:
    """As with `register_model` of torchvision, which takes a name only once."""
    (tmp_path / "known_networks.py").write_text("names = []\n")
    file = tmp_path / "registers.py"
    text = (
        "from torch import nn\nfrom known_networks import names\n"
        "if 'net' in names:\n    raise ValueError('net is registered')\n"
        "names.append('net')\ndef net():\n    return nn.Linear({}, 2)\n"
    )
    file.write_text(text.format(4))
    first, second = (load_model(f"{file}:net").module for _ in range(2))
    assert first is not second
    file.write_text(text.format(8))
    assert "(ValueError: net is registered); fix that file" in error_of(f"{file}:net")


def test_a_file_that_fails_for_another_reason_is_not_replaced_by_its_first_run(tmp_path: Path) -> None:
    """It would have what a data file next to it said before."""
    settings, file = tmp_path / "settings.json", tmp_path / "reads.py"
    file.write_text(
        "import json\nfrom torch import nn\n"
        f"size = json.load(open({str(settings)!r}))\ndef net():\n    return nn.Linear(size, 2)\n"
    )
    settings.write_text("4")
    load_model(f"{file}:net")
    settings.write_text("8,")
    assert "(JSONDecodeError: Extra data" in error_of(f"{file}:net")


def test_networks_with_two_checkpoints_of_one_object_do_not_share_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_object.py").write_text("from torch import nn\nNETWORK = nn.Linear(4, 2)\n")
    monkeypatch.syspath_prepend(tmp_path)  # imported once, unlike a file
    networks = []
    for value in (1.0, 2.0):
        checkpoint = tmp_path / f"{value}.pt"
        torch.save({"weight": torch.full((2, 4), value), "bias": torch.zeros(2)}, checkpoint)
        networks.append(load_model("one_object:NETWORK", checkpoint).module)
    assert [float(each(torch.ones(1, 4))[0, 0]) for each in networks] == [4.0, 8.0]
    assert error_of("one_object:NETWORK").startswith("one_object:NETWORK holds the weights of a checkpoint")


def test_an_object_whose_functions_use_it_has_the_weights_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy would not: its function would call the layer of the original."""
    (tmp_path / "patched_object.py").write_text(
        "from torch import nn\nNETWORK = nn.Sequential(nn.Linear(4, 2))\n"
        "plain = NETWORK[0].forward\nNETWORK[0].forward = lambda x: 2 * plain(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    torch.save({"0.weight": torch.ones(2, 4), "0.bias": torch.zeros(2)}, tmp_path / "ones.pt")
    for _ in range(2):
        network = load_model("patched_object:NETWORK", tmp_path / "ones.pt").module
        assert float(network(torch.ones(1, 4))[0, 0]) == 8.0


@pytest.mark.parametrize(
    "patch",
    [
        "plain = NETWORK[0].forward\nNETWORK[0].forward = lambda x: 2 * plain(x)",
        "NETWORK.forward = lambda x: 2 * NETWORK[0](x)",
        "NETWORK.register_forward_hook(lambda *_: 2 * NETWORK[0](torch.ones(1, 4)))",
        "NETWORK.forward = lambda x, layer=NETWORK[0]: 2 * layer(x)",
        "NETWORK.register_forward_hook(lambda *given, layer=NETWORK[0]: 2 * layer(given[1][0]))",
        "def patched(network):\n"
        "    plain = network.forward\n"
        "    def forward(self, x):\n"
        "        return 2 * plain(x)\n"
        "    network.forward = MethodType(forward, network)\n"
        "patched(NETWORK)",
        "def patched(network):\n"
        "    network.parts = [lambda x: network[0](x), lambda x: network.parts[0](x) * 2]\n"
        "    network.forward = lambda x: network.parts[1](x)\n"
        "patched(NETWORK)",
    ],
)
def test_functions_of_a_copied_object_use_the_weights_of_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch: str
) -> None:
    name = f"patched_{zlib.crc32(patch.encode())}"
    (tmp_path / f"{name}.py").write_text(
        "from types import MethodType\nimport torch\nfrom torch import nn\n"
        f"NETWORK = nn.Sequential(nn.Linear(4, 2))\n{patch}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    networks = []
    for value in (1.0, 2.0):
        torch.save({"0.weight": torch.full((2, 4), value), "0.bias": torch.zeros(2)}, tmp_path / "now.pt")
        networks.append(load_model(f"{name}:NETWORK", tmp_path / "now.pt").module)
    assert [float(each(torch.ones(1, 4))[0, 0]) for each in networks] == [8.0, 16.0]


def test_modules_of_one_name_in_two_folders_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    """A companion, or the data, would silently be made with the code of the network."""
    for number, folder in enumerate(("first", "second")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_layers.py").write_text(f"WIDTH = {4 + number}")
        (tmp_path / folder / "net.py").write_text(
            "from torch import nn\nfrom own_layers import WIDTH\nnet = nn.Linear(WIDTH, 2)\n"
        )
    first = tmp_path / "first"
    load_model(f"{first / 'net.py'}:net")
    load_model(f"{first / 'net.py'}:net")
    assert error_of(f"{tmp_path / 'second' / 'net.py'}:net") == (
        f"model: {tmp_path}/second/net.py imports own_layers, and got {first}/own_layers.py, which was there "
        "first: a program has one module of a name, so rename one of the two"
    )
    for path in first.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text().replace("WIDTH = 4", "WIDTH = 6"))
    assert "net.py imports own_layers, and got " in error_of(f"{tmp_path / 'net.py'}:net"), "one folder up"


def test_a_users_folders_do_not_shadow_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("services", "thrift", "gati"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "own_net.py").write_text("import gati.zoo\nnet = gati.zoo.resnet20")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    assert isinstance(load_model("own_net:net").module, zoo.ResNet)


def test_the_same_source_gives_the_same_weights_and_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = load_model("gati.zoo:resnet20")
    assert torch.equal(torch.rand(1), expected)
    assert load_model("gati.zoo:resnet20").checkpoint_sha256 == first.checkpoint_sha256
    assert first.note == "no checkpoint given: the weights of gati.zoo:resnet20 are random (seed 0)"


def test_modules_of_one_name_may_have_the_same_code(tmp_path: Path) -> None:
    """Experiments are copies of each other, with the same helpers next to them, or links to these."""
    for folder in ("one", "two", "three"):
        (tmp_path / folder / "same_package").mkdir(parents=True)
        (tmp_path / folder / "same_package" / "__init__.py").touch()
        (tmp_path / folder / "same_package" / "sizes.py").write_text("WIDTH = 4")
        if folder == "two":
            (tmp_path / folder / "same_layers.py").symlink_to(tmp_path / "one" / "same_layers.py")
        else:
            (tmp_path / folder / "same_layers.py").write_text("CLASSES = 2")
        (tmp_path / folder / "net.py").write_text(
            "from torch import nn\nfrom same_layers import CLASSES\nfrom same_package.sizes import WIDTH\n"
            "net = nn.Linear(WIDTH, CLASSES)\n"
        )
        load_model(f"{tmp_path / folder / 'net.py'}:net")
    (tmp_path / "three" / "same_package" / "sizes.py").write_text("WIDTH = 5")
    assert "imports same_package, and got " in error_of(f"{tmp_path / 'three' / 'net.py'}:net")


def test_an_installed_package_is_not_taken_for_a_module_of_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages are often installed in a folder of the project."""
    site = tmp_path / ".venv" / "site-packages"
    (site / "of_site").mkdir(parents=True)
    (site / "of_site" / "__init__.py").write_text("WIDTH = 4")
    monkeypatch.syspath_prepend(str(site))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "of_site.py").write_text("# a network that uses the package\n")
    for place in (tmp_path / "net.py", tmp_path / "models" / "net.py"):
        place.write_text("from torch import nn\nfrom of_site import WIDTH\nnet = nn.Linear(WIDTH, 2)\n")
        load_model(f"{place}:net")


@pytest.mark.parametrize("change", [torch.set_default_dtype, torch.set_default_device])
def test_the_programs_defaults_change_neither_network_nor_inputs(change: Callable[[Any], None]) -> None:
    """Weights and means rounded to bfloat16 would give other answers than those that were certified."""
    is_dtype = change is torch.set_default_dtype
    mean = 0.485 if is_dtype else 0.456
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8)
    expected = torch.from_numpy((pixels / 255.0 - mean) / 0.225).permute(0, 3, 1, 2).float()
    network, waves = load_model("gati.zoo:resnet20"), torch.ones(1, 800)
    spectrogram = LogMel(8000, 0.1)(waves)
    change(torch.bfloat16 if is_dtype else "meta")
    try:
        assert float((Preprocessing((mean,) * 3, (0.225,) * 3)(pixels) - expected).abs().max()) < 1e-5
        assert LogMel(8000, 0.1)(waves).equal(spectrogram)
        assert load_model("gati.zoo:resnet20").checkpoint_sha256 == network.checkpoint_sha256
        assert torch.get_default_dtype() == (torch.bfloat16 if is_dtype else torch.float32)
    finally:
        change(torch.float32 if is_dtype else None)


def test_flags_replace_the_presets() -> None:
    loaded = load_model(
        "gati.zoo:resnet20", mean=[0.5], std=[0.1, 0.2, 0.3], resize=40, class_names=["a", "b"]
    )
    assert loaded.preprocessing == Preprocessing((0.5,) * 3, (0.1, 0.2, 0.3), resize=40, crop=40)
    assert loaded.class_names == ("a", "b")


def test_a_callable_may_carry_its_preprocessing(tmp_path: Path) -> None:
    (tmp_path / "preset_net.py").write_text(
        "from torch import nn\nfrom gati.model.preprocess import Preprocessing\n"
        "def net():\n    return nn.Conv2d(1, 2, 1)\n"
        "net.preprocessing = Preprocessing((0.5,), (0.5,), resize=8, channels=1)\n"
    )
    assert load_model(f"{tmp_path}/preset_net.py:net").preprocessing.resize == 8


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "resnet18",
            "unknown model 'resnet18'; write torchvision:NAME, timm:NAME, package.module:callable, "
            "file.py:callable, a torch.export file (.pt2) or a folder with config.json",
        ),
        ("gati.zoo:resnet57", "gati.zoo has no 'resnet57'; did you mean resnet56, resnet"),
        (
            "no_such_package.nets:net",
            "model: no module named 'no_such_package'; run from the folder that holds it",
        ),
        ("nowhere.py:net", "model: no file nowhere.py; check the path"),
        (f"{HERE}:", f"model '{HERE}:' names no callable; write package.module:callable or file.py:callable"),
        (f"{HERE}:raising", f"building {HERE}:raising failed (ValueError: no weights); fix that callable"),
        (f"{HERE}:wants_width", f"{HERE}:wants_width needs arguments (width); name a callable without"),
        (f"{HERE}:not_a_module", f"{HERE}:not_a_module returned a int; return an nn.Module"),
        (f"{HERE}:NUMBER", f"{HERE}:NUMBER is a int; name a callable that returns an nn.Module"),
        ("nowhere.pt2", "no torch.export file at nowhere.pt2; check the path"),
    ],
)
def test_a_wrong_source_is_one_line(source: str, message: str) -> None:
    assert error_of(source).startswith(message)


def test_a_file_that_fails_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1 +\n")
    path = tmp_path / "bad.py"
    message = error_of(f"{path}:net")
    assert message.startswith(f"model: running {path} failed (SyntaxError: ")


@pytest.mark.parametrize("status", ["0", "3", "'no arguments given'"])
def test_a_file_that_ends_the_program_is_an_error(tmp_path: Path, status: str) -> None:
    """`gati explore` would end without an error, and without a library."""
    path = tmp_path / "script.py"
    path.write_text(f"import sys\nfrom torch import nn\nnet = nn.Linear\nsys.exit({status})\n")
    message = error_of(f"{path}:net")
    assert message.startswith(f"model: running {path} failed (SystemExit: ")
    assert message.endswith("; put what ends the program under `if __name__ == '__main__':` in that file")


def test_a_module_that_ends_the_program_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ending_net.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert error_of("ending_net:net") == (
        "model: importing ending_net failed (SystemExit: 0); put what ends the program under "
        "`if __name__ == '__main__':` in that module"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "scripted",
            "is a TorchScript module, which cannot be cut; give the nn.Module that it was made from",
        ),
        ("scripted_inside", "scripted_inside: 0 is a TorchScript module, which cannot be cut"),
        (
            "stubborn",
            "on the CPU in evaluation mode (NotImplementedError: not supported yet); give an nn.Module",
        ),
        ("lazy", "1.weight has no shape yet, because it belongs to a lazy layer; run the network once on"),
        ("on_meta", "0.weight is on the meta device, without values; build it on the CPU"),
        ("sparse", "neighbours is sparse_coo, and Gati takes dense tensors; register neighbours.to_dense()"),
        (
            "quantized",
            "3._packed_params.dtype is no plain tensor, as in a quantized network; give the",
        ),
    ],
)
def test_a_network_without_usable_weights_is_one_line(source: str, message: str) -> None:
    assert message in error_of(f"{HERE}:{source}")


@pytest.mark.slow
def test_a_compiled_network_is_the_network(tmp_path: Path) -> None:
    plain = load_model(f"{HERE}:tiny").module
    torch.save(torch.compile(plain).state_dict(), tmp_path / "whole.pth")
    torch.save(user_code.compiled_inside().state_dict(), tmp_path / "inside.pth")
    for name, file in (("compiled", "whole.pth"), ("compiled_inside", "inside.pth")):
        module = load_model(f"{HERE}:{name}", tmp_path / file).module
        assert list(module.state_dict()) == list(plain.state_dict())
        assert all(each._compiled_call_impl is None for each in module.modules())
    load_model(f"{HERE}:compiled", tmp_path / "inside.pth")


COMPILED_METHODS = """
import functools

import torch
from torch import nn


def refuse(graph, inputs):
    raise AssertionError("it is compiled")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x).relu()


class Attribute(Plain):
    def __init__(self):
        super().__init__()
        self.forward = torch.compile(self.forward, backend=refuse)


class Method(Plain):
    @torch.compile(backend=refuse)
    def forward(self, x):
        return self.layer(x).relu()


def doubled(function):
    @functools.wraps(function)
    def inner(*given):
        return 2 * function(*given)

    return inner


class Wrapped(Plain):
    @doubled
    @torch.compile(backend="eager")
    def forward(self, x):
        return self.layer(x).relu()


class WrappedPlainly(Plain):
    forward = doubled(Plain.forward)


class Static(Plain):
    @staticmethod
    @torch.compile(backend="eager")
    def activated(x):
        return x.relu()

    def forward(self, x):
        return self.activated(self.layer(x))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "same"),
    [("Attribute", "Plain"), ("Method", "Plain"), ("Static", "Plain"), ("Wrapped", "WrappedPlainly")],
)
def test_a_forward_that_is_compiled_runs_as_it_is_written(tmp_path: Path, name: str, same: str) -> None:
    """Else torch compiles what Gati does while it follows the network, too, for minutes.

    What is around a compiled function is a part of the network.
    """
    (tmp_path / "net.py").write_text(COMPILED_METHODS)
    plain, module = (load_model(f"{tmp_path / 'net.py'}:{each}").module for each in (same, name))
    x = torch.rand(3, 4)
    assert torch.equal(module(x), plain(x))
    copied = copy.deepcopy(module)
    copied.get_parameter("layer.weight").zero_()
    assert torch.equal(module(x), plain(x)) and not torch.equal(copied(x), plain(x))


def test_a_network_for_several_gpus_runs_on_one_device(tmp_path: Path) -> None:
    """Its layers keep their names, which checkpoints and libraries have, too."""
    plain, parallel = load_model(f"{HERE}:tiny").module, load_model(f"{HERE}:parallel").module
    x = torch.rand(2, 3, 8, 8)
    assert parallel(x).equal(plain(x))
    state = {name: tensor + 1 for name, tensor in parallel.state_dict().items()}
    assert list(state)[0] == "module.0.module.0.weight"
    torch.save(state, tmp_path / "net.pt")
    loaded = load_model(f"{HERE}:parallel", tmp_path / "net.pt").module.state_dict()
    assert all(loaded[name].equal(tensor) for name, tensor in state.items())


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_a_network_whose_answer_is_not_one_class_is_refused(tmp_path: Path, kind: str) -> None:
    """The class of the highest score says little about a network that gives an input several labels."""
    own = tmp_path / "own.py"
    own.write_text(
        "from types import SimpleNamespace\nfrom torch import nn\n\ndef net():\n    made = nn.Linear(4, 3)\n"
        f"    made.config = SimpleNamespace(problem_type={kind!r})\n    return made\n"
    )
    assert error_of(f"{own}:net") == (
        f"{own}:net is for {kind.replace('_', ' ')} (problem_type in its config), and Gati answers with one "
        "class; if that with the highest score is all you need, set problem_type to None there"
    )
    own.write_text(own.read_text().replace(kind, "single_label_classification"))
    load_model(f"{own}:net")


def test_what_is_no_tensor_in_a_state_is_no_obstacle() -> None:
    first, second = load_model(f"{HERE}:versioned"), load_model(f"{HERE}:versioned")
    assert first.checkpoint_sha256 == second.checkpoint_sha256


def test_wrong_flags_are_one_line() -> None:
    assert error_of("gati.zoo:resnet20", mean=[0.1, 0.2]) == (
        "preprocessing has 2 values for mean and the network takes 3 channels; give 3 values"
    )
    assert error_of("gati.zoo:resnet20", std=[0.0]) == (
        "preprocessing std is [0.0, 0.0, 0.0]; every value must be above 0"
    )
    assert error_of("gati.zoo:resnet20", resize=-3) == (
        "preprocessing resize is -3; give a number of pixels above 0"
    )


def test_the_number_of_classes_follows_the_checkpoint(tmp_path: Path) -> None:
    torch.save(zoo.resnet20(num_classes=7).state_dict(), tmp_path / "seven.pth")
    loaded = load_model("gati.zoo:resnet20", tmp_path / "seven.pth")
    assert loaded.module(torch.zeros(1, 3, 32, 32)).shape == (1, 7)
    assert loaded.checkpoint_path == str(tmp_path / "seven.pth")


def test_a_users_callable_with_other_classes_is_an_error_with_both_shapes(tmp_path: Path) -> None:
    state = load_model(f"{HERE}:tiny").module.state_dict() | {"3.weight": torch.zeros(7, 4)}
    torch.save(state, tmp_path / "seven.pth")
    with pytest.raises(CheckpointError, match=r"3\.weight has shape \[7, 4\] in the file and \[10, 4\]"):
        load_model(f"{HERE}:tiny", tmp_path / "seven.pth")


LAZY = """
from torch import nn

tries = []

def net():
    tries.append(1)
    if len(tries) == 1:
        nn.Linear(2, 2)  # takes random numbers
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'ViTForImageClassification'") from error
    return nn.Linear(4, 2)
"""


def test_code_that_imports_torchvision_itself_finds_its_operators_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `transformers` does when a class is first used, with an error of its own."""
    declared: list[str] = []

    class Declared:
        def __init__(self, *_: str) -> None:
            pass

        def define(self, schema: str) -> None:
            declared.append(schema)

    monkeypatch.setattr(torch.library, "Library", Declared)
    monkeypatch.setattr(source, "_held_libraries", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])  # they come back
    (tmp_path / "lazy.py").write_text(LAZY)
    found = load_model(f"{tmp_path / 'lazy.py'}:net").module
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = nn.Linear(4, 2)
    assert isinstance(found, nn.Linear) and torch.equal(found.weight, expected.weight)
    assert [schema.partition("(")[0] for schema in declared] == ["nms", "qnms"]


def test_torchvision_networks_come_with_their_preprocessing_and_classes() -> None:
    pytest.importorskip("PIL")
    loaded = load_model("torchvision:mobilenet_v3_small")
    assert loaded.preprocessing == Preprocessing(
        (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), resize=256, crop=224, interpolation="bilinear"
    )
    assert loaded.class_names is not None and len(loaded.class_names) == 1000
    assert loaded.note.startswith("no checkpoint given")
    assert error_of("torchvision:resnet81").startswith(
        "torchvision has no classifier 'resnet81'; did you mean "
    )
    assert "fcn_resnet50" in error_of("torchvision:fcn_resnet50")  # a segmentation network is no classifier


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_that_transform_their_input_do_so_as_with_published_weights(name: str) -> None:
    pytest.importorskip("PIL")
    assert load_model(f"torchvision:{name}").module.transform_input


@pytest.mark.parametrize("auxiliaries", ["left out", "of other classes"])
def test_a_checkpoint_needs_no_auxiliary_classifiers(auxiliaries: str, tmp_path: Path) -> None:
    """They only run in training. With published weights, torchvision drops those of GoogLeNet only."""
    pytest.importorskip("PIL")
    state = load_model("torchvision:googlenet").module.state_dict()
    kept = {name: tensor for name, tensor in state.items() if not name.startswith("aux")}
    tuned = {**(kept if auxiliaries == "left out" else state), "fc.bias": torch.zeros(7)}
    tuned["fc.weight"] = torch.zeros(7, 1024)
    torch.save({f"module.{name}": tensor for name, tensor in tuned.items()}, tmp_path / "tuned.pt")
    found = load_model("torchvision:googlenet", tmp_path / "tuned.pt").module
    assert list(found.state_dict()) == list(kept) and len(found.state_dict()["fc.bias"]) == 7
    del tuned["fc.bias"]
    torch.save(tuned, tmp_path / "tuned.pt")
    assert "missing key fc.bias, no unexpected" in error_of("torchvision:googlenet", tmp_path / "tuned.pt")


def test_a_network_of_torchvision_that_asks_for_the_version_of_its_weights_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    torch.save(load_model("torchvision:mnasnet0_5").module.state_dict(), tmp_path / "tuned.pt")
    assert load_model("torchvision:mnasnet0_5", tmp_path / "tuned.pt").note == ""


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "convnext_tiny.fb_in22k_ft_in1k_384"])
def test_pictures_are_prepared_as_timm_prepares_them(name: str) -> None:
    """Some networks of timm stretch pictures to a square instead of cutting them."""
    pytest.importorskip("timm")
    timm = source.import_timm()
    config = timm.data.resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    rows, columns = np.linspace(0, 255, 300)[:, None], np.linspace(0, 255, 500)[None]
    both = np.stack([rows + 0 * columns, columns + 0 * rows, (rows + columns) / 2], axis=2)
    picture = Image.fromarray(both.astype(np.uint8))
    expected = timm.data.create_transform(**config, is_training=False)(picture)
    found = timm_recipe(name).preprocessing
    assert found is not None
    torch.testing.assert_close(found.from_pil([picture])[0], expected, atol=0.02, rtol=0.0)


def test_timm_networks_come_with_their_preprocessing() -> None:
    pytest.importorskip("timm")
    loaded = load_model("timm:mobilenetv3_small_050")
    assert (loaded.preprocessing.crop, loaded.preprocessing.resize) == (224, 256)
    assert loaded.preprocessing.interpolation == "bicubic"
    assert error_of("timm:resnet_18").startswith("timm has no model 'resnet_18'; did you mean resnet18")
    wrong = error_of("timm:resnet18.a1_in1")
    assert wrong.startswith("timm has no weights 'resnet18.a1_in1'; did you mean resnet18.a1_in1k")


def test_a_network_of_timm_without_a_classifier_is_refused() -> None:
    """Its features would be taken for the scores of as many classes."""
    pytest.importorskip("timm")
    assert error_of("timm:vit_small_patch16_224.dino").startswith(
        "timm:vit_small_patch16_224.dino returns features"
    )


def test_a_missing_optional_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert error_of("torchvision:resnet18") == "torchvision is not installed; run: pip install torchvision"
    assert error_of("timm:resnet18") == "torchvision (needed by timm) is not installed; run: pip install timm"


def test_the_zoo_builds_the_published_networks() -> None:
    depths = {zoo.resnet20: 20, zoo.resnet32: 32, zoo.resnet44: 44, zoo.resnet56: 56, zoo.resnet110: 110}
    for build, depth in depths.items():
        layers = [m for m in build().modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        assert len(layers) == depth
    assert zoo.digits_resnet()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert sum(p.numel() for p in zoo.resnet56().parameters()) == 853_018


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize(
    ("network", "file"),
    [
        ("resnet20", "resnet20-12fca82f.th"),
        ("resnet32", "resnet32-d509ac18.th"),
        ("resnet56", "resnet56-4bfd9763.th"),
    ],
)
def test_public_checkpoints_classify_real_images(network: str, file: str) -> None:
    loaded = load_model(f"gati.zoo:{network}", SHARED / "checkpoints" / file)
    assert file.startswith(f"{network}-{loaded.checkpoint_sha256[:8]}")
    data = load_data(SHARED / "cifar10" / "cifar10_val.npz", loaded.preprocessing)
    with torch.inference_mode():
        answers = torch.cat(
            [loaded.module(data.images(slice(i, i + 200))).argmax(1) for i in range(0, 400, 200)]
        )
    assert data.labels is not None
    assert np.mean(answers.numpy() == data.labels[:400]) > 0.89


def test_files_are_remembered_by_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(FILE, tmp_path / "mine.py")
    torch.save(load_model(f"{HERE}:tiny").module.state_dict(), tmp_path / "weights.pt")
    monkeypatch.chdir(tmp_path)
    loaded = load_model("mine.py:tiny", "weights.pt")
    assert loaded.source == f"{tmp_path / 'mine.py'}:tiny"
    assert loaded.checkpoint_path == str(tmp_path / "weights.pt")


def test_older_names_of_weights_are_loaded_in_inference_mode_too(tmp_path: Path) -> None:
    """Its tensors do not know whether they were written to."""
    (tmp_path / "own.py").write_text(
        "from torch import nn\nfrom torch.nn.utils.parametrizations import weight_norm\n"
        "def build():\n    return nn.Sequential(weight_norm(nn.Linear(4, 4)))\n"
    )
    state = {"0.bias": torch.ones(4), "0.weight_g": torch.ones(4, 1), "0.weight_v": torch.ones(4, 4)}
    torch.save(state, tmp_path / "old.pt")
    with torch.inference_mode():
        loaded = load_model(f"{tmp_path / 'own.py'}:build", tmp_path / "old.pt")
    assert torch.equal(loaded.module.state_dict()["0.parametrizations.weight.original1"], torch.ones(4, 4))


def test_weights_behind_a_link_are_found_again(tmp_path: Path) -> None:
    """As in the cache of Hugging Face, where a file's own name is a hash."""
    save_file(load_model(f"{HERE}:tiny").module.state_dict(), tmp_path / "0a1b2c")
    (tmp_path / "model.safetensors").symlink_to("0a1b2c")
    loaded = load_model(f"{HERE}:tiny", tmp_path / "model.safetensors")
    again = load_model(loaded.source, loaded.checkpoint_path)
    assert again.checkpoint_sha256 == loaded.checkpoint_sha256


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16, torch.float64])
def test_a_network_of_another_precision_runs_in_float32(
    precision: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Weights of a checkpoint are not rounded on their way."""
    network = user_code.tiny().eval()
    torch.save(network.state_dict(), tmp_path / "net.pt")
    monkeypatch.setattr(user_code, "other", lambda: user_code.tiny().to(precision), raising=False)
    loaded = load_model(f"{HERE}:other", tmp_path / "net.pt")
    name = str(precision).removeprefix("torch.")
    assert (
        loaded.note
        == f"the weights of {HERE}:other are {name}: the network runs in float32, which caches read"
    )
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded.module(x), network(x))


def test_a_checkpoint_of_another_precision_is_converted(tmp_path: Path) -> None:
    state = {name: tensor.bfloat16() for name, tensor in user_code.tiny().state_dict().items()}
    torch.save(state, tmp_path / "net.pt")
    loaded = load_model(f"{HERE}:tiny", tmp_path / "net.pt")
    assert loaded.note == ""
    for name, tensor in loaded.module.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, state[name].float())


def test_a_network_that_mixes_precisions_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).double())

    monkeypatch.setattr(user_code, "mixed", mixed, raising=False)
    kinds = {each.dtype for each in load_model(f"{HERE}:mixed").module.parameters()}
    assert kinds == {torch.float32, torch.float64}


def test_a_network_itself_is_no_name_of_one() -> None:
    given: Any = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    with pytest.raises(
        ModelError, match="^the model is a Sequential; name what makes it, as package"
    ) as caught:
        load_model(given)
    assert "\n" not in str(caught.value)


def test_a_network_whose_eval_returns_nothing_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\nclass Mine(torch.nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(2, 2)\n\n"
        "    def eval(self):\n        self.train(False)\n"
    )
    module = load_model(f"{tmp_path / 'mine.py'}:Mine").module
    assert not module.training and not any(each.requires_grad for each in module.parameters())


@pytest.mark.parametrize(
    "error", [MemoryError("full"), CheckpointError("wrong"), torch.OutOfMemoryError("full")]
)
def test_what_is_no_refusal_of_the_network_is_told_as_it_is(error: Exception) -> None:
    class Failing(nn.Linear):
        def train(self, mode: bool = True) -> nn.Module:
            raise error

    with pytest.raises(type(error)) as told:
        frozen(Failing(2, 2), "own.py:build")
    assert told.value is error
