"""Selectors map a predictor's class probabilities to one score; `score >= threshold` is a hit.

Every selector is a module [B, K] -> [B] whose score grows with the probability that predictor and base model
agree. The trained network is used only if it beats the simple selectors on unseen inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from gati.caches.losses import selector_loss
from gati.errors import VariantError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

BASELINE = "maximum-probability"
TEMPERATURE_SCALED = "temperature-scaled"
NETWORK = "network"

_TEMPERATURES = torch.logspace(-2.0, 3.0, 61, base=2.0)  # from 1/4 to 8
_FOLDS = 5


class MaximumProbability(nn.Module):
    """The largest class probability."""

    def forward(self, probabilities: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
        """Score in [1/K, 1]."""
        return probabilities.amax(1)


class Margin(nn.Module):
    """The largest class probability minus the second largest."""

    def forward(self, probabilities: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
        """Score in [0, 1]."""
        largest = probabilities.topk(2, dim=1).values
        return largest[:, 0] - largest[:, 1]


class NegativeEntropy(nn.Module):
    """The negative entropy of the class probabilities, in nats (BranchyNet's criterion, negated)."""

    def forward(self, probabilities: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
        """Score in [-ln K, 0]."""
        return (probabilities * probabilities.clamp_min(1e-12).log()).sum(1)


class TemperatureScaled(nn.Module):
    """The largest class probability after dividing logits by a fitted temperature (Guo et al. 2017)."""

    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, probabilities: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
        """Score in [1/K, 1]."""
        # log-probabilities equal the logits up to a constant per row, which softmax ignores
        return (probabilities.clamp_min(1e-12).log() / self.temperature).softmax(1).amax(1)


class SelectorNetwork(nn.Module):
    """Sorted log-probabilities and the top class -> 16 units -> probability of agreement.

    The top class matters: at the same probability, agreement may be higher for ships than for cats.
    """

    UNITS = 16
    LARGEST = 5

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.hidden = nn.Linear(min(self.LARGEST, classes), self.UNITS)
        self.output = nn.Linear(self.UNITS, 1)
        self.class_bias = nn.Parameter(torch.zeros(classes))

    @classmethod
    def features(
        cls, probabilities: Float[Tensor, "... k"]
    ) -> tuple[Float[Tensor, "... f"], Int[Tensor, ...]]:
        """Return features similar to log-odds, and the top class."""
        largest = probabilities.topk(min(cls.LARGEST, probabilities.shape[-1]), dim=-1)
        return cls._feature(largest.values), largest.indices[..., 0]

    @staticmethod
    def _feature(probability: Tensor) -> Tensor:
        return probability.clamp_min(1e-7).log()

    def forward(self, probabilities: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
        """Score in [0, 1]."""
        logits, leading = self._logits(probabilities)
        logits = logits + self.class_bias[leading]
        total = probabilities.sum(1)
        # NaN must propagate and miss: the ReLU of some engines turns it into 0, and OpenVINO compares it
        # as >= 0. A sum preserves NaN everywhere.
        return torch.sigmoid(logits) + (total - total)

    def _logits(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B] without the class bias, and the top classes [B]."""
        features, leading = self.features(probabilities)
        return self.output(torch.relu(self.hidden(features))).squeeze(1), leading


class _UnsortedSelectorNetwork(SelectorNetwork):
    """The same with reductions, which compilers fuse, instead of sorting and small matrix products."""

    def _logits(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        classes = torch.arange(self.classes, device=probabilities.device)
        rest, units = probabilities, torch.as_tensor(self.hidden.bias)
        ranked: list[Tensor] = []
        for place in range(self.hidden.in_features):
            largest, at = rest.max(1)
            units = units + self._feature(largest)[:, None] * self.hidden.weight[:, place]
            rest = rest.masked_fill(classes == at[:, None], -1.0)
            ranked.append(at)
        return (torch.relu(units) * self.output.weight[0]).sum(1) + self.output.bias, ranked[0]


def unsorted(selector: nn.Module) -> nn.Module:
    """Return the selector written as reductions, sharing weights; unchanged if it does not sort."""
    if type(selector) is not SelectorNetwork:
        return selector
    other = copy.copy(selector)
    other.__class__ = _UnsortedSelectorNetwork
    return other


_SELECTORS: dict[str, Callable[[int], nn.Module]] = {
    BASELINE: lambda classes: MaximumProbability(),
    "margin": lambda classes: Margin(),
    "entropy": lambda classes: NegativeEntropy(),
    TEMPERATURE_SCALED: lambda classes: TemperatureScaled(),
    NETWORK: SelectorNetwork,
}


def selector_names() -> tuple[str, ...]:
    """Return the names of all selectors, the baseline first."""
    return tuple(_SELECTORS)


def build_selector(name: str, classes: int) -> nn.Module:
    """Build a selector [B, classes] -> [B]. Raises `VariantError` for an unknown name."""
    if name not in _SELECTORS:
        raise VariantError(f"unknown selector {name!r}: choose one of {', '.join(_SELECTORS)}")
    return _SELECTORS[name](classes)


def fit_temperature(probabilities: Float[Tensor, "n k"], base_class: Int[Tensor, " n"]) -> TemperatureScaled:
    """Fit the temperature that maximises the likelihood of the base model's classes [n], given [n, K].

    A single number cannot overfit to individual inputs, so its scores on the same inputs are unbiased.
    """
    scaled = TemperatureScaled()
    logits = probabilities.float().clamp_min(1e-12).log()
    losses = torch.stack(
        [nn.functional.cross_entropy(logits / temperature, base_class) for temperature in _TEMPERATURES]
    )
    scaled.temperature.copy_(_TEMPERATURES[losses.argmin()])
    return scaled.eval()


class FittedNetworks(NamedTuple):
    """A selector network fitted on all inputs, and out-of-fold scores."""

    network: SelectorNetwork
    held_out_scores: Float[Tensor, " n"]


def fit_selector_networks(
    probabilities: Float[Tensor, "n k"],
    agrees: Bool[Tensor, " n"],
    *,
    seed: int,
    steps: int = 200,
) -> FittedNetworks:
    """Fit one network on all n inputs, and one per fold on the other folds for out-of-fold scores.

    All networks are trained together, full batch, with the selector loss and weight decay on the class bias.
    Deterministic for a given seed.
    """
    count, classes = probabilities.shape
    generator = torch.Generator().manual_seed(seed)
    fold = torch.randperm(count, generator=generator) % _FOLDS
    used = torch.stack([fold != index for index in range(_FOLDS)] + [torch.ones(count, dtype=torch.bool)])

    features, leading = SelectorNetwork.features(probabilities.float())
    models = _FOLDS + 1
    with torch.enable_grad():
        bound = features.shape[1] ** -0.5
        first = torch.empty(1, SelectorNetwork.UNITS, features.shape[1]).uniform_(
            -bound, bound, generator=generator
        )
        second = torch.empty(1, SelectorNetwork.UNITS, 1).uniform_(-0.25, 0.25, generator=generator)
        parameters = [
            first.repeat(models, 1, 1).requires_grad_(),
            torch.zeros(models, 1, SelectorNetwork.UNITS).requires_grad_(),
            second.repeat(models, 1, 1).requires_grad_(),
            torch.zeros(models, 1).requires_grad_(),
            torch.zeros(models, classes).requires_grad_(),
        ]

        def score_logits() -> Tensor:
            weight, bias, out_weight, out_bias, class_bias = parameters
            hidden = torch.relu(torch.einsum("nf,muf->mnu", features, weight) + bias)
            return (hidden @ out_weight).squeeze(2) + out_bias + class_bias[:, leading]

        optimiser = torch.optim.Adam(parameters, lr=0.03)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(steps):
            optimiser.zero_grad()
            losses = selector_loss(score_logits(), agrees, counted=used)
            (losses.sum() + 0.01 * parameters[4].square().sum()).backward()
            optimiser.step()
            schedule.step()
        with torch.no_grad():
            scores = torch.sigmoid(score_logits())
        held_out = scores[fold, torch.arange(count)]
        return FittedNetworks(_as_module(parameters, classes), held_out)


def _as_module(parameters: list[Tensor], classes: int) -> SelectorNetwork:
    network = SelectorNetwork(classes).eval().requires_grad_(False)
    weight, bias, out_weight, out_bias, class_bias = (parameter.detach()[-1] for parameter in parameters)
    network.hidden.weight.copy_(weight)
    network.hidden.bias.copy_(bias[0])
    network.output.weight.copy_(out_weight.T)
    network.output.bias.copy_(out_bias)
    network.class_bias.copy_(class_bias)
    return network
