"""Candidates: the caches that may pay off, chosen by their cost before any training.

Blocks and variants that the user names are used as they are. The default is students at the input, or the
reduced network if that costs little, and a few predictors at blocks that are spaced evenly in time. Every
trial that is skipped has a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gati.caches import (
    DEFAULT_VARIANTS,
    REDUCED,
    TOKEN_VARIANTS,
    LearnedCache,
    ReducedNetwork,
    build_predictor,
    default_reduced,
    expand_variants,
    is_companion,
    is_reduced,
    parse_variant,
    reads_input,
    token_students,
)
from gati.caches.predictors import is_of_gati
from gati.caches.selectors import BASELINE
from gati.caches.students import student_widths
from gati.costs.least import Arithmetic
from gati.costs.lengths import lookup_at_lengths
from gati.errors import GatiError, VariantError, one_line
from gati.exploration.memory import free_bytes, is_lack_of_memory
from gati.exploration.network import ROUNDING
from gati.exploration.schedule import (
    MOST_BYTES,
    choose_places,
    dearer_than_a_student,
    heaviest,
    places_for,
    too_dear,
    too_heavy,
    too_large,
    too_slow,
    widest_as_fast,
)
from gati.model.entry import INPUT_KIND
from gati.model.inputs import TensorInputs
from gati.model.segments import TracedModel
from gati.types import BlockProfile, Profile, Trial, TrialId

STUDENT = "student"  # without a number: sizes that fit the base model


@dataclass(frozen=True)
class Specification:
    """One future trial: its variant, its block, and its cost as known before training."""

    trial: Trial
    hidden_shape: tuple[int, ...]


class Wanted(NamedTuple):
    """The user's request: trials are chosen from `defaults`; all of `named` that can pay off are trained."""

    defaults: tuple[str, ...]
    listed: tuple[str, ...]  # by the user; what is a default for one network need not be one for another
    all_blocks: bool  # default exits go to every block, because the user named the blocks
    students: int  # how many sizes of students to train by default

    @property
    def named(self) -> tuple[str, ...]:
        """The variants that the user named and that are not defaults."""
        return tuple(each for each in self.listed if each not in self.defaults)

    @property
    def variants(self) -> tuple[str, ...]:
        """Defaults, then named variants."""
        return (*self.defaults, *self.named)


class UntrainedCosts(NamedTuple):
    """The cost of an untrained predictor: its number of weights, and milliseconds per lookup if measured."""

    parameters: int
    lookup_ms: float | None = None


Measure = Callable[[str, tuple[int, ...]], UntrainedCosts]

_UNKNOWN = UntrainedCosts(0)


def wanted(variants: Iterable[str] | None, blocks: str | None, students: int) -> Wanted:
    """Turn the user's options into a request; `default` among `variants` stands for the default choice.

    If blocks are named and variants are not, there are no students, since these sit before all blocks.
    """
    names = ("default",) if variants is None else tuple(variants)
    defaults: tuple[str, ...] = DEFAULT_VARIANTS if "default" in names else ()
    if blocks is not None and variants is None:
        defaults = tuple(each for each in defaults if not reads_input(each))
    listed = expand_variants(name for name in names if name != "default")
    return Wanted(defaults, listed, blocks is not None, students)


def trial_name(block: str, variant: str) -> TrialId:
    """A trial's name, usable in file names: `layer2.3` and `conv(3,1)` give `layer2.3--conv-3-1`."""
    block = block.replace("/", "~")  # modules may be named so
    if is_companion(variant):
        return TrialId(f"{block}--{variant.replace('(', '-').rstrip(')')}")
    family, numbers = parse_variant(variant)
    return TrialId("--".join((block, "-".join((family, *map(str, numbers))))))


def check_names(variants: Iterable[str]) -> None:
    """Raise `VariantError` for two of the variants whose trials would have one name, and so one file."""
    known: dict[TrialId, str] = {}
    for variant in variants:
        other = known.setdefault(name := trial_name("", variant), variant)
        if parse_variant(other) != parse_variant(variant):
            raise VariantError(
                f"the caches {other} and {variant} would both be stored as {name.lstrip('-')}: register one "
                "of them under another name, such as one that does not end in a number"
            )


def measured_costs(traced: TracedModel, module: nn.Module, base_ms: float) -> Measure:
    """Return a function that measures untrained lookups, once per variant and shape of hidden output.

    `base_ms` is the base model's time, to which lookups are relative. That function raises `VariantError` for
    a variant that cannot be built or run.
    """
    known: dict[tuple[str, tuple[int, ...]], UntrainedCosts] = {}

    def measure(variant: str, shape: tuple[int, ...]) -> UntrainedCosts:
        if (variant, shape) not in known:
            predictor = _untrained_reduced(traced, module, variant) if is_reduced(variant) else None
            place = None if reads_input(variant) else _block_of_shape(traced, shape)

            def read(each: TracedModel) -> Tensor:
                return each.example() if place is None else each.hidden_example(place)

            with _refusing(variant, shape):
                cache = LearnedCache(variant, shape, traced.classes, BASELINE, predictor=predictor)
                cache.to(traced.device)
                _check_answers(cache, read(traced))
                lookup_ms = lookup_at_lengths(traced, cache, read, base_ms)
            known[variant, shape] = UntrainedCosts(_weights(cache), lookup_ms)
        return known[variant, shape]

    return measure


@contextmanager
def _refusing(variant: str, shape: tuple[int, ...]) -> Iterator[None]:
    """Inside the context, an error of a predictor, which may be the user's code, is a `VariantError`."""
    try:
        yield
    except (GatiError, MemoryError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        raise VariantError(
            f"variant {variant} cannot read a hidden output of shape {list(shape)} ({one_line(error)}); fix "
            "its forward, or leave it out"
        ) from error


@torch.inference_mode()
def _check_answers(cache: LearnedCache, hidden: Tensor) -> None:
    """Check that a lookup answers `hidden` [1, ...] with scores of all classes, and alike in a batch.

    Outcomes are recorded in batches, and certified, but requests come one at a time.

    **Raises:** `VariantError`.
    """
    logits = cache.predictor(hidden.clone())
    shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if shape != [1, cache.classes]:
        raise VariantError(
            f"variant {cache.variant} returns {shape} for one input; return logits of shape "
            f"[1, {cache.classes}], one for each class"
        )
    # zeros are valid in arrays, too, also as codes; of integers, they could be sequences without an element
    other = torch.zeros_like(hidden) if hidden.is_floating_point() else hidden
    among = cache.predictor(torch.cat((hidden, other)))[:1]
    if (among - logits).abs().amax() > ROUNDING[hidden.device.type] * logits.abs().amax():
        raise VariantError(
            f"variant {cache.variant} answers an input otherwise among others than alone, or otherwise each "
            "time; let its forward depend on nothing but the input"
        )


def _block_of_shape(traced: TracedModel, shape: tuple[int, ...]) -> str:
    """A block whose hidden output has that shape."""
    kinds = traced.block_kinds
    return next(
        name for name, own in traced.hidden_shapes.items() if own == shape and kinds[name] != INPUT_KIND
    )


def _untrained_reduced(traced: TracedModel, module: nn.Module, variant: str) -> nn.Module:
    example = torch.cat((traced.example(), traced.example()))
    try:
        return ReducedNetwork.of(module, variant, example, "logits").companion(example)
    except VariantError:
        raise
    except Exception as error:  # copying and tracing the user's network may raise anything
        raise VariantError(f"variant {variant} cannot be built ({one_line(error)}); leave it out") from error


def specify(
    traced: TracedModel,
    module: nn.Module,
    profile: Profile,
    asked: Wanted,
    measure: Measure,
) -> tuple[Specification, ...]:
    """Return all trials in forward order of blocks, each to be trained or skipped with a reason.

    **Raises:** `VariantError` for a variant that was named and cannot be built.
    """
    chooser = _Chooser(traced, module, profile, asked, measure)
    before = [block for block in profile.blocks if block.kind == INPUT_KIND]
    behind = [block for block in profile.blocks if block.kind != INPUT_KIND]
    found = [row for block in before for row in chooser.at_the_input(block)]
    first = sum(row.trial.status == "trained" for row in found)
    shares = [block.reach_ms / profile.base_ms for block in behind]
    everywhere = tuple(range(len(behind)))
    places = everywhere if asked.all_blocks else choose_places(shares, places_for(first))
    for place, block in enumerate(behind):
        for variant in asked.variants:
            if reads_input(variant):
                continue
            if variant in asked.named:
                found.append(chooser.named(block, variant))
            elif place in places:
                found.append(chooser.default(block, variant))
            else:
                where = f"not one of the {len(places)} blocks that are spaced evenly in time"
                found.append(_row(block, variant, f"{where}: name it with --blocks"))
    # `grid(64)` and `grid( 64)` are one trial; named variants are last, so a named one stays
    return tuple({row.trial.trial_id: row for row in found}.values())


def for_tokens(asked: Wanted, traced: TracedModel, tensors: TensorInputs | None) -> Wanted:
    """Replace the defaults for a network that reads tokens by variants that read sequences.

    A default that the user also named, such as `grid(256)`, stays as a named one.
    """
    shapes = [traced.hidden_shapes[name] for name in traced.blocks if traced.block_kinds[name] != INPUT_KIND]
    if tensors is None or traced.dtype.is_floating_point:
        return asked
    sequences = all(len(shape) == 2 for shape in shapes)
    at_the_input = any(map(reads_input, asked.defaults))
    behind = [each for each in asked.defaults if not reads_input(each)]
    students = token_students(tensors) if at_the_input else ()
    return asked._replace(defaults=(*students, *(TOKEN_VARIANTS if behind and sequences else behind)))


class _Chooser:
    """Makes rows of the trials table from the costs of the base model, its blocks and the lookups."""

    def __init__(
        self, traced: TracedModel, module: nn.Module, profile: Profile, asked: Wanted, measure: Measure
    ) -> None:
        self.traced, self.profile, self.asked, self.measure = traced, profile, asked, measure
        self.module = module
        self.limit_bytes = heaviest(_weights(module))

    def named(self, block: BlockProfile, variant: str) -> Specification:
        """A variant that the user named, unless it is too large or its lookup takes too long to pay."""
        if not is_reduced(variant) and is_of_gati(variant):  # others may do more than build
            with suppress(VariantError):  # which measuring tells, if it is none of counting
                parameters = self._weights_of(variant, block)
                if reason := too_large(parameters, free_bytes(self.traced.device)):
                    return _row(block, variant, reason, UntrainedCosts(parameters))
        costs = self.measure(variant, block.output_shape)
        return _row(block, variant, too_slow(costs.lookup_ms or 0.0, block, self.profile.base_ms), costs)

    def default(self, block: BlockProfile, variant: str) -> Specification:
        """A default exit at one of the chosen blocks."""
        try:
            parameters = self._weights_of(variant, block)
        except VariantError as error:
            return _row(block, variant, str(error))
        if reason := too_heavy(parameters, self.limit_bytes):
            return _row(block, variant, reason, UntrainedCosts(parameters))
        return self.named(block, variant)

    def at_the_input(self, block: BlockProfile) -> list[Specification]:
        """The variants that read the input: all that were named, and as many default ones as requested."""
        rows: list[Specification] = []
        for variant in (each for each in self.asked.variants if reads_input(each)):
            try:
                self._check_readable(variant)
                if variant == REDUCED:
                    rows += self._reduced(block)
                elif variant == STUDENT:
                    instead = any(is_reduced(row.trial.variant) and not row.trial.reason for row in rows)
                    instead = instead and variant not in self.asked.named
                    rows += self._default_students(block, self.asked.students - instead)
                else:
                    rows.append(self.named(block, variant))
            except VariantError as error:
                if variant in self.asked.named:
                    raise
                rows.append(_row(block, variant, str(error)))
        return list({row.trial.trial_id: row for row in rows}.values())

    def _check_readable(self, variant: str) -> None:
        if parse_variant(variant)[0] in (STUDENT, REDUCED) and not self.traced.dtype.is_floating_point:
            raise VariantError(
                f"{variant} reads floating-point inputs, but the network takes integers: leave it out"
            )

    def _reduced(self, block: BlockProfile) -> list[Specification]:
        variant = default_reduced(self.module, self.traced.example())
        if variant is None:
            if REDUCED in self.asked.named:
                raise VariantError(
                    f"the images are so small, or the blocks so alike, that {REDUCED} needs a number of "
                    f"pixels, and of blocks if not all, such as {REDUCED}(24) or {REDUCED}(24,3)"
                )
            return []
        costs = self.measure(variant, block.output_shape)
        reason = dearer_than_a_student(costs.lookup_ms or 0.0, self.profile.base_ms)
        return [_row(block, variant, reason, costs)]

    def _default_students(self, block: BlockProfile, count: int) -> list[Specification]:
        shape, classes = block.output_shape, self.traced.classes
        widths = student_widths(shape, classes, Arithmetic(self.traced).base)
        if not widths:
            raise VariantError("the network is so small that a student would cost nearly as much")
        costs: dict[int, UntrainedCosts] = {}
        reasons: dict[int, str] = {}
        for width in widths:
            variant = f"{STUDENT}({width})"
            costs[width] = UntrainedCosts(self._weights_of(variant, block))
            reasons[width] = too_heavy(costs[width].parameters, MOST_BYTES)
            if not reasons[width]:
                costs[width] = self.measure(variant, shape)
                reasons[width] = too_dear(costs[width].lookup_ms or 0.0, self.profile.base_ms)
        fitting = [width for width in widths if not reasons[width]]
        # In the time that one of twice its arithmetic needs, a narrow student learns as much, and its lookup
        # costs every input less. Wider ones know more only if there is time for several.
        chosen = fitting[:count]
        if len(chosen) == 1:  # on a GPU, wider ones often take no longer
            chosen = [widest_as_fast(chosen[0], {width: costs[width].lookup_ms or 0.0 for width in fitting})]
        left_out = f"the budget is enough for {len(chosen)} of {len(fitting)} sizes: name it with --variants"
        if not count:
            left_out = "the reduced network is trained instead: name it with --variants"
        reasons |= {width: left_out for width in fitting if width not in chosen}
        return [_row(block, f"{STUDENT}({width})", reasons[width], costs[width]) for width in widths]

    def _weights_of(self, variant: str, block: BlockProfile) -> int:
        """The number of weights, counted on the meta device: allocating large predictors takes time."""
        with torch.device("meta"):
            return _weights(build_predictor(variant, block.output_shape, self.traced.classes))


def _weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _row(block: BlockProfile, variant: str, reason: str, costs: UntrainedCosts = _UNKNOWN) -> Specification:
    trial = Trial(
        trial_id=trial_name(block.name, variant),
        block_index=block.index,
        block=block.name,
        variant=variant,
        status="skipped" if reason else "trained",
        reason=reason,
        parameters=costs.parameters,
        memory_bytes=4 * costs.parameters,
        lookup_ms=costs.lookup_ms,
    )
    return Specification(trial, block.output_shape)
