"""Checkpoints: what is read, what is refused, and that nothing in a file ever runs."""

import argparse
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

from gati.errors import CheckpointError
from gati.model.checkpoint import apply_checkpoint, load_checkpoint, state_sha256


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


@pytest.mark.parametrize("container", [None, "state_dict", "model_state_dict", "ema", "module", "params"])
@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod.", "module._orig_mod."])
def test_containers_and_prefixes_are_unwrapped(tmp_path: Path, container: str | None, prefix: str) -> None:
    trained = network()
    state = {prefix + key: value for key, value in trained.state_dict().items()}
    torch.save(state if container is None else {"epoch": 3, container: state}, tmp_path / "weights.pth")
    loaded, sha256, _ = load_checkpoint(tmp_path / "weights.pth")
    target = network(seed=1)
    apply_checkpoint(target, loaded, "weights.pth")
    assert state_sha256(target) == state_sha256(trained)
    assert re.fullmatch("[0-9a-f]{64}", sha256)


def test_a_file_that_is_written_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a library would be of other weights than the hash in its manifest says."""
    path, read = tmp_path / "latest.pth", torch.load

    def slowly(*given: Any, **options: Any) -> Any:
        torch.save(network(seed=1).state_dict(), tmp_path / "next.pth")
        (tmp_path / "next.pth").replace(path)  # as a training does that goes on
        return read(*given, **options)

    torch.save(network().state_dict(), path)
    monkeypatch.setattr(torch, "load", slowly)
    with pytest.raises(
        CheckpointError, match=r"latest.pth was written while it was read: run the command again"
    ):
        load_checkpoint(path)


@pytest.mark.parametrize("other", ["best_acc1", "loss"])
def test_a_tensor_next_to_the_container_is_no_weight(tmp_path: Path, other: str) -> None:
    """As PyTorch's ImageNet example saves them."""
    weights, target = network().state_dict(), network(seed=1)
    torch.save({"epoch": 3, "state_dict": weights, other: torch.tensor(71.3)}, tmp_path / "weights.pth")
    apply_checkpoint(target, load_checkpoint(tmp_path / "weights.pth")[0], "weights.pth")
    assert state_sha256(target) == state_sha256(network())


def test_a_container_without_tensors_is_passed_over(tmp_path: Path) -> None:
    weights, target = network().state_dict(), network(seed=1)
    torch.save({"model": {"depth": 20}, "net": {"net": weights}}, tmp_path / "weights.pth")
    apply_checkpoint(target, load_checkpoint(tmp_path / "weights.pth")[0], "weights.pth")
    assert state_sha256(target) == state_sha256(network())


@pytest.mark.parametrize("unrelated", ["model", "net"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_mapping_called_like_a_container_is_passed_over_if_it_does_not_fit(
    tmp_path: Path, unrelated: str, prefix: str
) -> None:
    weights = {prefix + key: value for key, value in network().state_dict().items()}
    torch.save({**weights, unrelated: {"class_shares": torch.ones(2)}}, tmp_path / "weights.pth")
    target = network(seed=1)
    apply_checkpoint(target, load_checkpoint(tmp_path / "weights.pth", target.state_dict())[0], "weights.pth")
    assert state_sha256(target) == state_sha256(network())


def test_of_containers_that_fit_the_first_is_taken(tmp_path: Path) -> None:
    """An average of weights is often longer by a count."""
    average = {**network(seed=2).state_dict(), "updates": torch.ones(1)}
    torch.save({"ema": average, "model": network().state_dict()}, tmp_path / "weights.pth")
    target = network(seed=1)
    apply_checkpoint(target, load_checkpoint(tmp_path / "weights.pth", target.state_dict())[0], "weights.pth")
    assert state_sha256(target) == state_sha256(network())


def test_of_several_weights_that_fit_it_is_said_which_are_taken(tmp_path: Path) -> None:
    """Trainings keep an average of the weights next to them, which is another network."""
    path = tmp_path / "last.pth"
    average = {f"module.{key}": value for key, value in network(seed=2).state_dict().items()}
    torch.save({"model": network().state_dict(), "model_ema": average}, path)
    target = network(seed=1)
    state, _, note = load_checkpoint(path, target.state_dict())
    apply_checkpoint(target, state, path)
    assert state_sha256(target) == state_sha256(network())
    assert note == f"{path} has weights under model, model_ema: the first are used; save others alone"
    torch.save({"model": network().state_dict(), "best": torch.ones(1)}, path)
    assert load_checkpoint(path, target.state_dict()).note == ""


def test_weights_under_an_unusual_name_come_after_all_others(tmp_path: Path) -> None:
    """Else a library would be of other weights than those that it was made with."""
    path, target = tmp_path / "last.pth", network(seed=1)
    right, other = network().state_dict(), network(seed=2).state_dict()
    counts = [key for key in right if key.endswith("num_batches_tracked")]
    without_counts = {key: value for key, value in right.items() if key not in counts}
    of_lightning = {f"net.{key}": value for key, value in right.items()} | {"loss": torch.ones(1)}
    for content in (
        {**right, "best": other},
        {"best": other, "state_dict": without_counts},
        {"model": {"teacher": other}, "net": right},
        {"state_dict": of_lightning, "best": other},
    ):
        torch.save(content, path)
        state, _, note = load_checkpoint(path, target.state_dict())
        apply_checkpoint(target, state, path)
        assert torch.equal(target[0].weight, right["0.weight"]), note


def test_a_mapping_with_the_names_of_the_weights_is_not_taken_in_silence(tmp_path: Path) -> None:
    """As the moments of some optimizers, or the masks of a pruned network."""
    path, target = tmp_path / "last.pth", network(seed=1)
    right = network().state_dict()
    moments = {key: torch.zeros_like(value) for key, value in right.items()}
    torch.save({"optimizer": {"exp_avg": moments}, "params": right}, path)
    state, _, note = load_checkpoint(path, target.state_dict())
    assert torch.equal(state["0.weight"], right["0.weight"])
    assert note == f"{path}: the weights under params are used"
    torch.save({"exp_avg": moments, "params": right}, path)
    with pytest.raises(
        CheckpointError, match=r"has weights under exp_avg, params: save the network's alone$"
    ):
        load_checkpoint(path, target.state_dict())
    torch.save({"optimizer": {"exp_avg": moments}}, path)
    with pytest.raises(CheckpointError, match="holds no weights"):
        load_checkpoint(path, target.state_dict())


def test_the_arguments_of_a_training_are_no_obstacle(tmp_path: Path) -> None:
    """The training scripts of torchvision and timm keep them in each checkpoint."""
    arguments = argparse.Namespace(model="resnet18", lr=0.1, data="/data")
    torch.save({"model": network().state_dict(), "args": arguments}, tmp_path / "last.pth")
    target = network(seed=1)
    apply_checkpoint(target, load_checkpoint(tmp_path / "last.pth").state, "last.pth")
    assert state_sha256(target) == state_sha256(network())
    assert "args" in torch.load(tmp_path / "last.pth", weights_only=True), "what others allowed stays allowed"
    arguments.callback = os.getcwd
    torch.save({"model": network().state_dict(), "args": arguments}, tmp_path / "last.pth")
    with pytest.raises(CheckpointError, match="needs unpickling"):
        load_checkpoint(tmp_path / "last.pth")


def test_a_container_that_holds_itself_ends(tmp_path: Path) -> None:
    content: dict[str, object] = {"epoch": 3}
    content["model"] = content
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match="holds no weights"):
        load_checkpoint(tmp_path / "weights.pth")


def test_compiled_modules_inside_are_unwrapped() -> None:
    state = {key.replace("3.", "3._orig_mod."): value for key, value in network().state_dict().items()}
    target = network(seed=1)
    apply_checkpoint(target, state, "weights.pth")
    assert state_sha256(target) == state_sha256(network())


def test_a_prefix_that_the_network_has_too_is_kept() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)

    trained, target = Wrapped(), Wrapped()
    assert state_sha256(target) != state_sha256(trained)
    apply_checkpoint(target, trained.state_dict(), "weights.pth")
    assert state_sha256(target) == state_sha256(trained)


def test_safetensors_are_read(tmp_path: Path) -> None:
    save_file(network().state_dict(), tmp_path / "weights.safetensors")
    state, _, _ = load_checkpoint(tmp_path / "weights.safetensors")
    target = network(seed=1)
    apply_checkpoint(target, state, "weights.safetensors")
    assert state_sha256(target) == state_sha256(network())


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


def test_of_weights_that_layers_share_a_file_needs_one(tmp_path: Path) -> None:
    torch.manual_seed(1)
    trained, target = Tied(), Tied()
    save_model(trained, str(tmp_path / "tied.safetensors"))
    state, _, _ = load_checkpoint(tmp_path / "tied.safetensors", target.state_dict())
    assert len(state) == 3, "one of the four names is not in the file"
    apply_checkpoint(target, state, "tied.safetensors")
    assert state_sha256(target) == state_sha256(trained)
    del state["second.bias"]
    with pytest.raises(CheckpointError, match="missing key second.bias, no unexpected key"):
        apply_checkpoint(target, state, "tied.safetensors")


def test_an_average_of_weights_is_read(tmp_path: Path) -> None:
    torch.save(AveragedModel(network()).state_dict(), tmp_path / "average.pth")
    target = network(seed=1)
    state, _, _ = load_checkpoint(tmp_path / "average.pth", target.state_dict())
    apply_checkpoint(target, state, "average.pth")
    assert state_sha256(target) == state_sha256(network())


def test_layers_take_the_names_of_their_older_versions() -> None:
    """As in published weights of torchvision's ViT, and in those of older transformers with weight norm."""
    trained = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    older = {
        "0.parametrizations.weight.original0": "0.weight_g",
        "0.parametrizations.weight.original1": "0.weight_v",
    }
    state = {older.get(key, key): value for key, value in trained.state_dict().items()}
    assert sorted(state) == ["0.bias", "0.weight_g", "0.weight_v", "1.bias", "1.weight"]
    target = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    apply_checkpoint(target, state, "weights.pth")
    assert state_sha256(target) == state_sha256(trained)
    target = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    before = state_sha256(target)
    del state["1.bias"]
    with pytest.raises(CheckpointError, match=r"missing key 1.bias, no unexpected key"):
        apply_checkpoint(target, state, "weights.pth")
    assert state_sha256(target) == before, "what is refused changes nothing"
    state["1.bias"], state["0.weight_v"] = torch.ones(2), torch.ones(7, 7)
    target.register_buffer("mask", torch.ones(1).expand(4))  # which nothing can be written to
    state["mask"], before = torch.ones(4), state_sha256(target)
    with pytest.raises(CheckpointError, match=r"missing key 0.parametrizations\S+original0 and 1 more, "):
        apply_checkpoint(target, state, "weights.pth")
    assert state_sha256(target) == before


class Versioned(nn.Linear):
    """A layer that asks which version its weights are of, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version") not in (1, 2):
            raise ValueError("version should be 1 or 2")
        super()._load_from_state_dict(state, prefix, metadata, *others)


def test_layers_that_ask_for_the_version_of_their_weights_are_told() -> None:
    trained, target = nn.Sequential(Versioned(2, 2)), nn.Sequential(Versioned(2, 2))
    apply_checkpoint(
        target, {f"module.{key}": each for key, each in trained.state_dict().items()}, "last.pth"
    )
    assert state_sha256(target) == state_sha256(trained)
    with pytest.raises(CheckpointError, match=r"missing key 0.weight and 1 more, unexpected key 1.weight"):
        apply_checkpoint(target, nn.Sequential(nn.ReLU(), nn.Linear(2, 2)).state_dict(), "last.pth")


class Turned(nn.Linear):
    """A layer whose rows were in another order before it had a version."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if "version" not in metadata:
            state = {key: value.flip(0) for key, value in state.items()}
        super()._load_from_state_dict(state, prefix, metadata, *others)


def test_weights_of_no_known_version_are_read_as_before() -> None:
    """Libraries know only the hash of the file: they must get the same weights of it again."""
    target = nn.Sequential(Turned(1, 2))
    state = {"0.weight": torch.tensor([[1.0], [2.0]]), "0.bias": torch.tensor([3.0, 4.0])}
    apply_checkpoint(target, state, "a.pt")
    assert {key: value.flatten().tolist() for key, value in target.state_dict().items()} == {
        "0.weight": [2.0, 1.0],
        "0.bias": [4.0, 3.0],
    }


@pytest.mark.parametrize("prefix", ["model.", "backbone.", "task.network."])
def test_a_network_inside_a_module_that_trains_it_is_found(tmp_path: Path, prefix: str) -> None:
    """The weights of a loss, or counts of metrics, are next to it in a LightningModule."""
    path, target = tmp_path / "last.ckpt", network(seed=1)
    state = {prefix + key: value for key, value in network().state_dict().items()}
    torch.save({"state_dict": {"loss.weight": torch.ones(2), **state}, "epoch": 3}, path)
    found = load_checkpoint(path, target.state_dict())
    apply_checkpoint(target, found.state, path)
    assert state_sha256(target) == state_sha256(network())
    assert found.note == (
        f"{path} has more than the network's weights: those under state_dict.{prefix[:-1]} are used"
    )
    torch.save({"state_dict": state, "epoch": 3}, path)
    target = network(seed=1)
    state, _, note = load_checkpoint(path, target.state_dict())
    apply_checkpoint(target, state, path)
    assert (state_sha256(target), note) == (state_sha256(network()), "")


def test_of_several_networks_inside_a_module_it_is_said_which_is_taken(tmp_path: Path) -> None:
    path, target = tmp_path / "last.ckpt", network(seed=1)
    state = {
        f"{prefix}.{key}": value
        for prefix in ("student", "teacher")
        for key, value in network().state_dict().items()
    }
    torch.save(state, path)
    found = load_checkpoint(path, target.state_dict())
    assert found.note == f"{path} has weights under student, teacher: the first are used; save others alone"
    del state["student.0.bias"], state["teacher.0.bias"]
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="missing key 0.weight and 7 more, unexpected key student.0"):
        apply_checkpoint(target, load_checkpoint(path, target.state_dict()).state, path)


def filled(value: float, *, width: int = 2, layers: int = 2) -> dict[str, torch.Tensor]:
    """The state of linear layers, all of whose weights are `value`."""
    linear = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return {key: torch.full_like(tensor, value) for key, tensor in linear.state_dict().items()}


def below(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{key}": tensor for key, tensor in state.items()}


@pytest.mark.parametrize("teacher", [filled(2, width=4), filled(2, layers=3)], ids=["wider", "deeper"])
def test_a_larger_network_of_the_same_names_is_not_taken(
    tmp_path: Path, teacher: dict[str, torch.Tensor]
) -> None:
    """As the teacher of a distillation, which is often before its student."""
    path = tmp_path / "last.ckpt"
    torch.save(below("teacher", teacher) | below("student", filled(1)), path)
    found = load_checkpoint(path, filled(0))
    assert found.note == f"{path} has more than the network's weights: those under student are used"
    assert {float(tensor.mean()) for tensor in found.state.values()} == {1.0}


def test_weights_without_a_prefix_come_before_those_with_one(tmp_path: Path) -> None:
    """Libraries know only the hash of the file: they must get the same weights of it again."""
    path = tmp_path / "last.ckpt"
    student = below("model", filled(1)) | {"loss.weight": torch.ones(1)}
    torch.save({"state_dict": student, "model_ema": filled(2)}, path)
    found = load_checkpoint(path, filled(0))
    assert ({float(tensor.mean()) for tensor in found.state.values()}, found.note) == ({2.0}, "")


class Stubborn(nn.Linear):
    """A layer whose own code does not load what it is given."""

    def _load_from_state_dict(self, *others: Any) -> None:
        raise ValueError("no scales")


class Lenient(nn.Linear):
    """A layer that hides what is missing, as adapters do for the weights that they add."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_load_state_dict_post_hook(lambda _, found: found.missing_keys.clear())


def test_nothing_is_left_at_its_initial_weights(tmp_path: Path) -> None:
    """Whatever a network's own code says of it."""
    state = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).state_dict()
    del state["0.num_batches_tracked"]
    with pytest.raises(
        CheckpointError,
        match=r"^checkpoint a.pt cannot be loaded into the network \(ValueError: no scales\); ",
    ):
        apply_checkpoint(nn.Sequential(nn.BatchNorm1d(2), Stubborn(2, 2)), state, "a.pt")
    target = nn.Sequential(nn.BatchNorm1d(2), Lenient())
    for others, said in (({}, "no unexpected key"), ({"2.weight": torch.ones(2)}, "unexpected key 2.weight")):
        given = {key: tensor for key, tensor in state.items() if key != "1.bias"} | others
        with pytest.raises(CheckpointError, match=f"missing key 1.bias, {said}"):
            apply_checkpoint(target, given, "a.pt")


def test_weights_of_a_layer_that_the_network_has_set_to_none_are_refused() -> None:
    """torch does not count them as unexpected."""
    target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    target.register_module("1", None)
    before = state_sha256(target)
    with pytest.raises(CheckpointError, match=r"no missing key, unexpected key 1.weight and 1 more"):
        apply_checkpoint(target, filled(1), "a.pt")
    assert state_sha256(target) == before, "it is refused before anything is loaded"


def test_a_load_state_dict_of_its_own_may_return_anything() -> None:
    class Own(nn.Linear):
        def load_state_dict(self, *others: Any, **options: Any) -> Any:
            super().load_state_dict(*others, **options)
            return self

    target = Own(2, 2)
    apply_checkpoint(target, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, "a.pt")
    assert torch.equal(target.weight, torch.ones(2, 2))


def test_old_checkpoints_without_batch_counts_are_accepted() -> None:
    state = {k: v for k, v in network().state_dict().items() if not k.endswith("num_batches_tracked")}
    apply_checkpoint(network(), state, "weights.pth")


@pytest.mark.parametrize("protocol", ["torch", 2, 4])
def test_a_checkpoint_that_needs_unpickling_is_refused_and_its_code_never_runs(
    tmp_path: Path, protocol: str | int
) -> None:
    path, marker = tmp_path / "evil.pth", tmp_path / "executed"
    if protocol == "torch":
        torch.save({"state_dict": {"weight": torch.zeros(1)}, "extra": Payload(marker)}, path)
    else:
        path.write_bytes(pickle.dumps(Payload(marker), protocol=protocol))
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path)
    assert not marker.exists()
    assert str(error.value) == (
        f"refused checkpoint {path}: it needs unpickling, which can run any code; "
        "save the state dict alone (torch.save(model.state_dict(), ...)) or as .safetensors"
    )


def test_a_whole_pickled_network_is_refused(tmp_path: Path) -> None:
    torch.save(network(), tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match="^refused checkpoint"):
        load_checkpoint(tmp_path / "whole.pt")


def test_a_missing_file_says_so() -> None:
    with pytest.raises(CheckpointError, match="^no checkpoint at nowhere.pth; check the path$"):
        load_checkpoint("nowhere.pth")


def test_a_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path)
    assert str(error.value) == f"checkpoint {tmp_path} is a folder; give the file with the weights inside it"


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "text"])
def test_a_damaged_file_says_so_in_one_line(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / name
    if name.endswith(".pth"):
        torch.save(network().state_dict(), path)
    else:
        save_file(network().state_dict(), path)
    content = {"truncated": path.read_bytes()[:500], "empty": b"", "text": b"<html>404</html>"}[damage]
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path)
    kind = "safetensors file" if name.endswith("safetensors") else "torch checkpoint"
    message = str(error.value)
    assert message.startswith(f"checkpoint {path} is not a readable {kind} (")
    assert message.endswith("): damaged, truncated or of another format; copy it again")
    assert "\n" not in message


def test_a_file_without_weights_lists_its_keys(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "best": 0.9}, tmp_path / "log.pth")
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path / "log.pth")
    assert str(error.value) == (
        f"checkpoint {tmp_path / 'log.pth'} holds no weights (keys: epoch, best); give a file "
        "that holds a state dict"
    )


def test_a_bare_tensor_is_no_state_dict(tmp_path: Path) -> None:
    torch.save(torch.zeros(3), tmp_path / "tensor.pth")
    with pytest.raises(CheckpointError, match="holds a Tensor, not a state dict; save it with"):
        load_checkpoint(tmp_path / "tensor.pth")


def test_a_checkpoint_of_another_network_names_the_first_missing_and_unexpected_key() -> None:
    state = {
        ("head" + key[1:] if key.startswith("3") else key): value
        for key, value in network().state_dict().items()
    }
    with pytest.raises(CheckpointError) as error:
        apply_checkpoint(network(), state, "w.pth")
    assert str(error.value) == (
        "checkpoint w.pth does not fit the network: missing key 3.weight and 1 more, unexpected "
        "key head.weight "
        "and 1 more; give the checkpoint of this architecture"
    )


def test_a_wrong_shape_names_the_key_and_both_shapes() -> None:
    state = network().state_dict() | {"3.weight": torch.zeros(5, 16)}
    with pytest.raises(CheckpointError) as error:
        apply_checkpoint(network(), state, "w.pth")
    assert str(error.value) == (
        "checkpoint w.pth does not fit the network: 3.weight has shape [5, 16] in the file and "
        "[2, 16] in the "
        "network; give the checkpoint of this architecture"
    )


def test_the_hash_of_a_state_tells_values_apart() -> None:
    first, second = network(), network()
    assert state_sha256(first) == state_sha256(second)
    with torch.no_grad():
        second[0].weight[0, 0, 0, 0] += 1e-6
    assert state_sha256(first) != state_sha256(second)
