"""Log-mel spectrograms: recordings as inputs for image networks.

Data flow: **samples float32 [N, samples]** -> short-time Fourier transform -> power in mel bands -> decibels
below the loudest -> **float32 [N, 1, mels, frames]**, 1 at the loudest and 0 at `floor_db` below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

from gati.errors import ModelError

_SILENCE = 1e-16  # power; anything below is silence


@dataclass(frozen=True)
class LogMel:
    """A spectrogram front end for recordings of `sample_rate` hertz.

    Recordings are cut or padded with silence to `seconds`. Windows of `window_ms` start every `hop_ms`; bands
    are evenly spaced on the mel scale, mel = 2595 log10(1 + hertz / 700), up to half the sample rate.
    """

    sample_rate: int
    seconds: float
    mels: int = 40
    window_ms: float = 32.0
    hop_ms: float = 16.0
    floor_db: float = 80.0

    def __post_init__(self) -> None:
        """Check the values. Raises `ModelError`."""
        if not 1_000 <= self.sample_rate <= 768_000:
            raise ModelError(f"sample rate is {self.sample_rate} Hz; give one from 1000 to 768000")
        if not 0.0 < self.seconds <= 600.0:
            raise ModelError(
                f"recordings are {self.seconds:g} seconds long; give more than 0 and at most 600"
            )
        if self.floor_db <= 0.0 or self.mels < 1:
            raise ModelError("a front end needs at least one mel band and a floor above 0 dB")
        if self.hop < 1 or self.window < 2:
            raise ModelError(
                f"windows of {self.window_ms:g} ms every {self.hop_ms:g} ms are shorter than a sample"
            )
        if self.samples < self.window:
            raise ModelError(
                f"{self.seconds:g} seconds are shorter than a window of {self.window_ms:g} ms; give more"
            )

    @property
    def samples(self) -> int:
        """Samples per recording."""
        return round(self.sample_rate * self.seconds)

    @property
    def window(self) -> int:
        """Samples per window."""
        return round(self.sample_rate * self.window_ms / 1e3)

    @property
    def hop(self) -> int:
        """Samples from one window to the next."""
        return round(self.sample_rate * self.hop_ms / 1e3)

    @property
    def frames(self) -> int:
        """Windows per recording, which is padded by half a window, rounded down, at both ends."""
        return 1 + (self.samples - self.window % 2) // self.hop

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; `from_json` reads them back unchanged."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LogMel:
        """Read what `to_json` wrote."""
        return cls(**values)

    def fitted(self, wave: NDArray[np.float32]) -> Tensor:
        """Cut or pad a recording [samples] to float32 [self.samples]."""
        known = torch.from_numpy(np.require(wave[: self.samples], requirements=("C", "W")))
        return functional.pad(known, (0, self.samples - len(known)))

    def __call__(self, waves: Tensor) -> Tensor:
        """Convert recordings float32 [N, samples] to spectrograms float32 [N, 1, mels, frames], 0 to 1."""
        spectrum = torch.stft(
            waves,
            self.window,
            hop_length=self.hop,
            window=torch.hann_window(self.window, dtype=torch.float32, device=waves.device),
            center=True,
            pad_mode="constant",
            return_complex=True,
        )  # [N, bins, frames]
        power = _mel_bands(self.sample_rate, self.window, self.mels) @ spectrum.abs().square()
        decibels = 10.0 * power.clamp_min(_SILENCE).log10()  # [N, mels, frames]
        below = decibels - decibels.amax((1, 2), keepdim=True)
        heard = (power.amax((1, 2), keepdim=True) > _SILENCE).float()  # 0 for silence
        return (heard * (1.0 + below / self.floor_db).clamp_min(0.0)).unsqueeze(1)


@cache
def _mel_bands(sample_rate: int, window: int, mels: int) -> Tensor:
    """Triangular filters [mels, bins], each from the centre of the previous band to that of the next."""
    highest = 2595.0 * np.log10(1.0 + sample_rate / 2 / 700.0)
    edges_hz = 700.0 * (10.0 ** (np.linspace(0.0, highest, mels + 2) / 2595.0) - 1.0)
    bins_hz = np.linspace(0.0, sample_rate / 2, window // 2 + 1)
    rising = (bins_hz - edges_hz[:-2, None]) / (edges_hz[1:-1, None] - edges_hz[:-2, None])
    falling = (edges_hz[2:, None] - bins_hz) / (edges_hz[2:, None] - edges_hz[1:-1, None])
    bands = np.maximum(np.minimum(rising, falling), 0.0)
    # a band that lies between two bins takes the nearest one
    nearest = np.abs(bins_hz - edges_hz[1:-1, None]).argmin(1)
    deaf = np.flatnonzero(bands.max(1) == 0.0)
    bands[deaf, nearest[deaf]] = 1.0
    return torch.from_numpy(bands.astype(np.float32))
