"""Train many predictors at once: one frozen forward pass a batch feeds them all.

Everything random in a step is drawn from (seed, step), so a run that stops after any step and starts again
from a saved state ends with the same weights as one that never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gati.caches import distillation_loss
from gati.explore.augment import Augmentation
from gati.files import atomic_write
from gati.model.hooks import collect_hidden
from gati.types import OutputsKind, TrialId

__all__ = ["LATENESS", "Inputs", "Learner", "SharedTraining", "bfloat16_pays", "training_precision"]

LATENESS = 0.05  # by how much of an allowed time training may lag before it hurries

_WARM_UP = 0.15  # share of training in which the learning rate rises


class Inputs(Protocol):
    """What training needs of a data set."""

    def __len__(self) -> int: ...

    def images(self, indices: np.typing.NDArray[np.int64]) -> Tensor:
        """Preprocessed inputs [n, ...] of those indices."""


class Learner(NamedTuple):
    """A predictor in training, and the block whose hidden output it reads."""

    trial_id: TrialId
    block: str
    predictor: nn.Module


class SharedTraining:
    """Trains `learners` for `total_steps` batches with AdamW under a one-cycle learning rate.

    The base model is not changed: it runs in inference mode, and its hidden outputs live for one batch.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Inputs,
        learners: Sequence[Learner],
        *,
        total_steps: int,
        batch_size: int,
        seed: int,
        augmentation: Augmentation,
        outputs_kind: OutputsKind,
        device: torch.device,
        learning_rate: float = 4e-3,
    ) -> None:
        self.module, self.inputs, self.learners = module, inputs, tuple(learners)
        self.total_steps, self.batch_size, self.seed = total_steps, min(batch_size, len(inputs)), seed
        self.augmentation, self.outputs_kind, self.device = augmentation, outputs_kind, device
        self.learning_rate = learning_rate
        self.step = 0
        self.losses: dict[TrialId, float] = {}
        self._blocks = sorted({learner.block for learner in learners})
        self._parameters = [p for learner in self.learners for p in learner.predictor.parameters()]
        fused = device.type in ("cpu", "cuda")
        self._optimiser = torch.optim.AdamW(
            self._parameters, lr=learning_rate, weight_decay=1e-2, fused=fused
        )
        for learner in self.learners:
            learner.predictor.to(device).train()

    @property
    def images_seen(self) -> int:
        """Inputs each learner has been shown so far."""
        return self.step * self.batch_size

    def run(self, share_of_time: Callable[[], float] | None = None) -> Iterator[float]:
        """Yield the mean loss of all learners after each batch, from the current step to the last.

        `share_of_time` says how much of an allowed time has passed. As long as the steps keep up with it, it
        changes nothing, so that the same seed gives the same weights; once they lag by more than
        `LATENESS`, the learning rate falls with the time, and training stops when 1 + `LATENESS` of it is
        used. Closing the iterator removes every hook.
        """
        with collect_hidden(self.module, self._blocks) as hidden:
            while self.step < self.total_steps:
                share = self.step / self.total_steps
                if share_of_time is not None:
                    share = max(share, share_of_time() - LATENESS)
                if share >= 1:
                    return
                yield self._advance(hidden, share)

    def _advance(self, hidden: Mapping[str, Tensor], share: float) -> float:
        images = self._batch(self.step)
        with training_precision(self.device), torch.no_grad():
            base_logits = self.module(images).float()
        if self.outputs_kind == "probabilities":
            base_logits = base_logits.clamp_min(1e-12).log()
        for group in self._optimiser.param_groups:
            group["lr"] = self._learning_rate_at(share)
        self._optimiser.zero_grad(set_to_none=False)
        total = 0.0
        for learner in self.learners:
            with training_precision(self.device):
                logits = learner.predictor(hidden[learner.block].float())
            loss = distillation_loss(logits.float(), base_logits)
            loss.backward()
            value = float(loss.detach())
            total += value
            self._note_loss(learner.trial_id, value)
        self._optimiser.step()
        self.step += 1
        return total / max(1, len(self.learners))

    def _batch(self, step: int) -> Tensor:
        per_epoch = max(1, len(self.inputs) // self.batch_size)
        epoch, position = divmod(step, per_epoch)
        order = np.random.default_rng((self.seed, 1, epoch)).permutation(len(self.inputs))
        indices = order[position * self.batch_size : (position + 1) * self.batch_size]
        images = self.inputs.images(np.sort(indices))
        generator = np.random.default_rng((self.seed, 2, step))
        return self.augmentation(images, generator).to(self.device)

    def _learning_rate_at(self, share: float) -> float:
        if share < _WARM_UP:
            return self.learning_rate * max(0.04, share / _WARM_UP)
        falling = (share - _WARM_UP) / (1 - _WARM_UP)
        return self.learning_rate * max(0.005, 0.5 * (1 + math.cos(math.pi * falling)))

    def _note_loss(self, trial_id: TrialId, value: float) -> None:
        before = self.losses.get(trial_id)
        self.losses[trial_id] = value if before is None else 0.95 * before + 0.05 * value

    # State: plain tensors, so that nothing is ever unpickled --------------------------------------------

    def save(self, path: Path) -> None:
        """Write weights, optimiser moments and the step number, atomically."""
        tensors = dict(self._tensors())
        tensors["step"] = torch.tensor(self.step)
        tensors["losses"] = torch.tensor([self.losses.get(x.trial_id, 0.0) for x in self.learners])
        atomic_write(path, lambda temporary: save_file(tensors, temporary))

    def restore(self, path: Path) -> None:
        """Go on from what `save` wrote for the same learners."""
        saved = load_file(path)
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters):
                state = self._optimiser.state[parameter]
                state["step"] = saved[f"optimiser.{index}.step"].clone()
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment] = saved[f"optimiser.{index}.{moment}"].to(parameter.device)
            for learner in self.learners:
                weights = learner.predictor.state_dict()
                for name, tensor in weights.items():
                    tensor.copy_(saved[f"{learner.trial_id}.{name}"])
        self.step = int(saved["step"])
        if self.step:
            values = saved["losses"].tolist()
            self.losses = {x.trial_id: value for x, value in zip(self.learners, values, strict=True)}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for learner in self.learners:
            for name, tensor in learner.predictor.state_dict().items():
                yield f"{learner.trial_id}.{name}", tensor.detach().cpu().contiguous()
        for index, parameter in enumerate(self._parameters):
            state: Mapping[str, Tensor] = self._optimiser.state.get(parameter, {})
            yield f"optimiser.{index}.step", state.get("step", torch.tensor(0.0)).cpu()
            for moment in ("exp_avg", "exp_avg_sq"):
                # Before the first step there are none; each gets zeros of its own, as files share nothing.
                found = state[moment] if moment in state else torch.zeros_like(parameter)
                yield f"optimiser.{index}.{moment}", found.detach().cpu().contiguous()


def bfloat16_pays() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    capabilities = torch.backends.cpu.get_cpu_capability()
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return capabilities.startswith("AVX512") and supported is not None and bool(supported())


@contextmanager
def training_precision(device: torch.device) -> Iterator[None]:
    """Train in bfloat16 where the hardware gains by it; measuring is always in float32."""
    enabled = device.type == "cuda" or (device.type == "cpu" and bfloat16_pays())
    with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
        yield
