"""torch.export files: the same network again, and nothing in the file ever runs."""

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from gati import zoo
from gati.errors import ModelError
from gati.model.blocks import find_blocks
from gati.model.hooks import collect_hidden
from gati.model.load import load_model

BATCH = torch.export.Dim("batch")


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "small.pt2"
    program = torch.export.export(small_network(), (torch.zeros(2, 1, 8, 8),), dynamic_shapes=({0: BATCH},))
    torch.export.save(program, path)
    return path


def rewritten(source: Path, target: Path, name_part: str, change: Callable[[bytes], bytes]) -> Path:
    """Copy an archive with the records whose name contains `name_part` changed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            record = old.read(entry)
            new.writestr(entry.filename, change(record) if name_part in entry.filename else record)
    return target


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        load_model(path)
    message = str(error.value)
    assert message.startswith(f"refused {path}: ") and "\n" not in message
    return message


def test_an_exported_network_answers_bit_for_bit_and_takes_any_batch(exported: Path) -> None:
    loaded = load_model(exported)
    images = torch.randn(5, 1, 8, 8)
    assert torch.equal(loaded.module(images), small_network()(images))
    assert loaded.preprocessing.channels == 1
    assert not loaded.module.training


class Looped(nn.Module):
    """Blocks in a list, which is never called, as in most transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(zoo.BasicBlock(1, 1) for _ in range(3))
        self.head = nn.Linear(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def test_blocks_in_a_list_are_found_in_an_exported_network(tmp_path: Path) -> None:
    program = torch.export.export(Looped().eval(), (torch.zeros(2, 1, 8, 8),), dynamic_shapes=({0: BATCH},))
    torch.export.save(program, tmp_path / "looped.pt2")
    module = load_model(tmp_path / "looped.pt2").module
    assert find_blocks(module, example=torch.zeros(2, 1, 8, 8)) == ("layers.0", "layers.1", "layers.2")


class Mixed(nn.Module):
    """Two sequences, one of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), nn.Conv2d(2, 2, 3))
        self.second = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 1))
        self.head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)).mean((2, 3)))  # type: ignore[no-any-return]


def test_a_sequence_of_sequences_stays_one_in_an_exported_network(tmp_path: Path) -> None:
    program = torch.export.export(Mixed().eval(), (torch.zeros(2, 1, 8, 8),), dynamic_shapes=({0: BATCH},))
    torch.export.save(program, tmp_path / "mixed.pt2")
    module = load_model(tmp_path / "mixed.pt2").module
    assert find_blocks(module) == find_blocks(Mixed()) == ("first", "second")


def test_an_exported_network_has_its_blocks_and_hooks(tmp_path: Path) -> None:
    network = zoo.digits_resnet().eval()
    program = torch.export.export(network, (torch.zeros(2, 1, 8, 8),), dynamic_shapes=({0: BATCH},))
    torch.export.save(program, tmp_path / "digits.pt2")
    module = load_model(tmp_path / "digits.pt2").module
    blocks = find_blocks(module, example=torch.zeros(2, 1, 8, 8))
    assert blocks == find_blocks(network)
    images = torch.randn(3, 1, 8, 8)
    with (
        torch.no_grad(),
        collect_hidden(module, blocks) as found,
        collect_hidden(network, blocks) as expected,
    ):
        module(images)
        network(images)
    assert all(torch.equal(found[name], expected[name]) for name in blocks)


def test_an_exported_network_can_be_exported_again(exported: Path) -> None:
    module = load_model(exported).module
    again = torch.export.export(module, (torch.zeros(2, 1, 8, 8),), dynamic_shapes=({0: BATCH},))
    images = torch.randn(4, 1, 8, 8)
    assert torch.equal(again.module()(images), module(images))


def test_a_checkpoint_can_replace_the_exported_weights(exported: Path, tmp_path: Path) -> None:
    other = small_network()
    with torch.no_grad():
        other[4].bias += 1
    torch.save(other.state_dict(), tmp_path / "other.pth")
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(load_model(exported, tmp_path / "other.pth").module(images), other(images))


@pytest.mark.parametrize("record", ["sample_inputs", "weights_config"])
def test_a_pickle_in_the_archive_is_refused_and_never_runs(
    exported: Path, tmp_path: Path, record: str
) -> None:
    marker = tmp_path / "executed"

    def poison(content: bytes) -> bytes:
        if record == "sample_inputs":
            buffer = io.BytesIO()
            torch.save(((torch.zeros(1), Payload(marker)), {}), buffer)
            return buffer.getvalue()
        config = json.loads(content)
        next(iter(config["config"].values()))["use_pickle"] = True
        return json.dumps(config).encode()

    message = refused(rewritten(exported, tmp_path / "evil.pt2", record, poison))
    assert (
        "needs unpickling" if record == "sample_inputs" else "has a pickled object for 0.weight"
    ) in message
    assert not marker.exists()


def test_code_in_a_shape_expression_is_refused_and_never_runs(exported: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"

    def poison(content: bytes) -> bytes:
        program = json.loads(content)
        for value in program["graph_module"]["graph"]["tensor_values"].values():
            for size in value["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = f"__import__('os').mkdir('{marker}')"
        return json.dumps(program).encode()

    message = refused(rewritten(exported, tmp_path / "evil.pt2", "models/", poison))
    assert "has expr_str" in message
    assert not marker.exists()


@pytest.mark.parametrize(
    "target", ["torch.os.system", "torch.ops.load_library", "_operator.attrgetter", "#evil"]
)
def test_a_call_of_anything_but_operators_is_refused(exported: Path, tmp_path: Path, target: str) -> None:
    def poison(content: bytes) -> bytes:
        program = json.loads(content)
        program["graph_module"]["graph"]["nodes"][0]["target"] = target
        return json.dumps(program).encode()

    assert f"has target {target!r}" in refused(rewritten(exported, tmp_path / "evil.pt2", "models/", poison))


def test_a_name_that_would_become_code_is_refused(exported: Path, tmp_path: Path) -> None:
    def poison(content: bytes) -> bytes:
        return content.replace(b'"input"', b'"input=print(1)"')

    assert "has name 'input=print(1)'" in refused(
        rewritten(exported, tmp_path / "evil.pt2", "models/", poison)
    )


def test_a_compiled_library_is_refused(exported: Path, tmp_path: Path) -> None:
    path = rewritten(exported, tmp_path / "evil.pt2", "nothing", bytes)
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{root}/data/aotinductor/model/model.so", b"\x7fELF")
    assert "holds a compiled library" in refused(path)


def test_a_fixed_batch_is_one_line_that_says_how_to_export(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(small_network(), (torch.zeros(1, 1, 8, 8),)), tmp_path / "one.pt2")
    with pytest.raises(ModelError) as error:
        load_model(tmp_path / "one.pt2")
    assert str(error.value) == (
        f"{tmp_path / 'one.pt2'} was exported for a batch of exactly 1; export it for any batch: "
        "torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim('batch')},))"
    )


@pytest.mark.parametrize("largest", [64, 250])
def test_a_largest_batch_is_one_line_if_gati_gives_larger_ones(largest: int, tmp_path: Path) -> None:
    path, shapes = tmp_path / "limited.pt2", ({0: torch.export.Dim("batch", max=largest)},)
    torch.export.save(
        torch.export.export(small_network(), (torch.zeros(2, 1, 8, 8),), dynamic_shapes=shapes), path
    )
    if largest == 250:
        assert load_model(path).module(torch.zeros(250, 1, 8, 8)).shape == (250, 3)
    else:
        with pytest.raises(
            ModelError, match="for batches of at most 64; export it for any batch: .*Dim"
        ) as error:
            load_model(path)
        assert "\n" not in str(error.value)


def test_several_inputs_are_one_line(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    torch.export.save(
        torch.export.export(Sum(), (torch.zeros(2, 3), torch.zeros(2, 3))), tmp_path / "two.pt2"
    )
    with pytest.raises(ModelError) as error:
        load_model(tmp_path / "two.pt2")
    assert str(error.value) == (
        f"{tmp_path / 'two.pt2'} was exported with 2 inputs; export a network that takes one tensor"
    )


@pytest.mark.parametrize("damage", ["empty", "text", "truncated"])
def test_a_damaged_file_is_one_line(exported: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "bad.pt2"
    path.write_bytes({"empty": b"", "text": b"<html>", "truncated": exported.read_bytes()[:2000]}[damage])
    with pytest.raises(ModelError) as error:
        load_model(path)
    message = str(error.value)
    assert message.startswith(f"{path} is not a torch.export file that torch ") and "\n" not in message
