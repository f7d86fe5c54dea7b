"""BERT from a folder as Hugging Face keeps it, compared with PyTorch's own transformer layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gati.errors import CheckpointError, GatiError, ModelError
from gati.model.bert import BertSettings, SentenceClassifier, SentenceEncoder, SequenceClassifier
from gati.model.blocks import find_blocks
from gati.model.load import load_model
from gati.model.packed import fit_text
from tests.text_networks import write_tokenizer

SIZES = BertSettings(vocabulary=40, length=12, kinds=2, width=16, inner_width=24, layers=3, heads=4)
CONFIG = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_act": "gelu",
    "vocab_size": 40,
    "max_position_embeddings": 12,
    "type_vocab_size": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "layer_norm_eps": 1e-12,
    "id2label": {"1": "no", "0": "yes", "2": "perhaps"},
}


def folder(path: Path, **changes: Any) -> Path:
    """A classifier of random weights, with the positions that older files have."""
    torch.manual_seed(0)
    network = SequenceClassifier(SIZES, ("yes", "no", "perhaps"))
    state = {**network.state_dict(), "bert.embeddings.position_ids": torch.arange(12)[None]}
    save_file(state, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return path


IDS = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(9) < torch.tensor([[9], [4], [1]])).long()


def test_a_layer_computes_what_pytorchs_does() -> None:
    torch.manual_seed(0)
    encoder = SentenceEncoder(SIZES).eval()
    ours = encoder.encoder.layer[0]
    theirs = nn.TransformerEncoderLayer(16, 4, 24, 0.0, "gelu", 1e-12, batch_first=True).eval()
    own, state = ours.state_dict(), theirs.state_dict()
    for kind in ("weight", "bias"):
        parts = [own[f"attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
        state[f"self_attn.in_proj_{kind}"] = torch.cat(parts)
        state[f"self_attn.out_proj.{kind}"] = own[f"attention.output.dense.{kind}"]
        state[f"linear1.{kind}"] = own[f"intermediate.dense.{kind}"]
        state[f"linear2.{kind}"] = own[f"output.dense.{kind}"]
    theirs.load_state_dict(state)
    hidden = torch.randn(3, 9, 16)
    bias = torch.where(MASK != 0, 0.0, -1e9)[:, None, None]
    with torch.no_grad():
        expected = theirs(hidden, src_key_padding_mask=MASK == 0)
        found = ours(hidden, bias)
    torch.testing.assert_close(found[MASK != 0], expected[MASK != 0])


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    folder(tmp_path, architectures=["BertModel", "BertForSequenceClassification"])
    state = torch.get_rng_state()
    loaded = load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert loaded.class_names == ("yes", "no", "perhaps")
    assert loaded.source == str(tmp_path.resolve())
    assert find_blocks(loaded.module) == tuple(f"bert.encoder.layer.{number}" for number in range(3))
    with torch.no_grad():
        scores = loaded.module(IDS, MASK)
        torch.testing.assert_close(scores, loaded.module(IDS, MASK, torch.zeros_like(IDS)))
        assert not torch.allclose(scores, loaded.module(IDS, MASK, torch.ones_like(IDS)))
    assert load_model(tmp_path).checkpoint_sha256 == loaded.checkpoint_sha256


def test_a_folder_whose_classes_have_no_names_names_none(tmp_path: Path) -> None:
    """They kept the data's own names from being used: answers were called LABEL_1."""
    folder(tmp_path, id2label={str(number): f"LABEL_{number}" for number in range(3)})
    assert load_model(tmp_path).class_names is None


def test_padding_changes_no_class_score(tmp_path: Path) -> None:
    network = load_model(folder(tmp_path)).module
    other = torch.where(MASK != 0, IDS, 7)
    encoder = SentenceEncoder.from_folder(tmp_path)
    classifier = SentenceClassifier(encoder, 5).eval()
    with torch.no_grad():
        for each in (network, classifier):
            expected = each(IDS, MASK)
            torch.testing.assert_close(each(other, MASK), expected)
            torch.testing.assert_close(each(IDS[1:2, :4], MASK[1:2, :4]), expected[1:2])


@pytest.mark.parametrize(
    ("changes", "message", "kind"),
    [
        (
            {"model_type": "gpt2"},
            "describes 'gpt2' with 'gelu'; only 'bert' with 'gelu' is supported",
            ModelError,
        ),
        ({"architectures": ["BertModel"]}, "describes BertModel, which has no class scores", ModelError),
        (
            {"architectures": ["ViTForImageClassification"], "model_type": "vit"},
            "returns transformers.ViTForImageClassification.from_pretrained(",
            ModelError,
        ),
        (
            {"architectures": ["BertForTokenClassification"]},
            "describes BertForTokenClassification, which has no class scores",
            ModelError,
        ),
        (
            {"hidden_act": "gelu_new"},
            "with 'gelu_new', which needs the package transf",
            ModelError,
        ),
        (
            {"problem_type": "multi_label_classification"},
            "is for multi label classification (problem_type in its config), and Gati answers with one class",
            ModelError,
        ),
        ({"architectures": "Bert"}, "describes an unknown architecture, which has no", ModelError),
        ({"id2label": {"1": "yes"}}, "(KeyError: '0'); give a config.json of BERT", ModelError),
        ({"hidden_size": "wide"}, "config.json (ValueError: ", ModelError),
        ({"num_hidden_layers": 2.7}, "(ValueError: num_hidden_layers is 2.7, no whole", ModelError),
        ({"vocab_size": 10**13}, "cannot read ", ModelError),
        ({"num_attention_heads": 0}, "(ValueError: a size is below 1); give a config.json", ModelError),
        ({"hidden_size": 18}, "has 18 channels, not a multiple of its 4 heads", ModelError),
        ({"vocab_size": 41}, "does not fit its config.json", CheckpointError),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_other_folders_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str, kind: type[GatiError]
) -> None:
    folder(tmp_path, **changes)
    with pytest.raises(kind) as refused:
        load_model(tmp_path)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_damaged_or_missing_file_is_one_line(tmp_path: Path) -> None:
    folder(tmp_path)
    for content in ("{", "[1]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=r"config.json \(.*\); give a config.json of BERT$"):
            load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"cannot read .*/model.safetensors \("):
        load_model(tmp_path)


def test_a_tokenizer_in_the_folder_is_taken(tmp_path: Path) -> None:
    assert load_model(folder(tmp_path)).preprocessing.text is None
    write_tokenizer(tmp_path / "tokenizer.json")
    text = fit_text(load_model(tmp_path)).preprocessing.text
    assert text is not None
    assert text.arrays == ("input_ids", "attention_mask")
    assert text.length == SIZES.length  # what the network takes, as the tokenizer does not say
