"""The files of recipes in tests: a recipe's Python as a module, and a folder where `recipes` is found."""

import importlib.util
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"


def load_recipe(name):
    """The module ``recipes/NAME.py``, read anew."""
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def enter_folder(folder, monkeypatch):
    """Work in a folder in which ``recipes`` are those of this repository."""
    (folder / "recipes").symlink_to(RECIPES)
    monkeypatch.chdir(folder)
    return folder
