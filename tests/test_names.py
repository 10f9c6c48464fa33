"""One name for one thing: no two public classes of the package have one name."""

import ast
from collections import defaultdict
from pathlib import Path

import superstep

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
