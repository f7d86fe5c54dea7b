"""Recordings in folders: what is read, what the network sees of it, and what bad files get."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.io import wavfile

from gati.errors import DataError, ModelError
from gati.model.data import load_data
from gati.model.load import load_model
from gati.model.preprocess import Preprocessing
from gati.model.recordings import load_recordings, read_recording
from gati.model.sound import LogMel

RATE = 8000
SOUND = LogMel(RATE, 0.5)
TAKES_SOUND = Preprocessing((0.3,), (0.3,), channels=1, sound=SOUND)
few = settings(max_examples=25, deadline=None)


def tone(hertz: float, seconds: float = 0.5, loudness: float = 0.5) -> NDArray[np.float32]:
    moments = np.arange(round(RATE * seconds)) / RATE
    return (loudness * np.sin(2 * np.pi * hertz * moments)).astype(np.float32)


def write(path: Path, wave: NDArray[np.float32], rate: int = RATE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    wavfile.write(path, rate, np.round(wave * 32767).astype(np.int16))
    return path


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    """Files called as the spoken digits are, of 2, 9 and 10."""
    for number, label in enumerate((10, 2, 9, 2)):
        write(tmp_path / "spoken" / f"{label}_voice_{number}.wav", tone(200.0 * (number + 1)))
    return tmp_path / "spoken"


# The front end ----------------------------------------------------------------------------------------------


@few
@given(st.integers(1000, 48_000), st.floats(0.05, 2.0), st.integers(1, 64))
@example(3335, 0.4448415519714158, 1)  # a window of an odd number of samples, just too long for another
def test_spectrograms_have_the_stated_size_and_lie_within_0_and_1(
    rate: int, seconds: float, mels: int
) -> None:
    sound = LogMel(rate, seconds, mels=mels)
    noise = torch.randn(2, sound.samples, generator=torch.Generator().manual_seed(rate))
    found = sound(noise)
    assert found.shape == (2, 1, mels, sound.frames)
    assert float(found.min()) >= 0.0
    assert float(found.amax()) == 1.0


@few
@given(st.floats(0.01, 100.0))
def test_loudness_does_not_matter(factor: float) -> None:
    wave = torch.from_numpy(tone(440.0, loudness=0.01))[None]
    torch.testing.assert_close(SOUND(factor * wave), SOUND(wave), atol=2e-3, rtol=0.0)


def test_a_higher_tone_lies_in_a_higher_band() -> None:
    bands = [int(SOUND(torch.from_numpy(tone(hertz))[None])[0, 0].mean(1).argmax()) for hertz in
             (200.0, 500.0, 1200.0, 3000.0)]  # fmt: skip
    assert bands == sorted(set(bands))


def test_each_recording_is_read_by_itself_whatever_its_batch() -> None:
    waves = torch.stack([torch.from_numpy(tone(hertz)) for hertz in (200.0, 700.0, 3000.0)])
    together = SOUND(waves)
    for index in range(3):
        torch.testing.assert_close(together[index], SOUND(waves[index : index + 1])[0])


def test_silence_is_nothing_at_all() -> None:
    assert float(SOUND(torch.zeros(1, SOUND.samples)).abs().max()) == 0.0


def test_long_recordings_are_cut_and_short_ones_filled_up() -> None:
    wave = tone(300.0, seconds=0.7)
    assert torch.equal(SOUND.fitted(wave), torch.from_numpy(wave[: SOUND.samples]))
    short = SOUND.fitted(wave[:100])
    assert short.shape == (SOUND.samples,)
    assert torch.equal(short[:100], torch.from_numpy(wave[:100])) and not short[100:].any()


def test_the_front_end_is_kept_with_the_preprocessing() -> None:
    written = json.loads(json.dumps(TAKES_SOUND.to_json()))
    assert Preprocessing.from_json(written) == TAKES_SOUND
    assert "sound" not in Preprocessing().to_json()


@pytest.mark.parametrize(
    ("rate", "seconds", "message"),
    [
        (10, 1.0, "sample rate is 10 Hz"),
        (8000, 0.0, "recordings are 0 seconds long"),
        (8000, 0.001, "shorter than a window"),
    ],
)
def test_impossible_front_ends_are_refused(rate: int, seconds: float, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        LogMel(rate, seconds)


# Folders ----------------------------------------------------------------------------------------------------


def test_labels_come_from_names_and_numbers_are_in_their_order(spoken: Path) -> None:
    data = load_data(spoken, TAKES_SOUND)
    assert data.class_names == ("2", "9", "10")
    assert data.labels is not None and data.labels.tolist() == [2, 0, 0, 1]
    assert data.images(slice(0, 4)).shape == (4, 1, SOUND.mels, SOUND.frames)
    assert not data.is_images


def test_a_folder_of_class_folders_is_read_alike(spoken: Path, tmp_path: Path) -> None:
    for path in spoken.iterdir():
        label = path.name.partition("_")[0]
        (tmp_path / "sorted" / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sorted" / label / path.name).write_bytes(path.read_bytes())
    by_folder, by_name = load_data(tmp_path / "sorted", TAKES_SOUND), load_data(spoken, TAKES_SOUND)
    assert by_folder.class_names == by_name.class_names
    assert sorted(by_folder.identities) == sorted(by_name.identities)
    (tmp_path / "sorted" / "4").mkdir()  # a class without recordings here is still a class of the network
    by_folder = load_data(tmp_path / "sorted", TAKES_SOUND)
    assert by_folder.class_names == ("2", "4", "9", "10")
    assert by_folder.labels is not None and sorted(by_folder.labels.tolist()) == [0, 0, 2, 3]


def test_without_labels_in_all_names_there_are_none(spoken: Path) -> None:
    write(spoken / "unknown.wav", tone(900.0))
    data = load_data(spoken, TAKES_SOUND)
    assert (data.labels, data.class_names, len(data)) == (None, None, 5)


def test_what_is_read_is_the_normalised_spectrogram(spoken: Path) -> None:
    path = next(iter(sorted(spoken.iterdir())))
    rate, wave = read_recording(path)
    expected = (SOUND(SOUND.fitted(wave)[None]) - 0.3) / 0.3
    assert rate == RATE
    torch.testing.assert_close(load_recordings([path], TAKES_SOUND), expected)
    torch.testing.assert_close(load_data(spoken, TAKES_SOUND).images([0]), expected)


@pytest.mark.parametrize("kind", ["uint8", "int16", "int32", "float32"])
def test_every_kind_of_sample_is_read_alike_and_channels_are_averaged(tmp_path: Path, kind: str) -> None:
    wave = tone(440.0)
    whole = np.dtype(kind).kind in "iu"
    most = np.iinfo(kind).max if whole else 1
    middle, scale = (128, 127) if kind == "uint8" else (0, most)
    samples = (np.round(wave.astype(np.float64) * scale) + middle if whole else wave).astype(kind)
    wavfile.write(tmp_path / "one.wav", RATE, samples)
    wavfile.write(tmp_path / "two.wav", RATE, np.stack([samples, samples], 1))
    for name in ("one.wav", "two.wav"):
        np.testing.assert_allclose(read_recording(tmp_path / name)[1], wave, atol=0.02)


def test_flac_is_read_as_the_same_wav(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="FLAC needs the extra gati[audio]")
    wave = np.round(tone(440.0) * 32767).astype(np.int16)
    wavfile.write(tmp_path / "a.wav", RATE, wave)
    soundfile.write(tmp_path / "a.flac", wave, RATE, subtype="PCM_16")
    np.testing.assert_array_equal(*(read_recording(tmp_path / name)[1] for name in ("a.wav", "a.flac")))


# What goes wrong --------------------------------------------------------------------------------------------


def test_another_rate_is_refused_and_nothing_is_resampled(tmp_path: Path) -> None:
    write(tmp_path / "a_1.wav", tone(440.0), rate=16_000)
    with pytest.raises(DataError, match=r"a_1\.wav has 16000 samples a second .* takes 8000: resample it"):
        load_data(tmp_path, TAKES_SOUND)


def test_empty_recordings_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a_1.wav", tone(440.0)[:0])
    with pytest.raises(DataError, match=r"recording .*a_1\.wav is empty; remove it"):
        load_data(tmp_path, TAKES_SOUND)


@pytest.mark.parametrize(
    "content", [b"", b"RIFF", b"no sound at all", b"RIFF\x24\x00\x00\x00WAVEfmt \xff\xff"]
)
def test_broken_recordings_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a_1.wav").write_bytes(content)
    with pytest.raises(
        DataError, match=r"a_1\.wav is not a readable WAV .*copy or convert it again"
    ) as caught:
        load_data(tmp_path, TAKES_SOUND)
    assert "\n" not in str(caught.value)


@few
@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_byte_is_refused_or_read_never_a_traceback(place: int, value: int) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "a.wav", tone(440.0, seconds=0.02))
        content = bytearray(path.read_bytes())
        content[place % len(content)] = value
        path.write_bytes(bytes(content))
        try:
            _, wave = read_recording(path)
        except DataError as error:
            assert str(path) in str(error)
        else:
            assert np.isfinite(wave).all()


def test_recordings_for_a_network_that_takes_images_say_what_is_missing(spoken: Path) -> None:
    with pytest.raises(DataError, match="holds recordings; .* --sample-rate and --seconds"):
        load_data(spoken, Preprocessing())


def test_images_for_a_network_that_takes_sound_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the network takes audio"):
        TAKES_SOUND(np.zeros((1, 8, 8, 1), dtype=np.uint8))
    with pytest.raises(DataError, match="no recordings"):
        load_data(tmp_path, TAKES_SOUND)


# Networks ---------------------------------------------------------------------------------------------------


def test_a_network_of_the_zoo_brings_its_front_end_and_options_change_it() -> None:
    loaded = load_model("gati.zoo:spectrogram_vgg", seconds=0.5)
    assert loaded.preprocessing.sound == SOUND
    example = torch.rand(2, 1, SOUND.mels, SOUND.frames)
    assert loaded.module(example).shape == (2, 10)


def test_a_network_without_a_front_end_gets_one_from_both_options(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    pooled = nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()\n"
        "    return nn.Sequential(*pooled, nn.Linear(2, 2))\n"
    )
    source = f"{tmp_path / 'own.py'}:build"
    assert load_model(source, sample_rate=16_000, seconds=2.0).preprocessing.sound == LogMel(16_000, 2.0)
    with pytest.raises(ModelError, match="both --sample-rate and --seconds"):
        load_model(source, seconds=2.0)
