"""Learned caches: predictors, selectors, their losses and storage."""

from gati.caches.cache import LearnedCache
from gati.caches.companions import Companion, Reader, Reading, is_companion
from gati.caches.glances import SceneHead, glance, scene
from gati.caches.losses import distillation_loss, feature_loss, selector_loss
from gati.caches.predictors import (
    DEFAULT_VARIANTS,
    PUBLISHED_VARIANTS,
    AverageAndMaximum,
    FeatureMap,
    build_predictor,
    expand_variants,
    feature_map,
    fold_normalisation,
    parse_variant,
    predictor_families,
    reads_input,
    register_predictor,
    runs_in_order,
)
from gati.caches.reduced import REDUCED, ReducedNetwork, default_reduced, is_reduced
from gati.caches.selectors import build_selector, fit_selector_networks, selector_names
from gati.caches.storage import load_cache, save_cache, separate_weights
from gati.caches.students import student, student_operations, student_widths
from gati.caches.tokens import TOKEN_VARIANTS, FirstToken, TokenMean, token_students

__all__ = [
    "DEFAULT_VARIANTS",
    "PUBLISHED_VARIANTS",
    "REDUCED",
    "TOKEN_VARIANTS",
    "AverageAndMaximum",
    "Companion",
    "FeatureMap",
    "FirstToken",
    "LearnedCache",
    "Reader",
    "Reading",
    "ReducedNetwork",
    "SceneHead",
    "TokenMean",
    "build_predictor",
    "expand_variants",
    "build_selector",
    "default_reduced",
    "distillation_loss",
    "feature_loss",
    "feature_map",
    "fit_selector_networks",
    "fold_normalisation",
    "glance",
    "is_companion",
    "is_reduced",
    "load_cache",
    "parse_variant",
    "predictor_families",
    "reads_input",
    "register_predictor",
    "runs_in_order",
    "save_cache",
    "scene",
    "selector_loss",
    "selector_names",
    "separate_weights",
    "student",
    "student_operations",
    "student_widths",
    "token_students",
]
