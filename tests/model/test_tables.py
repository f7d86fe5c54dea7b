"""Classes in tables: integers are kept however they are written, names are sorted, other numbers refused."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

import pytest

from gati.errors import DataError
from gati.model.data import load_data
from gati.model.preprocess import Preprocessing
from gati.model.tables import TextTable, read_texts


def read(folder: Path, labels: list[str]) -> TextTable:
    path = folder / "texts.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("text", "label"), *(("my card", label) for label in labels)])
    return read_texts(path, "text", None, "--data")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["2", "10", "0"], [2, 10, 0]),
        (["2.0", "10.0", "0.0"], [2, 10, 0]),
        (["2", "10.0", "0."], [2, 10, 0]),
        (["1e+1", " 2.0 ", "007"], [10, 2, 7]),
    ],
)
def test_integers_are_class_numbers_however_they_are_written(
    tmp_path: Path, labels: list[str], expected: list[int]
) -> None:
    """As text, 10.0 would come before 2.0."""
    table = read(tmp_path, labels)
    assert table.labels is not None and table.labels.tolist() == expected
    assert table.class_names is None


@pytest.mark.parametrize(
    "labels",
    [
        ["cat", "3.0", "10.0"],
        ["v2.0", "v1.0"],
        ["1.0.1", "1.0.0"],
        ["1_0", "2_0"],
        ["4006381333931", "12"],
        ["nano", "inf"],
        ["٣", "٤"],
    ],
)
def test_what_is_not_only_numbers_are_names(tmp_path: Path, labels: list[str]) -> None:
    table = read(tmp_path, labels)
    assert table.class_names == tuple(sorted(set(labels)))
    assert table.labels is not None
    assert [table.class_names[number] for number in table.labels] == labels


@pytest.mark.parametrize("wrong", ["1.5", "-1", "-1.0", "nan", "1e20", "4006381333931.0"])
def test_other_numbers_are_one_line(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(DataError) as error:
        read(tmp_path, ["1.0", wrong])
    assert str(error.value) == (
        f"--data: {tmp_path / 'texts.csv'}: row 1 has the label {wrong}; "
        "give integer class numbers from 0, or names"
    )


@pytest.mark.parametrize("labels", [["1.0", ""], ["1", " "], ["cat", ""]])
def test_an_empty_cell_is_one_line(tmp_path: Path, labels: list[str]) -> None:
    with pytest.raises(DataError, match="row 1 has no label; give it one, or remove the row"):
        read(tmp_path, labels)


def read_lines(folder: Path, *lines: str) -> TextTable:
    (folder / "texts.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_texts(folder / "texts.csv", "text", None, "--data")


def test_a_text_that_its_own_comma_cuts_is_one_line(tmp_path: Path) -> None:
    """Else what follows the comma would be its class."""
    with pytest.raises(DataError, match=r"row 1 has more fields than the header; put texts that hold commas"):
        read_lines(tmp_path, "text,label", "my card,3", "hello, world,3")
    assert read_lines(tmp_path, "text,label", '"hello, world",3,', "my card,3,").texts == [
        "hello, world",
        "my card",
    ]


@pytest.mark.parametrize("blank", ["", "  ", ",", '"",""'])
def test_blank_lines_before_the_header_are_passed_over(tmp_path: Path, blank: str) -> None:
    """As spreadsheets write them for empty rows."""
    table = read_lines(tmp_path, blank, blank, "text,label", "my card,3", "where is it?,1")
    assert table.texts == ["my card", "where is it?"]
    assert table.labels is not None and table.labels.tolist() == [3, 1]


@pytest.mark.parametrize("header", ["text, label", "text ,label ", " text,\tlabel", '"text", "label"'])
def test_spaces_around_the_names_of_columns_do_not_count(tmp_path: Path, header: str) -> None:
    """Without its column of classes, a table was read as one without labels."""
    table = read_lines(tmp_path, header, "my card, 3", "where is it?, 1")
    assert table.texts == ["my card", "where is it?"]
    assert table.labels is not None and table.labels.tolist() == [3, 1]


def test_a_column_may_still_be_named_with_its_spaces(tmp_path: Path) -> None:
    """As libraries of an older Gati name it."""
    (tmp_path / "texts.csv").write_text("label, text\n3, my card\n", encoding="utf-8")
    assert read_texts(tmp_path / "texts.csv", " text", None, "--data").texts == [" my card"]


def test_spaces_after_the_commas_of_a_table_are_no_part_of_quoted_texts(tmp_path: Path) -> None:
    table = read_lines(tmp_path, '"notes, old", label, "text"', 'none, 3, "hello, world"')
    assert table.texts == ["hello, world"]
    assert table.labels is not None and table.labels.tolist() == [3]
    assert read_lines(tmp_path, "label,text", "3, a text that begins so").texts == [" a text that begins so"]


@pytest.mark.parametrize("twice", ["text", "label"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_column_that_is_there_twice_is_one_line(tmp_path: Path, suffix: str, twice: str) -> None:
    """Which of them is meant? A join of tables leaves two of a name."""
    path = tmp_path / f"texts.{suffix}"
    if suffix == "csv":
        path.write_text(f"text,label,{twice}\na,b,c\n", encoding="utf-8")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        columns = pyarrow.Table.from_arrays([["a"], ["b"], ["c"]], names=["text", "label", twice])
        pytest.importorskip("pyarrow.parquet").write_table(columns, path)
    with pytest.raises(DataError) as refused:
        read_texts(path, "text", None, "--data")
    assert str(refused.value).endswith(f" has 2 columns `{twice}`; rename or remove all but one")


@pytest.mark.parametrize(("sign", "called"), [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")])
def test_a_table_with_other_signs_than_commas_is_one_line(tmp_path: Path, sign: str, called: str) -> None:
    """It was said to hold texts with commas that are not quoted, or to have no column of texts."""
    with pytest.raises(DataError) as refused:
        read_lines(tmp_path, f'label{sign}"text"', f"a{sign}my card, please", f"b{sign}where is it?")
    assert str(refused.value).endswith(f"texts.csv has {called} between its columns; write it with commas")


def test_a_quote_that_is_not_closed_does_not_swallow_the_rest(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"a double quote in the last 3 lines is not closed, so they are one row"
    ):
        read_lines(tmp_path, "label,text", '1,"a', "2,b", "3,c")
    with pytest.raises(
        DataError, match="a field has more than 131072 characters; close its double quote, or"
    ):
        read_lines(tmp_path, "label,text", '1,"a', *(["2,b"] * 40_000))
    assert read_lines(tmp_path, "label,text", '1,"a', '""b"""', '2,5" pipe').texts == ['a\n"b"', '5" pipe']


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow")
def test_a_parquet_column_of_floats_is_read_alike(tmp_path: Path) -> None:
    from pyarrow import parquet, table

    path = tmp_path / "texts.parquet"
    parquet.write_table(table({"text": ["a", "b", "c"], "label": [2.0, 10.0, 0.0]}), path)
    labels = read_texts(path, "text", None, "--data").labels
    assert labels is not None and labels.tolist() == [2, 10, 0]
    parquet.write_table(table({"text": ["a", "b"], "label": [2.0, float("nan")]}), path)
    with pytest.raises(DataError, match="row 1 has no label"):
        read_texts(path, "text", None, "--data")


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow")
def test_parquet_values_that_are_neither_texts_nor_classes_are_one_line(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "texts.parquet"
    parquet.write_table(pyarrow.table({"text": [["a"], ["b"]]}), path)
    with pytest.raises(DataError, match="`text` of row 0 is a list; write strings"):
        read_texts(path, "text", None, "--data")
    if find_spec("pandas") is not None:
        return  # it can read the following
    times = pyarrow.array([1, 2], pyarrow.timestamp("ns"))
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": times}), path)
    with pytest.raises(
        DataError, match="has values that cannot be read .*write texts as strings, and classes"
    ):
        read_texts(path, "text", None, "--data")


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow")
def test_a_parquet_file_of_pictures_is_not_taken_for_texts(tmp_path: Path) -> None:
    from pyarrow import parquet, table

    path = tmp_path / "train.parquet"
    for pictures in ([{"bytes": b"PNG", "path": "0.png"}], [b"PNG"]):
        parquet.write_table(table({"image": pictures, "label": [0]}), path)
        with pytest.raises(DataError) as error:
            load_data(path, Preprocessing(), what="--data")
        assert str(error.value).startswith(
            f"--data: column `image` of {path} holds pictures or other files; "
        )
    parquet.write_table(table({"text": ["a"]}), path)
    with pytest.raises(DataError, match=r"holds texts; give the network's tokenizer: --tokenizer FILE"):
        load_data(path, Preprocessing())
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="is not valid Parquet"):
        load_data(path, Preprocessing())
