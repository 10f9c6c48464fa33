"""The corpus reads what it is told to, in a fixed order, and says what is wrong with the rest."""

import json
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from superstep.data.corpus import documents, source_files
from superstep.errors import DataError


def read(*paths: Path, text_field: str = "text") -> list[str]:
    return list(documents(tuple(str(path) for path in paths), text_field))


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
        ("d.jsonl", '{"text": null}', "data.text_field = 'text' is null in "),
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
        list(documents(("",), "text"))
    with pytest.raises(DataError, match="is neither a file nor a folder"):
        list(documents(("/dev/null",), "text"))
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "broken.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match=r"broken.txt' does not exist"):
        read(tmp_path / "links")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    path = write(tmp_path / "secret.txt", "x")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"secret.txt' cannot be read \(Permission denied\); grant access"):
        read(path)


def test_jsonl_is_read_a_line_at_a_time(tmp_path):
    lines = [json.dumps({"text": "x"}), "not json"]
    first = next(documents((str(write(tmp_path / "a.jsonl", "\n".join(lines))),), "text"))
    assert first == "x"
