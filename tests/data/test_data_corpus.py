"""The corpus reads what it is told to, in a fixed order, and says what is wrong with the rest."""

import codecs
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from superstep.data.preparation import records
from superstep.data.preparation.corpus import CorpusReader, source_files
from superstep.data.preparation.text_files import BLOCK_BYTES
from superstep.data.split_documents import DocumentPart
from superstep.errors import DataError
from superstep.plan.config import DataConfig


def reader(*paths: Path | str, text_field: str = "text", nulls: str = "skip") -> CorpusReader:
    return CorpusReader(DataConfig(corpus=tuple(map(str, paths)), text_field=text_field, nulls=nulls))


def whole(parts: Iterable[DocumentPart]) -> list[str]:
    """The documents, put together again."""
    found, text = [], ""
    for part in parts:
        text += part.text
        if part.is_last:
            found.append(text)
            text = ""
    assert not text, "a document has an end"
    return found


def read(*paths: Path, text_field: str = "text") -> list[str]:
    return whole(reader(*paths, text_field=text_field).parts())


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_folder_is_walked_in_sorted_order_without_hidden_and_binary_files(tmp_path):
    for name, content in {
        "b.txt": "b",
        "a.md": "a\r\n",
        "sub/c.py": "c",
        "sub/d.jsonl": '{"text": "d"}\n\n{"text": ""}\n{"text": "e"}\n',
        ".hidden": "no",
        ".git/config": "no",
        "picture.png": b"\x89PNG\0\xff",
        "__init__.py": "",
    }.items():
        write(tmp_path / name, content)
    assert read(tmp_path) == ["a\r\n", "b", "c", "d", "e"]
    assert read(tmp_path / "sub", tmp_path / "b.txt") == ["c", "d", "e", "b"]


def test_parquet_gives_a_document_a_row(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["one", "", "two"], "id": [1, 2, 3]}), path)
    assert read(path, text_field="body") == ["one", "two"]
    with pytest.raises(DataError, match=r"data.text_field = 'bodi' .* body, id; did you mean 'body'\?"):
        read(path, text_field="bodi")
    with pytest.raises(DataError, match=r"data.text_field = 'id' is a number in .*a.parquet row 1, not text"):
        read(path, text_field="id")
    with pytest.raises(DataError, match="is not sound parquet"):
        read(write(tmp_path / "b.parquet", "text"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install superstep\[parquet\]"):
        read(write(tmp_path / "a.parquet", "x"))


def test_the_default_is_the_standard_library_without_tests_and_packages():
    files = [file.path for file in source_files(())]
    names = {path.name for path in files}
    assert {"argparse.py", "dataclasses.py", "decoder.py"} <= names
    assert not {"test_argparse.py", "pytest.py"} & names
    assert all(path.suffix == ".py" for path in files)
    assert len(files) > 300


def test_a_library_file_that_is_not_utf8_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    write(tmp_path / "good.py", "x = 1\n")
    write(tmp_path / "latin.py", "caf\xe9".encode("latin-1"))
    write(tmp_path / "site-packages" / "other.py", "no")
    assert read() == ["x = 1\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", "empty.txt' holds no text; name files that do."),
        ("latin.txt", b"caf\xe9 au", "latin.txt' is not UTF-8 at byte 3; convert it, for example: iconv "),
        ("binary.txt", b"ab\0c", "binary.txt' is binary (a NUL at byte 2); name a file of text."),
        ("a.jsonl", '{"text": "a"}\n{"text": ', "a.jsonl:2' is not JSON (Expecting value"),
        ("b.jsonl", "[1]", "b.jsonl:1' is a list, not an object; put one JSON object on each line."),
        ("c.jsonl", '{"txt": "a", "id": 1}', "c.jsonl:1, whose fields are: txt, id; did you mean 'txt'?"),
        ("d.jsonl", '{"text": [1]}', "data.text_field = 'text' is a list in "),
        ("e.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "e.jsonl:2' is not UTF-8 at byte 24"),
        ("f.jsonl", '{"text": "\\ud800"}', "f.jsonl:1' holds half a surrogate pair (\\ud800)"),
        ("g.jsonl", "{}", "g.jsonl:1, whose fields are: none; leave the empty object out."),
        ("h.jsonl", "[" * 100_000, "h.jsonl:1' is not JSON"),
        ("folder/latin.md", b"\xe9", "latin.md' is not UTF-8 at byte 0"),
        ("folder/.hidden", "text", "folder' holds no text"),
    ],
)
def test_errors_are_one_line_that_names_place_rule_and_mend(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / "folder" if name.startswith("folder") else path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("data.")


def test_paths_that_cannot_be_read_are_errors(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"nowhere.txt' does not exist; name a text"):
        read(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match="is no path"):
        list(reader("").parts())
    with pytest.raises(DataError, match="is neither a file nor a folder"):
        list(reader("/dev/null").parts())
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "broken.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match=r"broken.txt' does not exist"):
        read(tmp_path / "links")

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    path = write(tmp_path / "secret.txt", "x")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"secret.txt' cannot be read \(Permission denied\); grant access"):
        read(path)


def test_jsonl_is_read_a_line_at_a_time(tmp_path):
    lines = [json.dumps({"text": "x"}), "not json"]
    first = next(reader(write(tmp_path / "a.jsonl", "\n".join(lines))).parts())
    assert first == DocumentPart("x", is_last=True)


TEXT = "caf\xe9 \U0001f642\r\nsecond line\u2028still it\n"


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
    ],
    ids=str,
)
def test_a_mark_at_the_start_says_how_the_text_is_written_and_is_none_of_it(tmp_path, mark, encoding):
    assert read(write(tmp_path / "a.txt", mark + TEXT.encode(encoding))) == [TEXT]
    line = json.dumps({"text": TEXT}, ensure_ascii=False) + "\n"
    path = write(tmp_path / "b.jsonl", mark + (line * 3).encode(encoding))
    assert read(path) == [TEXT] * 3
    write(tmp_path / "c.txt", mark + "ab".encode(encoding) + b"\xd8")
    with pytest.raises(DataError, match=rf"c.txt' is not {encoding.upper()} at byte \d+;") as caught:
        read(tmp_path / "c.txt")
    assert ("iconv" in str(caught.value)) is (encoding == "utf-8")


def test_the_place_of_a_wrong_byte_is_counted_over_blocks(tmp_path):
    for content, place in (
        ("é".encode() * BLOCK_BYTES + b"\xff", 2 * BLOCK_BYTES),
        (b"a" + "é".encode() * BLOCK_BYTES + b"\xc3", 2 * BLOCK_BYTES + 1),
    ):
        with pytest.raises(DataError, match=f"is not UTF-8 at byte {place};"):
            read(write(tmp_path / "a.txt", content))


def test_a_file_is_read_in_parts_and_a_late_nul_makes_it_binary(tmp_path):
    text = "é" * (2 * BLOCK_BYTES)
    path = write(tmp_path / "folder" / "a.txt", text)
    parts = list(reader(path).parts())
    assert len(parts) > 2
    assert whole(parts) == [text]
    found = reader(tmp_path / "folder", path)
    assert whole(found.parts()) == [text, text]
    assert found.read_bytes == 2 * path.stat().st_size
    write(path, text + "\0")
    write(tmp_path / "folder" / "b.txt", "b")
    assert read(tmp_path / "folder") == ["b"]
    with pytest.raises(DataError, match=rf"a.txt' is binary \(a NUL at byte {4 * BLOCK_BYTES}\)"):
        read(path)


def nulls(folder: Path) -> list[Path]:
    lines = [{"text": "one"}, {"text": None}, {"text": ""}, {"text": "two"}]
    jsonl = write(folder / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    parquet.write_table(pyarrow.table({"text": [line["text"] for line in lines]}), folder / "a.parquet")
    return [jsonl, folder / "a.parquet"]


def test_records_of_null_are_passed_over_and_counted_or_refused(tmp_path):
    for path in nulls(tmp_path):
        found = reader(path)
        assert whole(found.parts()) == ["one", "two"]
        assert found.nulls == 1
        with pytest.raises(DataError, match=rf"is null in record 2 of .*{path.name}; set data.nulls to 'skip'"):
            list(reader(path, nulls="refuse").parts())


def test_a_long_record_comes_in_parts_and_one_too_long_is_refused(tmp_path, monkeypatch):
    text = "word " * 600_000
    jsonl = write(tmp_path / "a.jsonl", json.dumps({"text": text}) + "\n" + json.dumps({"text": "next"}))
    parquet.write_table(pyarrow.table({"text": [text, "next"]}), tmp_path / "a.parquet", compression="none")
    for path in (jsonl, tmp_path / "a.parquet"):
        parts = list(reader(path).parts())
        assert len(parts) > 2
        assert whole(parts) == [text, "next"]
    monkeypatch.setattr(records, "LONGEST_RECORD_BYTES", 1 << 20)
    monkeypatch.setattr(records, "LONGEST_CELL_BYTES", 1 << 20)
    for path in (jsonl, tmp_path / "a.parquet"):
        with pytest.raises(DataError, match=r"is one record of [12] MiB or more, and one is held whole; cut it"):
            read(path)


def test_a_parquet_file_of_long_rows_is_decoded_a_few_rows_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "READ_BYTES", 1000)
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [f"{i}" * 500 for i in range(100)]}), path, compression="none")
    asked = []
    inner = parquet.ParquetFile.iter_batches

    def iter_batches(self, size, **rest):
        asked.append(size)
        return inner(self, size, **rest)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", iter_batches)
    assert len(read(path)) == 100
    assert asked == [1]
