"""A file of a user's that imports a module by its old name is told the new one."""

import importlib.util

import pytest

from superstep.errors import ConfigError
from superstep.plan.renamed import RENAMED
from superstep.plan.user_file import load_functions


def refusal(path, imported):
    """What a file says that imports such a module."""
    file = path / "my_loss.py"
    file.write_text(f"import {imported}\n\n\ndef loss(logp):\n    return -logp\n")
    with pytest.raises(ConfigError) as refused:
        load_functions(file, {"loss": "loss(logp)"}, kind="loss")
    return str(refused.value)


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_refused_with_the_new_one(tmp_path, old):
    assert f"No module named '{old}'; it is {RENAMED[old]} now" in refusal(tmp_path, old)


def test_new_names_are_modules():
    names = [name for new in RENAMED.values() for name in new.replace(" or ", ", ").split(", ")]
    assert [name for name in names if importlib.util.find_spec(name) is None] == []


def test_a_module_that_never_was_has_no_new_name(tmp_path):
    assert refusal(tmp_path, "superstep.no_such_module").endswith("No module named 'superstep.no_such_module'.")
