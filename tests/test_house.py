"""The figures of ``make house`` count what they say, on a small package that has one of each."""

import pytest

import house

LONG = "def build():\n" + "".join(f"    x{n} = {n}\n" for n in range(61))
TWICE = "".join(f"    row.append({n})\n" for n in range(6))
FILES = {
    "__init__.py": '"""A package."""\n',
    "plan/text.py": "from pack.plan.inner.rules import cut\nclass Step: pass\ndef asked_for(told):\n    told = 1\n",
    "plan/inner/rules.py": "import pack.plan.text\n\n\ndef cut(x):\n    return x\n",
    "cli/text.py": "class Step:\n    @property\n    def closed(self):\n        return True\n",
    "cli/long.py": LONG,
    "cli/one.py": f"def one(row):\n{TWICE}",
    "cli/two.py": f"def two(row):\n{TWICE}",
    **{f"many/file{n}.py": "x = 1\n" for n in range(17)},
}


@pytest.fixture
def figures(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return house.measure(tmp_path / "pack")


def test_each_figure_counts_its_one(figures):
    assert figures["files in a row, folders above 16"] == {"many": 17}
    assert figures["public classes of one name"] == 1
    assert figures["file names used twice or more"] == 1
    assert figures["functions named by a participle"] == 1, "asked_for; closed is read like a field"
    assert figures["banned words in names"] == {"told": 2, "asked": 1}
    assert figures["functions above 60 lines"] == ["cli.long.build 62"]
    assert figures["folders that import their own rooms in a ring"] == ["plan - plan/inner"]
    assert figures["lines written twice"] == 12


def test_what_is_a_participle():
    assert all(map(house.is_participle, ("told", "_held", "checked_dtype", "found_in")))
    assert not any(map(house.is_participle, ("read_lines", "need", "feed_rows", "split", "tell", "embed")))


def test_a_file_that_imports_21_others_is_wide(tmp_path):
    folder = tmp_path / "pack"
    folder.mkdir()
    for number in range(21):
        (folder / f"part_{number}.py").write_text("X = 1\n")
    lines = [f"from pack.part_{number} import X\n" for number in range(21)]
    (folder / "narrow.py").write_text("".join(lines[:20]))
    (folder / "wide.py").write_text("".join(lines))
    assert house.wide_files(house.read_package(folder), "pack") == {"wide": 21}
