"""Figures of the package's structure and words: ``make house``, or ``python tests/support/house.py src/superstep``.

Each figure is a count of something that keeps a newcomer out: many files in one folder, one name for several classes or
files, functions that are named by a participle where a verb belongs, words that mean too many things, files that import
from everywhere, long functions, folders that import each other, lines that are written twice.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_STATEMENT_LINES = 60
"""A function of more lines than this is long."""
MOST_IMPORTED = 20
"""A file that imports more of the package's modules is wide: it puts together what has no name yet."""
SHARED_LINES = 6
"""Lines in a row that stand in two places are written twice."""
BANNED = ("told", "asked", "found", "seen", "hears", "said", "tells", "stands", "mended", "foreseen", "deed", "lesson")
"""Words that stood for a dozen things each: an event, a reply, a request, a result."""
IRREGULAR = (
    "told held said seen found made taken given kept known shown drawn written sent left lost brought bought built "
    "begun done gone grown heard laid led lent met paid sold spent spoken stood swept thrown won"
)
NO_PARTICIPLES = "need feed seed speed embed shed bed exceed proceed succeed heed breed red"
"""Words that end in "ed" and are none."""


@dataclass(frozen=True)
class Module:
    """One file of the package.

    Attributes:
        path: below the package's folder.
        source: its text.
        tree: of its syntax.
    """

    path: Path
    source: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """As it is imported, without the package's own name: ``plan.resolution.resolve``."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_package(folder: Path) -> list[Module]:
    """Every Python file below a folder that is not empty."""
    texts = [(path, path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]
    return [Module(path.relative_to(folder), text, ast.parse(text)) for path, text in texts if text.strip()]


def is_participle(name: str) -> bool:
    """Whether a function's name begins with a participle, as ``asked`` and ``checked_dtype`` do."""
    first = name.strip("_").split("_")[0]
    return first in IRREGULAR.split() or (first.endswith("ed") and first not in NO_PARTICIPLES.split())


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Of a module, those inside of classes and of functions too."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is read like a field, so that a noun or an adjective is its right name."""
    return any("property" in ast.unparse(each) for each in node.decorator_list)


def participles(modules: list[Module]) -> list[str]:
    """Functions whose name begins with a participle, each with its module."""
    return [
        f"{module.name}.{node.name}"
        for module in modules
        for node in functions(module)
        if is_participle(node.name) and not is_property(node)
    ]


def banned_words(modules: list[Module]) -> Counter[str]:
    """How often each of the banned words is a part of a name; text in docstrings and messages does not count."""
    return Counter(word for _, name in banned_names(modules) for word in words_of(name) if word in BANNED)


def banned_names(modules: list[Module]) -> Iterator[tuple[Module, str]]:
    """Each use of a name with a banned word, and its module."""
    for module in modules:
        for node in ast.walk(module.tree):
            for field in ("id", "attr", "arg", "name", "asname"):
                name = getattr(node, field, None)
                if isinstance(name, str) and not set(BANNED).isdisjoint(words_of(name)):
                    yield module, name


def words_of(name: str) -> list[str]:
    return name.lower().split("_")


def files_in_a_row(modules: list[Module]) -> Counter[str]:
    """Python files that lie side by side, by folder; ``__init__.py`` does not count."""
    return Counter(str(module.path.parent) for module in modules if module.path.name != "__init__.py")


def classes_of_one_name(modules: list[Module]) -> dict[str, list[str]]:
    """Public classes that more than one module defines."""
    places = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.name)
    return {name: where for name, where in places.items() if len(where) > 1}


def files_of_one_name(modules: list[Module]) -> dict[str, list[str]]:
    """File names that more than one folder has."""
    places = defaultdict(list)
    for module in modules:
        if module.path.name != "__init__.py":
            places[module.path.stem].append(module.name)
    return {name: where for name, where in places.items() if len(where) > 1}


def imports(module: Module, names: set[str], package: str) -> set[str]:
    """Modules of the package that one of them imports."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package:
            base = node.module.removeprefix(package).lstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                found.add(full if full in names else base)
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix(package + ".") for alias in node.names if alias.name.startswith(package)}
    return (found & names) - {module.name}


def fan_out(modules: list[Module], package: str) -> Counter[str]:
    """How many of the package's modules each of them imports."""
    names = {module.name for module in modules}
    return Counter({module.name: len(imports(module, names, package)) for module in modules})


def wide_files(modules: list[Module], package: str) -> dict[str, int]:
    """Modules that import more than ``MOST_IMPORTED`` others, and how many."""
    return {name: count for name, count in fan_out(modules, package).items() if count > MOST_IMPORTED}


def rings_of_folders(edges: dict[str, set[str]], folders: dict[str, str]) -> list[tuple[str, ...]]:
    """Folders that reach each other by imports, themselves or by others; each ring once.

    Args:
        edges: of each module, those that it imports.
        folders: of each module, where it lies.
    """
    reach: dict[str, set[str]] = defaultdict(set)
    for module, imported in edges.items():
        reach[folders[module]] |= {folders[each] for each in imported} - {folders[module]}
    closed = {folder: _reachable(folder, reach) for folder in {*folders.values()}}
    rings = {tuple(sorted({folder, *(b for b in closed[folder] if folder in closed[b])})) for folder in closed}
    return sorted(ring for ring in rings if len(ring) > 1)


def _reachable(start: str, reach: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        for each in reach[left.pop()] - found:
            found.add(each)
            left.append(each)
    return found


def long_functions(modules: list[Module]) -> list[str]:
    """Functions of more lines than is good for them, from their first line of code."""
    return [
        f"{module.name}.{node.name} {lines}"
        for module in modules
        for node in functions(module)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_STATEMENT_LINES
    ]


def lines_written_twice(modules: list[Module]) -> int:
    """Lines of code that stand in a row of six or more in another place too, imports and docstrings left out."""
    places = defaultdict(list)
    for module in modules:
        lines = list(_code_lines(module))
        for at in range(len(lines) - SHARED_LINES + 1):
            places[tuple(line for _, line in lines[at : at + SHARED_LINES])].append((module.name, lines, at))
    twice = {
        (name, lines[at + k][0])
        for where in places.values()
        if len(where) > 1
        for name, lines, at in where
        for k in range(SHARED_LINES)
    }
    return len(twice)


def _code_lines(module: Module) -> Iterator[tuple[int, str]]:
    left_out = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(module.source.splitlines(), 1):
        text = line.strip()
        if number not in left_out and re.search(r"\w", text) and not text.startswith("#"):
            yield number, text


def measure(folder: Path) -> dict[str, object]:
    """Every figure of a package.

    Args:
        folder: of the package; its name is the package's.
    """
    modules = read_package(folder)
    names = {module.name for module in modules}
    edges = {module.name: imports(module, names, folder.name) for module in modules}
    folders = {module.name: str(module.path.parent) for module in modules}
    rows = files_in_a_row(modules)
    nested = [ring for ring in rings_of_folders(edges, folders) if any(_is_inner(ring))]
    return {
        "files": len(modules),
        "lines": sum(len(module.source.splitlines()) for module in modules),
        "files in a row, folders above 16": {folder: count for folder, count in rows.most_common() if count > 16},
        "public classes of one name": len(classes_of_one_name(modules)),
        "file names used twice or more": len(files_of_one_name(modules)),
        "functions": sum(1 for module in modules for _ in functions(module)),
        "functions named by a participle": len(participles(modules)),
        "banned words in names": dict(banned_words(modules).most_common()),
        "fan-out, most": dict(fan_out(modules, folder.name).most_common(5)),
        f"functions above {MOST_STATEMENT_LINES} lines": long_functions(modules),
        "folders that import their own rooms in a ring": [" - ".join(ring) for ring in nested],
        "lines written twice": lines_written_twice(modules),
    }


def _is_inner(ring: tuple[str, ...]) -> Iterator[bool]:
    return (b != a and b.startswith(a + "/") for a in ring for b in ring)


def main(folders: list[str]) -> None:
    """Print the figures of packages, one below the other.

    Args:
        folders: of the packages.
    """
    for folder in folders:
        print(folder)
        for name, figure in measure(Path(folder)).items():
            print(f"  {name:48} {figure}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["src/superstep"])
