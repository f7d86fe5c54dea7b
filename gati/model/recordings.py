"""Recordings in WAV and FLAC files, read without resampling."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from gati.errors import DataError, one_line
from gati.model.preprocess import Preprocessing

__all__ = [
    "RECORDING_SUFFIXES",
    "RecordingFolder",
    "load_recordings",
    "read_recording",
    "refuse_recordings",
]

RECORDING_SUFFIXES = frozenset({".wav", ".flac"})

_LARGEST_BYTES = 256 << 20  # of a file
_KEPT_BYTES = 256 << 20  # of spectrograms
_LABELLED = re.compile(r"([^_]+)_.+")  # as in 7_jackson_32.wav


class RecordingFolder(Dataset[Any]):
    """A folder of recordings as spectrograms float32 [1, mels, frames], with class numbers if labelled.

    It holds one folder per class, or recordings directly, which are labelled if all are named
    `{label}_....wav`. Classes are numbered in sorted order, numerically if all names are numbers.
    """

    def __init__(self, folder: Path, preprocessing: Preprocessing, what: str) -> None:
        self._preprocessing = preprocessing
        named = _by_folder(folder) or _by_name(folder)
        if not named:
            raise DataError(
                f"{what}: no recordings ({', '.join(sorted(RECORDING_SUFFIXES))}) in {folder}; give a folder "
                "with one folder per class, or files named {label}_....wav"
            )
        self.paths = [path for path, _ in named]
        labels = [label for _, label in named if label is not None]
        self.classes: list[str] | None = sorted(set(labels), key=_place) if labels else None
        self.targets = None if self.classes is None else [self.classes.index(label) for label in labels]
        self._kept: dict[int, Tensor] = {}
        self._room_bytes = _KEPT_BYTES

    def __len__(self) -> int:
        """Return the number of recordings."""
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        """Return a spectrogram, with its class number if labelled. Raises `DataError`."""
        found = self._spectrogram(index)
        return found if self.targets is None else (found, self.targets[index])

    def _spectrogram(self, index: int) -> Tensor:
        if index in self._kept:
            return self._kept[index]
        found = load_recordings([self.paths[index]], self._preprocessing)[0]
        if found.nbytes <= self._room_bytes:
            self._kept[index] = found
            self._room_bytes -= found.nbytes
        return found


def load_recordings(paths: Sequence[Path], preprocessing: Preprocessing) -> Tensor:
    """Read recordings as one batch of the network's inputs, float32 [n, 1, mels, frames].

    **Raises:** `DataError` as `read_recording`, and for a sample rate other than the front end's.
    """
    sound = preprocessing.sound
    if sound is None:
        raise DataError(
            "the network has no spectrogram front end for recordings: give --sample-rate and --seconds"
        )
    waves = []
    for path in paths:
        rate, wave = read_recording(path)
        if rate != sound.sample_rate:
            raise DataError(
                f"{path} has {rate} samples a second and the network's front end takes {sound.sample_rate}: "
                f"resample it, for example with ffmpeg -ar {sound.sample_rate}"
            )
        waves.append(sound.fitted(wave))
    return preprocessing.from_waves(torch.stack(waves))


def refuse_recordings(folder: Path, what: str) -> None:
    """Raise `DataError` if a folder that should hold images has recordings."""
    if _recording_files(folder, "**/*"):
        raise DataError(
            f"{what}: {folder} holds recordings; describe the network's input: --sample-rate and --seconds"
        )


def _recording_files(folder: Path, pattern: str) -> list[Path]:
    """Return the recordings of a folder that match a pattern, sorted."""
    return sorted(
        path for path in folder.glob(pattern) if path.suffix.lower() in RECORDING_SUFFIXES and path.is_file()
    )


def read_recording(path: Path) -> tuple[int, NDArray[np.float32]]:
    """Return the sample rate in hertz and mono samples float32 [n] in -1..1, the mean of the channels.

    **Raises:** `DataError` for a file that is missing, too large, damaged or empty.
    """
    if not path.is_file():
        raise DataError(f"no recording at {path}; check the path")
    if path.stat().st_size > _LARGEST_BYTES:
        raise DataError(f"recording {path} has more than {_LARGEST_BYTES >> 20} MiB; cut it into pieces")
    rate, samples = _read_wav(path) if path.suffix.lower() == ".wav" else _read_flac(path)
    if len(samples) == 0:
        raise DataError(f"recording {path} is empty; remove it")
    wave = _scaled(samples).reshape(len(samples), -1).mean(1, dtype=np.float32)
    if not np.isfinite(wave).all():
        raise DataError(f"recording {path} has NaN or infinite samples; record or convert it again")
    return rate, wave


def _read_wav(path: Path) -> tuple[int, NDArray[Any]]:
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)  # chunks without sound
            rate, samples = wavfile.read(path)
    except Exception as error:  # a damaged header fails in many ways
        raise DataError(
            f"recording {path} is not a readable WAV ({one_line(error)}); copy or convert it again"
        ) from error
    return int(rate), samples


def _read_flac(path: Path) -> tuple[int, NDArray[Any]]:
    if find_spec("soundfile") is None:
        raise DataError(f"reading {path} needs soundfile: pip install 'gati[audio]', or convert it to WAV")
    import soundfile

    try:
        samples, rate = soundfile.read(path, dtype="float32")
    except (soundfile.SoundFileError, OSError, ValueError) as error:
        raise DataError(f"recording {path} is damaged ({one_line(error)}); copy it again") from error
    return int(rate), samples


def _scaled(samples: NDArray[Any]) -> NDArray[Any]:
    """Scale integers to -1..1; floating point samples already are."""
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128.0) / 128.0
    if np.issubdtype(samples.dtype, np.integer):
        return samples / -float(np.iinfo(samples.dtype).min)
    return samples


def _by_folder(folder: Path) -> list[tuple[Path, str | None]]:
    classes = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return [(path, entry.name) for entry in sorted(classes) for path in _recording_files(entry, "**/*")]


def _by_name(folder: Path) -> list[tuple[Path, str | None]]:
    paths = _recording_files(folder, "*")
    matches = [_LABELLED.fullmatch(path.stem) for path in paths]
    labels = [match[1] for match in matches if match is not None]
    return list(zip(paths, labels if len(labels) == len(paths) else [None] * len(paths), strict=True))


def _place(label: str) -> tuple[bool, int, str]:
    """Sort numbers first, by value."""
    return not label.isdecimal(), int(label) if label.isdecimal() else 0, label
