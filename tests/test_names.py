"""Names: no two public classes of the package have one name, and no name has a banned word."""

import ast
from collections import defaultdict
from pathlib import Path

import superstep
from house import Module, banned_names, participles, read_package

PACKAGE = Path(superstep.__file__).parent


def shared(classes):
    """The names that more than one module defines, with these modules.

    Args:
        classes: pairs of a module and the name of a class of it.
    """
    modules = defaultdict(list)
    for module, name in classes:
        if not name.startswith("_"):
            modules[name].append(module)
    return {name: where for name, where in modules.items() if len(where) > 1}


def test_no_two_public_classes_have_one_name():
    classes = [
        (str(path.relative_to(PACKAGE)), node.name)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    assert len(classes) > 700
    assert shared(classes) == {}


def test_a_second_class_of_one_name_is_seen():
    assert shared([("a.py", "Step"), ("b.py", "Step"), ("b.py", "_Own"), ("a.py", "_Own")]) == {
        "Step": ["a.py", "b.py"]
    }


WRITTEN = ("tokens_seen", "found", "found_inf")
"""Names that others read: two fields of events in metrics.jsonl, and an argument of torch's fused AdamW."""

MOST_PARTICIPLES = 15
"""Functions that are named by a participle: ``prepared`` where ``prepare`` is meant."""


def test_no_name_has_a_banned_word():
    names = {(module.path.as_posix(), name) for module, name in banned_names(read_package(PACKAGE))}
    assert {name for _, name in names} == set(WRITTEN)
    found = {path for path, name in names if name == "found"}
    assert found == {"observe/events.py", "train/rollback.py", "cli/train/rollback_text.py"}


def test_functions_are_named_by_verbs():
    """The count of those that are not goes down, never up."""
    assert len(participles(read_package(PACKAGE))) <= MOST_PARTICIPLES


def test_a_banned_word_is_detected_as_a_part_of_a_name():
    source = "asked_of = 1  # told\nretold = 'seen'\n"
    assert [name for _, name in banned_names([Module(Path("a.py"), source, ast.parse(source))])] == ["asked_of"]
