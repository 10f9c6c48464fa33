"""The page that says where things are: each folder is there, and its docstring has the word of the question."""

import ast
import re
from pathlib import Path

import pytest

import superstep

PACKAGE = Path(superstep.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "find-your-way.md"
GLOSSARY = PAGE.with_name("glossary.md")
ROWS = re.findall(r"^\| (Where .*\?) \| `([\w/]+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_forty_questions_are_answered():
    assert len(ROWS) >= 40
    assert PAGE.read_text(encoding="utf-8").count("| Where ") == len(ROWS), "a row is not of the form of the others"
    assert len({question for question, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("question", "folder"), ROWS, ids=[question for question, _ in ROWS])
def test_the_folder_says_so_itself(question, folder):
    text = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8")))
    (term,) = re.findall(r"\*\*(.+?)\*\*", question)
    assert re.search(rf"(?i)\b{re.escape(term)}(?!\w)", " ".join(text.split()))


def test_the_glossary_is_short_and_sorted_and_its_folders_are_there():
    rows = re.findall(r"^\| ([\w ]+) \| .+ \| `([\w/]+)` \|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    words = [word for word, _ in rows]
    assert 40 <= len(words) <= 60
    assert words == sorted(set(words))
    assert [folder for _, folder in rows if not (PACKAGE / folder / "__init__.py").is_file()] == []


def test_every_folder_says_what_it_holds():
    folders = [path.parent for path in PACKAGE.rglob("__init__.py")]
    assert len(folders) > 50
    silent = [folder for folder in folders if not ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))]
    assert silent == []
