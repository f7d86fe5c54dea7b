"""Recordings in WAV and FLAC files, on disk or in memory, read without resampling."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from gati.errors import DataError, one_line
from gati.files import is_file
from gati.model.folders import files_with, is_folder, list_files, readable
from gati.model.kept import KeptInputs
from gati.model.preprocess import Preprocessing
from gati.model.sound import LogMel

RECORDING_SUFFIXES = frozenset({".wav", ".flac"})
OTHER_RECORDING_SUFFIXES = frozenset(
    {".mp3", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".wma", ".aif", ".aiff", ".au"}
)

_LARGEST_BYTES = 256 << 20  # of a file
_KEPT_BYTES = 256 << 20  # of spectrograms
_ALL = 2**62  # frames
_MOST_CHUNKS = 64  # of a WAV before its samples
_LABELLED = re.compile(r"([^_]+)_.+")  # as in 7_jackson_32.wav


class RecordingFolder(Dataset[Any]):
    """A folder of recordings as spectrograms float32 [1, mels, frames], with class numbers if labelled.

    It holds one folder per class, or recordings directly, which are labelled if all are named
    `{label}_....wav`. Classes are numbered in sorted order, numerically if all names are numbers.
    """

    def __init__(self, folder: Path, preprocessing: Preprocessing, what: str) -> None:
        self._preprocessing = preprocessing
        listing = list_files(folder, RECORDING_SUFFIXES, OTHER_RECORDING_SUFFIXES, what)
        if not listing.files:
            raise DataError(
                f"{what}: no recordings ({', '.join(sorted(RECORDING_SUFFIXES))}) in {folder}; give a folder "
                "with one folder per class, or files named {label}_....wav"
            )
        self.paths, self.note = listing.files, listing.note
        labels = [listing.classes[number] for number in listing.numbers if number >= 0]
        labels = labels or _labels_in_names(self.paths)
        named = {*listing.classes, *labels}  # a folder without recordings is a class, too
        self.classes: list[str] | None = sorted(named, key=_place) if labels else None
        self.targets = None if self.classes is None else [self.classes.index(label) for label in labels]
        self._kept = KeptInputs(_KEPT_BYTES)

    def __len__(self) -> int:
        """Return the number of recordings."""
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        """Return a spectrogram, with its class number if labelled. Raises `DataError`."""
        found = self._spectrogram(index)
        return found if self.targets is None else (found, self.targets[index])

    def _spectrogram(self, index: int) -> Tensor:
        return self._kept.get(index, lambda at: load_recordings([self.paths[at]], self._preprocessing)[0])


def load_recordings(paths: Sequence[Path], preprocessing: Preprocessing) -> Tensor:
    """Read recordings as one batch of the network's inputs, float32 [n, 1, mels, frames].

    **Raises:** `DataError` as `read_recording`, and for a sample rate other than the front end's.
    """
    sound = _front_end(preprocessing)
    waves = [_at_rate(sound, read_recording(path), str(path)) for path in paths]
    return preprocessing.from_waves(torch.stack(waves))


def decode_recordings(contents: Sequence[bytes | memoryview], preprocessing: Preprocessing) -> Tensor:
    """As `load_recordings`, of the WAV or FLAC files in a request.

    Only the part of a file that the network uses is decoded.
    """
    sound = _front_end(preprocessing)
    waves = []
    for number, content in enumerate(contents):
        name, begin = f"the request: recording {number}", bytes(content[:4])
        if begin not in (b"RIFF", b"fLaC"):
            raise DataError(f"{name} is neither WAV nor FLAC; convert it")
        read = _read_wav if begin == b"RIFF" else _read_flac
        waves.append(_at_rate(sound, read(content, name, sound.samples), name))
    return preprocessing.from_waves(torch.stack(waves))


def _front_end(preprocessing: Preprocessing) -> LogMel:
    if preprocessing.sound is None:
        raise DataError(
            "the network has no spectrogram front end for recordings: give --sample-rate and --seconds"
        )
    return preprocessing.sound


def _at_rate(sound: LogMel, recorded: tuple[int, NDArray[np.float32]], name: str) -> Tensor:
    rate, wave = recorded
    if rate != sound.sample_rate:
        raise DataError(
            f"{name} has {rate} samples a second and the network's front end takes {sound.sample_rate}: "
            f"resample it, for example with ffmpeg -ar {sound.sample_rate}"
        )
    return sound.fitted(wave)


def refuse_recordings(folder: Path, what: str) -> None:
    """Raise `DataError` if a folder that should hold images has recordings, or cannot be read."""
    with readable(folder, what):
        recordings = files_with(RECORDING_SUFFIXES, folder, nested=True)
    if recordings:
        raise DataError(
            f"{what}: {folder} holds recordings; describe the network's input: --sample-rate and --seconds"
        )


def read_recording(path: Path) -> tuple[int, NDArray[np.float32]]:
    """Return the sample rate in hertz and mono samples float32 [n] in -1..1, the mean of the channels.

    **Raises:** `DataError` for a file that is missing, unreadable, too large, damaged or empty.
    """
    if is_folder(path, "recordings"):
        raise DataError(f"{path} is a folder; give the recordings in it, such as {path}/*.wav")
    if not is_file(path):
        raise DataError(f"no recording at {path}; check the path")
    if path.stat().st_size > _LARGEST_BYTES:
        raise DataError(f"recording {path} has more than {_LARGEST_BYTES >> 20} MiB; cut it into pieces")
    read = _read_wav if path.suffix.lower() == ".wav" else _read_flac
    with readable(path, "recordings"):
        content = path.read_bytes()
    return read(content, f"recording {path}", _ALL)


def _read_wav(content: bytes | memoryview, name: str, frames: int) -> tuple[int, NDArray[np.float32]]:
    from scipy.io import wavfile

    try:
        rate, samples = wavfile.read(io.BytesIO(_beginning_of_wav(content, frames)))
    except Exception as error:  # a damaged header fails in many ways
        raise DataError(
            f"{name} is not a readable WAV ({one_line(error)}); copy or convert it again"
        ) from error
    return int(rate), _mono(samples, name)


def _beginning_of_wav(content: bytes | memoryview, frames: int) -> bytes:
    """A WAV file with only the format and the first `frames` samples, since the reader decodes a whole file.

    **Raises:** `ValueError` if it has no format or no samples.
    """
    order: Literal["big", "little"] = "big" if content[:4] == b"RIFX" else "little"
    chunks: dict[bytes, bytes | memoryview] = {}
    place = 12
    for _ in range(_MOST_CHUNKS):
        start, size = place + 8, int.from_bytes(content[place + 4 : place + 8], order)
        chunks[bytes(content[place : place + 4])] = content[start : start + size]
        place = start + size + size % 2
        if b"data" in chunks:
            break
    else:
        raise ValueError(f"no samples in the first {_MOST_CHUNKS} chunks")
    layout, samples = bytes(chunks.get(b"fmt ", b"")), chunks[b"data"]
    frame_bytes = int.from_bytes(layout[12:14], order)
    if frame_bytes == 0:
        raise ValueError("its fmt chunk, which says how samples are stored, is missing or invalid")
    kept = bytes(samples[: min(frames, len(samples) // frame_bytes) * frame_bytes])
    body = b"WAVE"
    for kind, value in ((b"fmt ", layout), (b"data", kept)):
        body += kind + len(value).to_bytes(4, order) + value + bytes(len(value) % 2)
    return (b"RIFX" if order == "big" else b"RIFF") + len(body).to_bytes(4, order) + body


def _read_flac(content: bytes | memoryview, name: str, frames: int) -> tuple[int, NDArray[np.float32]]:
    if find_spec("soundfile") is None:
        raise DataError(f"{name} needs soundfile: pip install 'gati[audio]', or convert it to WAV")
    import soundfile

    try:
        samples, rate = soundfile.read(io.BytesIO(content), frames, dtype="float32")
    except (soundfile.SoundFileError, OSError, ValueError, MemoryError) as error:
        why = getattr(error, "error_string", "") or one_line(error)  # the whole message names a BytesIO
        raise DataError(f"{name} is damaged ({why}); copy it again") from error
    return int(rate), _mono(samples, name)


def _mono(samples: NDArray[Any], name: str) -> NDArray[np.float32]:
    """The mean of the channels, in -1..1. Raises `DataError` for no samples, or NaN."""
    if len(samples) == 0:
        raise DataError(f"{name} is empty; remove it")
    wave: NDArray[np.float32] = _scaled(samples).reshape(len(samples), -1).mean(1, dtype=np.float32)
    if not np.isfinite(wave).all():
        raise DataError(f"{name} has NaN or infinite samples; record or convert it again")
    return wave


def _scaled(samples: NDArray[Any]) -> NDArray[Any]:
    """Scale integers to -1..1; floating point samples already are."""
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128.0) / 128.0
    if np.issubdtype(samples.dtype, np.integer):
        return samples / -float(np.iinfo(samples.dtype).min)
    return samples


def _labels_in_names(paths: Sequence[Path]) -> list[str]:
    """The labels that files are named after, if all of them are."""
    matches = [_LABELLED.fullmatch(path.stem) for path in paths]
    labels = [match[1] for match in matches if match is not None]
    return labels if len(labels) == len(paths) else []


def _place(label: str) -> tuple[bool, int, str]:
    """Sort numbers first, by value."""
    return not label.isdecimal(), int(label) if label.isdecimal() else 0, label
