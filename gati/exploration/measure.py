"""Measuring trained predictors on held-out inputs: outcomes, selectors, operating points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gati.caches import LearnedCache, build_selector, fit_selector_networks, selector_names
from gati.caches.selectors import BASELINE, NETWORK, TEMPERATURE_SCALED, fit_temperature
from gati.engine.threads import one_thread
from gati.exploration.feasible import FIRST_INPUTS, TimeLimit
from gati.exploration.library import SELECT, TrialOutcomes
from gati.exploration.memory import fitting_by, in_batches
from gati.exploration.train import Learner
from gati.exploration.views import InputSource
from gati.model.entry import INPUT, means_input
from gati.model.hooks import collect_hidden
from gati.types import OperatingPoint, TrialId

ACCURACY_LEVELS = (0.95, 0.96, 0.965, 0.97, 0.975, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975, 1.0)
_TARGETS = (0.97, 0.985, 0.99)
_LEAST_GAIN = 0.005  # hit rate that a selector must gain over the plain maximum probability
_BATCH = 250  # inputs, at most
_LONGEST_BATCH_S = 30.0


class Measured(NamedTuple):
    """A finished learned cache with its held-out outcomes; the three numbers are about the select split."""

    cache: LearnedCache
    outcomes: TrialOutcomes
    points: list[OperatingPoint]
    agreement: float
    hit_rate_at_97: float
    hit_rate_at_99: float


def base_answers(module: nn.Module, inputs: InputSource, device: torch.device) -> Tensor:
    """The base model's raw outputs [n, K] on all inputs, in float32; as `base_batches`."""
    return torch.cat(list(base_batches(module, inputs, device)))


@torch.no_grad()
def base_batches(
    module: nn.Module, inputs: InputSource, device: torch.device, limit: TimeLimit | None = None
) -> Iterator[Tensor]:
    """Yield the base model's raw outputs [b, K] on all inputs in their order, in float32.

    As many inputs at a time as memory holds, up to 250; if there is a time `limit`, no more than the network
    answers in half a minute, but at least one. If that limit might be too short, the first batches are
    smaller, so that it is told early.

    **Raises:** `DataError` if the time is too short; `ModelError` if one input does not fit into memory.
    """
    answer = _answering(module, inputs, device)
    most = _fitting(inputs, device, answer)
    input_s = 0.0 if limit is None else seconds_per_input(module, inputs, device, limit.budget.clock)
    if most * input_s > _LONGEST_BATCH_S:
        most = min(most, max(1, int(_LONGEST_BATCH_S / input_s)))
    if limit is None or limit.is_clear(input_s):
        yield from in_batches(len(inputs), most, answer)
        return
    done = 0
    first = began = limit.budget.clock()
    for batch in in_batches(len(inputs), most, answer, first=FIRST_INPUTS):
        now = limit.budget.clock()
        done += len(batch)
        # larger batches are faster; a disturbed one, or the small last one, is no reason to end
        limit.check(done, min((now - began) / len(batch), (now - first) / done))
        yield batch
        began = limit.budget.clock()


@torch.no_grad()
def seconds_per_input(
    module: nn.Module, inputs: InputSource, device: torch.device, clock: Callable[[], float], few: int = 8
) -> float:
    """Seconds per input to read a few and answer them, in one batch if memory holds it."""
    answer = _answering(module, inputs, device)
    count, most = min(few, len(inputs)), _fitting(inputs, device, answer)
    if device.type == "cuda":
        list(in_batches(count, most, answer))  # libraries choose kernels at the first call
    began = clock()
    list(in_batches(count, most, answer))
    return (clock() - began) / count


def _answering(
    module: nn.Module, inputs: InputSource, device: torch.device
) -> Callable[[npt.NDArray[np.int64]], Tensor]:
    """What answers the inputs at some indices: the base model's raw outputs, in float32."""

    def answer(indices: npt.NDArray[np.int64]) -> Tensor:
        found: Tensor = module(inputs.images(indices).to(device)).float().cpu()
        return found

    return answer


def _fitting(
    inputs: InputSource, device: torch.device, run: Callable[[npt.NDArray[np.int64]], object]
) -> int:
    """How many inputs at a time fit into memory, by what `run` needs for the indices of a few of them."""
    return _BATCH if len(inputs) < 2 else fitting_by(run, inputs.images(np.arange(1)).to(device), _BATCH)


@torch.no_grad()
def held_out_probabilities(
    module: nn.Module, inputs: InputSource, learners: Sequence[Learner], device: torch.device
) -> dict[TrialId, Tensor]:
    """Class probabilities [n, K] of each (folded) predictor, from one forward pass per batch.

    **Raises:** `ModelError` if one input does not fit into memory.
    """
    blocks = sorted({learner.block for learner in learners})
    at_the_input = blocks == [INPUT] and means_input(module, INPUT)

    def answer(indices: npt.NDArray[np.int64]) -> list[Tensor]:
        images = inputs.images(indices).to(device)
        with nullcontext({INPUT: images}) if at_the_input else collect_hidden(module, blocks) as hidden:
            if not at_the_input:
                module(images)
        asked = (learner.predictor(hidden[learner.block]) for learner in learners)
        return [logits.float().softmax(1).cpu() for logits in asked]

    found: list[Tensor] = []
    done = 0
    for batch in in_batches(len(inputs), _fitting(inputs, device, answer), answer):
        found = found or [rows.new_empty(len(inputs), rows.shape[1]) for rows in batch]
        for rows, whole in zip(batch, found, strict=True):
            whole[done : done + len(rows)] = rows
        done += len(batch[0])
    return {learner.trial_id: whole for learner, whole in zip(learners, found, strict=True)}


def accuracy_curve(
    score: npt.NDArray[np.float32], agrees: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Every distinct threshold with its number of hits and their agreement, strictest first.

    Thresholds lie half-way between adjacent scores, so that rounding on another backend cannot turn a hit of
    this set into a miss.
    """
    order = np.argsort(-score, kind="stable")
    ranked = score[order].astype(np.float64)
    last_of_equals = np.flatnonzero(np.append(ranked[:-1] > ranked[1:], True))
    hits = last_of_equals + 1
    accuracy = np.cumsum(agrees[order])[last_of_equals] / hits
    below = np.append(ranked, ranked[-1] - 1e-6)[hits]
    return (ranked[last_of_equals] + below) / 2, hits.astype(np.int64), accuracy


def hit_rate_at(score: npt.NDArray[np.float32], agrees: npt.NDArray[np.bool_], accuracy: float) -> float:
    """The largest hit rate whose agreement among hits is at least `accuracy`."""
    _, hits, accuracies = accuracy_curve(score, agrees)
    good = np.flatnonzero(accuracies >= accuracy)
    return float(hits[good[-1]] / len(score)) if len(good) else 0.0


def measure_cache(
    trial_id: TrialId,
    cache_parts: tuple[str, tuple[int, ...], nn.Module],
    probabilities: Tensor,
    base_class: npt.NDArray[np.int64],
    split: npt.NDArray[np.uint8],
    seed: int,
) -> Measured:
    """Choose the best selector for a predictor, and measure the cache on the held-out inputs.

    `cache_parts` is (variant, hidden shape, folded predictor). Only the select split is used to choose the
    selector, tabulate thresholds and count agreement: the choice among caches must not depend on the certify
    split.
    """
    variant, hidden_shape, predictor = cache_parts
    classes = probabilities.shape[1]
    predicted = probabilities.argmax(1).numpy()
    agrees = predicted == base_class
    select = split == SELECT
    name, module, score = _choose_selector(probabilities, base_class, select, seed)
    cache = LearnedCache(
        variant, hidden_shape, classes, name, predictor=predictor.cpu(), selector_module=module
    )
    chosen_score, chosen_agrees = score[select], agrees[select]
    return Measured(
        cache,
        TrialOutcomes(score, predicted.astype(np.int64)),
        _operating_points(trial_id, chosen_score, chosen_agrees),
        float(chosen_agrees.mean()),
        hit_rate_at(chosen_score, chosen_agrees, 0.97),
        hit_rate_at(chosen_score, chosen_agrees, 0.99),
    )


def selector_seconds(
    outputs: Tensor, split: npt.NDArray[np.uint8], seed: int, clock: Callable[[], float]
) -> float:
    """Seconds that choosing a selector takes, measured on the base model's outputs [n, K] with noise.

    The shorter of two runs: the first also loads what it needs, and a busy moment would be reserved for each
    trial.
    """
    noise = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(seed)) * outputs.std()
    probabilities, base_class = (outputs + noise).softmax(1), outputs.argmax(1).numpy()
    took_s = []
    for _ in range(2):
        began = clock()
        _choose_selector(probabilities, base_class, split == SELECT, seed)
        took_s.append(clock() - began)
    return min(took_s)


@torch.no_grad()
def _choose_selector(
    probabilities: Tensor, base_class: npt.NDArray[np.int64], select: npt.NDArray[np.bool_], seed: int
) -> tuple[str, nn.Module, npt.NDArray[np.float32]]:
    classes = probabilities.shape[1]
    agrees = probabilities.argmax(1).numpy() == base_class
    inside = torch.from_numpy(select)
    candidates: dict[str, tuple[nn.Module, npt.NDArray[np.float32]]] = {}
    for name in selector_names():
        if name == NETWORK:
            continue
        if name == TEMPERATURE_SCALED:
            selector: nn.Module = fit_temperature(probabilities[inside], torch.from_numpy(base_class[select]))
        else:
            selector = build_selector(name, classes).eval()
        candidates[name] = (selector, selector(probabilities).numpy().astype(np.float32))
    if select.sum() >= 200:
        with one_thread():  # these networks are too small to gain from more
            fitted = fit_selector_networks(
                probabilities[inside].clone(), torch.from_numpy(agrees[select]), seed=seed
            )
        score = fitted.network(probabilities).numpy().astype(np.float32)
        score[select] = fitted.held_out_scores.numpy()
        candidates[NETWORK] = (fitted.network, score)

    def worth(name: str) -> float:
        score = candidates[name][1][select]
        return float(np.mean([hit_rate_at(score, agrees[select], target) for target in _TARGETS]))

    best = max(candidates, key=lambda name: (worth(name), name == BASELINE))
    if worth(best) < worth(BASELINE) + _LEAST_GAIN:
        best = BASELINE
    return best, *candidates[best]


def _operating_points(
    trial_id: TrialId, score: npt.NDArray[np.float32], agrees: npt.NDArray[np.bool_]
) -> list[OperatingPoint]:
    thresholds, hits, accuracies = accuracy_curve(score, agrees)
    count = len(score)
    chosen = {int(np.searchsorted(hits, quantile * count)) for quantile in np.linspace(0.05, 1.0, 20)}
    for level in ACCURACY_LEVELS:
        good = np.flatnonzero(accuracies >= level)
        if len(good):
            chosen.add(int(good[-1]))
    return [
        OperatingPoint(
            trial_id, float(thresholds[index]), float(hits[index] / count), float(accuracies[index])
        )
        for index in sorted(chosen)
        if index < len(hits)
    ]
