"""The walks of docs/explanation/walks.md: each file and function is there, and a run calls them in this order."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import superstep

PACKAGE = Path(superstep.__file__).parent
ROOT = Path(__file__).parents[1]
SUPPORT = ROOT / "tests" / "support"
PAGE = (ROOT / "docs" / "explanation" / "walks.md").read_text(encoding="utf-8")
WALKS = {
    part.partition("\n")[0]: re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \| .+ \|$", part, re.MULTILINE)
    for part in PAGE.split("\n## ")[1:-1]  # the last one is the exercise
}

BATCH = """
import os, sys
from pathlib import Path

import runs
from superstep.cli.main import main

folder = Path(sys.argv[1])
runs.make_files(folder)
os.chdir(folder)
sys.exit(main(["train", "run.toml", "--train.steps", "2"]))
"""

REQUEST = """
import json, sys
from pathlib import Path
from urllib.request import Request, urlopen

if __name__ == "__main__":
    import model_folder
    import superstep

    folder = model_folder.write_folder(Path(sys.argv[1]) / "model", layers=2, width=32, heads=4, kv_heads=4, ffn=64)
    with superstep.serve(str(folder)) as server:
        body = json.dumps({"model": server.info.name, "prompt": "to be ", "max_tokens": 4}).encode()
        request = Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urlopen(request) as response:
            json.load(response)
"""

REWARD = """
import sys
from pathlib import Path

if __name__ == "__main__":
    import reinforced
    from superstep.cli.main import main

    folder = Path(sys.argv[1])
    text = reinforced.RECIPE.format(start=reinforced.start(folder / "start"), environment="tasks.py")
    text += f'[train]\\nsteps = 2\\nlr = 3e-3\\n[state]\\ndir = "{folder}/run"\\n'
    (folder / "recipe.toml").write_text(text)
    sys.exit(main(["tune", "rl", str(folder / "recipe.toml")]))
"""

SCRIPTS = {"A batch": BATCH, "A served request": REQUEST, "A reward": REWARD}


def functions(file: str) -> Iterator[str]:
    """The functions of a file, by the classes and functions that they are in."""

    def within(node: ast.AST, before: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                if not isinstance(child, ast.ClassDef):
                    yield before + child.name
                yield from within(child, f"{before}{child.name}.")

    return within(ast.parse((PACKAGE / file).read_text(encoding="utf-8")), "")


def taken(script: str, first: tuple[str, str], folder: Path) -> list[tuple[str, str]]:
    """The functions of the package that a script's processes call, by their first calls, from one of them on."""
    (folder / "walked.py").write_text(script, encoding="utf-8")
    (folder / "flag").write_bytes(b"\0")
    environment = {
        "WALK_ROOT": str(PACKAGE),
        "WALK_OUT": str(folder / "calls"),
        "WALK_FLAG": str(folder / "flag"),
        "WALK_FROM": ":".join(first),
        "PYTHONPATH": os.pathsep.join(map(str, (SUPPORT / "walk", PACKAGE.parent, SUPPORT))),
    }
    command = [sys.executable, str(folder / "walked.py"), str(folder)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in (folder / "calls").read_text(encoding="utf-8").splitlines()]
    places = [place for _, _, place in sorted(lines, key=lambda line: int(line[0]))]
    return list(dict.fromkeys(tuple(place.split(":", 1)) for place in places))


def test_the_page_has_three_walks():
    assert list(WALKS) == list(SCRIPTS)
    assert sum(map(len, WALKS.values())) == PAGE.count("\n| `"), "a row is not of the form of the others"


@pytest.mark.parametrize("name", WALKS)
def test_files_and_functions_are_there_and_files_are_counted(name):
    rows = WALKS[name]
    assert [row for row in rows if row[1] not in set(functions(row[0]))] == []
    (told,) = re.findall(rf"^## {name}\n\n[^|]*?through (\d+) files", PAGE, re.MULTILINE)
    assert int(told) == len({file for file, _ in rows})


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.parametrize("name", WALKS)
def test_the_walk_is_taken_in_this_order(name, tmp_path):
    rows = WALKS[name]
    file, function = rows[0]
    called = taken(SCRIPTS[name], (file, function), tmp_path)
    assert [row for row in rows if row not in called] == [], "not called at all"
    assert sorted(rows, key=called.index) == rows
