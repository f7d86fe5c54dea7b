"""Continuations by a sentence encoder, here a small random BERT: what is read, learned and stored."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from gati.cli import run
from gati.errors import EvictError, StorageError
from gati.evict.predict.continuation import MOST, matthews
from gati.evict.predict.continuation_stored import load_continuation, save_encoded
from gati.evict.predict.encoded import EncodedContinuation, PromptEncoder, fit_encoded
from gati.evict.trace.dialogues import Prompts
from gati.evict.train import samples_of, train, train_continuation
from gati.model.bert import BertSettings, SentenceEncoder
from services.eviction.continuations import Continuations
from tests.evict.naive import tree_trace
from tests.evict.talking import talks, write
from tests.permissions import close

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
LENGTH = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that knows the words of `talks`."""
    pytest.importorskip("tokenizers", reason="tokenizers reads text")
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    made = tmp_path_factory.mktemp("encoder")
    said = {
        word
        for dialogue in talks(300)
        for message in dialogue.messages
        for word in re.findall(r"\w+|[^\w\s]+", message.text)
    }
    words = {word: number for number, word in enumerate((*SPECIAL, *sorted(said)))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(made / "tokenizer.json"))
    settings = BertSettings(len(words), LENGTH, 2, width=48, inner_width=64, layers=1, heads=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_file(SentenceEncoder(settings).state_dict(), made / "model.safetensors")
    config = {
        "model_type": "bert",
        "vocab_size": settings.vocabulary,
        "max_position_embeddings": settings.length,
        "type_vocab_size": settings.kinds,
        "hidden_size": settings.width,
        "intermediate_size": settings.inner_width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "layer_norm_eps": settings.epsilon,
    }
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> EncodedContinuation:
    """Learned from three hundred dialogues."""
    return fit_encoded(*samples_of(talks(300)), PromptEncoder(folder))


def test_farewells_are_learned(model: EncodedContinuation) -> None:
    prompts, goes_on = samples_of(talks(150, seed=1))
    assert matthews(model.predict(prompts) > 0.5, goes_on) > 0.5
    others = np.random.default_rng(0).permutation(len(prompts))
    mixed = [Prompts(prompts[other].texts, each.turn) for other, each in zip(others, prompts, strict=True)]
    assert abs(matthews(model.predict(mixed) > 0.5, goes_on)) < 0.2


def test_one_at_a_time_is_all_at_once_but_for_rounding(model: EncodedContinuation) -> None:
    prompts, _ = samples_of(talks(12, seed=3))
    alone = [float(model.predict([each])[0]) for each in prompts]
    np.testing.assert_allclose(model.predict(prompts), alone, atol=1e-5)
    assert len(model.predict([])) == 0
    assert all(1.0 - MOST <= each <= MOST for each in alone)


def test_prompts_share_the_tokens_and_keep_both_ends(folder: Path) -> None:
    encoder = PromptEncoder(folder)
    table = " ".join(["table"] * 200)
    (one,) = encoder._rows([Prompts((f"find {table} flight",), 1)])
    assert len(one) == LENGTH
    words = encoder._tokenizer.token_to_id
    assert one[:2] == [words("[CLS]"), words("find")] and one[-2:] == [words("flight"), words("[SEP]")]
    (five,) = encoder._rows([Prompts((*["hotel"] * 3, *[f"find {table} flight"] * 5), 8)])
    assert LENGTH - 5 <= len(five) <= LENGTH
    assert five.count(words("[SEP]")) == five.count(words("find")) == five.count(words("flight")) == 5
    (short,) = encoder._rows([Prompts(("hotel", ""), 2)])
    assert short == [words("[CLS]"), words("hotel"), words("[SEP]"), words("[SEP]")]


def test_the_count_of_prompts_is_read(model: EncodedContinuation) -> None:
    found = model.predict([Prompts(("find me a table",), turn) for turn in (1, 2, 30)])
    assert len(set(found.tolist())) == 3


def test_what_is_stored_predicts_the_same_and_is_served(model: EncodedContinuation, tmp_path: Path) -> None:
    save_encoded(model, tmp_path, {"dialogues": 300})
    prompts, _ = samples_of(talks(10, seed=3))
    loaded = load_continuation(tmp_path)
    np.testing.assert_array_equal(loaded.predict(prompts), model.predict(prompts))
    assert loaded.digest() == model.digest() and not loaded.quick
    continuations = Continuations(tmp_path)
    continuations.look()
    assert continuations.ready and not continuations.quick
    assert continuations.predict(prompts) == (model.predict(prompts).tolist(), model.digest()[:12])


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_encoder_that_lacks_a_file_is_refused(
    model: EncodedContinuation, tmp_path: Path, lost: str
) -> None:
    save_encoded(model, tmp_path, {})
    (tmp_path / "encoder" / lost).unlink()
    with pytest.raises(EvictError) as caught:
        load_continuation(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_of_another_network_are_refused(model: EncodedContinuation, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_encoded(model, tmp_path, {})
    save_file({"weights": np.zeros(4, np.float32)}, tmp_path / "continuation.safetensors")
    with pytest.raises(EvictError, match="safetensors is of another model"):
        load_continuation(tmp_path)
    path = tmp_path / "continuation.json"
    document = json.loads(path.read_text())
    del document["sha256"]  # as older versions of Gati wrote it
    path.write_text(json.dumps(document))
    with pytest.raises(EvictError, match=r"is damaged \(the weights belong to another network"):
        load_continuation(tmp_path)


def test_another_encoder_is_refused(model: EncodedContinuation, tmp_path: Path) -> None:
    """The encoder is written first: the former network would read its vectors."""
    save_encoded(model, tmp_path, {})
    settings = tmp_path / "encoder" / "config.json"
    settings.write_text(settings.read_text() + "\n")
    with pytest.raises(EvictError, match=r"encoder/config\.json is of another model"):
        load_continuation(tmp_path)


def test_what_leaves_nothing_to_learn_is_refused(folder: Path) -> None:
    encoder = PromptEncoder(folder)
    with pytest.raises(EvictError, match="needs examples of both cases"):
        fit_encoded(*samples_of(talks(20, longest=1)), encoder)
    with pytest.raises(EvictError, match="conversation 1 has no prompt"):
        encoder.encode([Prompts(("hotel",), 1), Prompts((), 0)])


def test_it_is_trained_from_a_terminal(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dialogues = write(tmp_path / "talks.jsonl", talks(120))
    out = tmp_path / "continuation"
    asked = ["evict", "train", str(dialogues), "--dialogues", "--encoder", str(folder), "--out", str(out)]
    assert run(asked) == 0
    assert "Matthews' correlation on the others 0." in capsys.readouterr().out
    assert isinstance(load_continuation(out), EncodedContinuation)
    for elsewhere in (str(tmp_path), "sentence-transformers/all-MiniLM-L6-v2"):  # nothing is downloaded
        assert run([*asked[:5], elsewhere, "--out", str(out)]) == 2
        assert (
            f"{elsewhere} has no usable encoder: there is no config.json; give the folder of a BERT with "
            "config.json, model.safetensors, tokenizer.json" in capsys.readouterr().err
        )
    assert run(["evict", "train", str(dialogues), "--encoder", str(folder), "--out", str(out)]) == 2
    assert "--encoder requires --dialogues" in capsys.readouterr().err


def test_an_encoder_in_a_closed_folder_or_of_a_long_name_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close(monkeypatch, folder)
    for elsewhere in (folder, Path("x" * 1_000)):
        with pytest.raises(EvictError, match=r"has no usable encoder: there is no config\.json"):
            PromptEncoder(elsewhere)


def test_training_tells_how_many_prompts_are_encoded(folder: Path, tmp_path: Path) -> None:
    """Of both halves: with a MiniLM and a hundred thousand prompts that takes most of an hour."""
    dialogues = talks(120)
    told: list[tuple[int, int]] = []
    train_continuation(
        dialogues, tmp_path / "out", encoder=folder, progress=lambda done, total: told.append((done, total))
    )
    prompts = len(samples_of(dialogues)[0])
    assert {total for _, total in told} == {prompts}
    assert told[-1] == (prompts, prompts) and [done for done, _ in told] == sorted({done for done, _ in told})


def test_a_place_that_can_be_no_folder_is_told_before_anything_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, file = tree_trace([[1, 2], [1, 3]]), tmp_path / "file"
    file.touch()
    for out in (file, file / "below"):
        for learn in (lambda out: train_continuation(talks(9), out), lambda out: train(trace, out)):
            with pytest.raises(StorageError, match=r"cannot write the folder .*file is a file; name another"):
                learn(out)
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    with pytest.raises(StorageError, match="is not writable; name another"):
        train(trace, tmp_path / "new" / "folder")
    assert list(tmp_path.iterdir()) == [file]
