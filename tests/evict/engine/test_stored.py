"""Networks and tokens in a folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gati.errors import CheckpointError, ModelError
from gati.evict.engine.decoder import Decoder
from gati.evict.engine.generation import Ending, GenerationRequest, Sampling
from gati.evict.engine.stored import load_decoder
from gati.evict.engine.tokens import ByteTokens, tokens_for
from tests.evict.engine.small import SETTINGS, engine, generated, save_decoder


@pytest.mark.parametrize("tied", [False, True])
def test_a_network_is_what_it_was_when_it_was_saved(tmp_path: Path, tied: bool) -> None:
    decoder = Decoder.random(replace(SETTINGS, tied=tied), seed=3)
    save_decoder(decoder, tmp_path)
    read = load_decoder(tmp_path)
    assert read.settings == decoder.settings
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    prompt = [1, 2, 3, 4, 5]
    expected = generated(engine(decoder=decoder), prompt, 5)
    found = generated(engine(decoder=read), prompt, 5)
    assert all(map(torch.equal, found.logits, expected.logits))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_parameters"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"hidden_size": "many"}, "does not describe a network"),
        ({"vocab_size": 14, "eos_token_id": 14}, r"config.json has eos_token_id = 14; give .* from 0 to 13"),
    ],
)
def test_networks_of_another_kind_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    save_decoder(Decoder.random(SETTINGS, seed=0), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=words):
        load_decoder(tmp_path)


def test_a_text_ends_at_any_of_the_networks_end_tokens(tmp_path: Path) -> None:
    """Llama's instruct networks have several: only the first of them ended a text."""
    save_decoder(Decoder.random(SETTINGS, seed=3), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for written, ends in ((12, (12,)), ([12, 4, 7], (12, 4, 7))):
        (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": written}))
        running = engine(decoder=load_decoder(tmp_path))
        asked = [GenerationRequest((1, seed % 12), 60, Sampling(1.0, seed)) for seed in range(16)]
        found = [running.submit(each) for each in asked]
        running.run_until_idle()
        assert {each.generated[-1] for each in found if each.ending is Ending.STOP} == set(ends)
        assert not any(set(ends) & set(each.generated[:-1]) for each in found)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 12}, {"eos_token_id": [4, 7]}, (4, 7)),
        ({"eos_token_id": 12}, {"eos_token_id": 4}, (4,)),
        ({"eos_token_id": [12, 3]}, {"eos_token_id": None, "temperature": 0.6}, (12, 3)),
        ({"eos_token_id": None}, {"eos_token_id": [4]}, (4,)),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_the_settings_of_generation_say_which_tokens_end_a_text(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], ends: tuple[int, ...]
) -> None:
    """Instruct networks have the token that ends a turn there alone, and generated beyond it."""
    save_decoder(Decoder.random(SETTINGS, seed=0), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_decoder(tmp_path).settings.ends == ends


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "generation_config.json cannot be read"),
        ("[4]", "generation_config.json cannot be read"),
        ('{"eos_token_id": [4, 13]}', r"generation_config.json has eos_token_id = \[4, 13\]; .* 0 to 12"),
        ('{"eos_token_id": "</s>"}', "generation_config.json has eos_token_id = '</s>'"),
    ],
)
def test_settings_of_generation_that_are_wrong_are_told(tmp_path: Path, text: str, words: str) -> None:
    save_decoder(Decoder.random(SETTINGS, seed=0), tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=words):
        load_decoder(tmp_path)


def test_rotations_that_older_files_have_are_left_out(tmp_path: Path) -> None:
    save_decoder(Decoder.random(SETTINGS, seed=3), tmp_path)
    path = tmp_path / "model.safetensors"
    weights, expected = load_file(path), load_decoder(tmp_path).state_dict()
    save_file(weights | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(2)}, path)
    found = load_decoder(tmp_path).state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_damaged_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not describe a network"):
        load_decoder(tmp_path)
    save_decoder(Decoder.random(SETTINGS, seed=0), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not fit"):
        load_decoder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_decoder(tmp_path)


@given(text=st.text(max_size=20))
def test_bytes_come_back_as_the_text_that_they_were(text: str) -> None:
    write = ByteTokens().writer()
    assert "".join(map(write, ByteTokens().encode(text))) == text


def test_half_a_character_waits_and_ends_as_a_replacement() -> None:
    write = ByteTokens().writer()
    first, second = "é".encode()
    assert [write(first), write(second), write(first), write(256)] == ["", "é", "", "\ufffd"]


def test_a_stored_tokenizer_reads_and_writes(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokens = tokens_for(tmp_path, 13)
    assert tokens.encode("two one three") == [1, 0, 2]
    write = tokens.writer()
    assert "".join(map(write, [1, 0])) == "two one"
    assert "".join(map(tokens.writer([0, 0]), [1, 0])) == " two one"
    with pytest.raises(ModelError, match="has 3 tokens, but the network has 2"):
        tokens_for(tmp_path, 2)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a tokenizer"):
        tokens_for(tmp_path, 13)


@pytest.mark.parametrize("decoder", ["metaspace", "llama"])
def test_a_completion_continues_its_prompt_to_the_letter(tmp_path: Path, decoder: str) -> None:
    """Both decoders drop the first space of a text, which for a completion is that between two words."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"\u2581one": 0, "\u2581two": 1, "s": 2, "<s>": 3} | {
        f"<0x{at:02X}>": 4 + at for at in range(256)
    }
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[], byte_fallback=True))
    made.add_special_tokens(["<s>"])
    kinds = tokenizers.decoders
    steps = [kinds.Replace("\u2581", " "), kinds.ByteFallback(), kinds.Fuse(), kinds.Strip(" ", 1, 0)]
    made.decoder = kinds.Metaspace() if decoder == "metaspace" else kinds.Sequence(steps)
    made.save(str(tmp_path / "tokenizer.json"))
    tokens = tokens_for(tmp_path, 300)
    assert list(map(tokens.writer([3, 0]), [1, 2, 0])) == [" two", "s", " one"]
    assert list(map(tokens.writer([0] * 5_000), [2, 3, 1])) == ["s", "", " two"]
    assert list(map(tokens.writer([3]), [0, 1])) == ["one", " two"]  # here, the text begins
    if decoder == "metaspace":
        return
    first, second = (4 + byte for byte in "\u00e9".encode())
    assert list(map(tokens.writer([0]), [first, second, 1])) == ["", "\u00e9", " two"]
    assert list(map(tokens.writer([0, first]), [second, 1])) == ["", "\ufffd two"]
    wrong = "".join(map(tokens.writer([0]), [first, second, first, 1]))
    assert wrong.startswith("\u00e9") and wrong.endswith("\ufffd two")
