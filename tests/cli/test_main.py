"""The first seconds with the command: version, help on any terminal, and torch only where it is needed."""

import contextlib
import errno
import os
import subprocess
import sys

import pytest

import superstep
from superstep.cli.main import VERBS, main, report

QUICK = [
    [],
    ["--help"],
    ["--version"],
    ["trian"],
    *([verb, "--help"] for verb in VERBS),
    ["plan"],
    ["plan", "llama3-8b", "--cluster", "8xH100", "--top", "1"],
    ["scaling", "nothing.csv"],
]

PROGRAM = """
import sys
from superstep.cli.main import main
for argv in {argvs!r}:
    try:
        main(argv)
    except SystemExit as end:
        assert end.code == 0, argv
    assert "torch" not in sys.modules, argv
"""


def test_what_computes_nothing_does_not_wait_for_torch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(argvs=QUICK)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"superstep {superstep.__version__}\n"


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("argv", [["--help"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_is_as_wide_as_the_terminal(argv, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    with contextlib.suppress(SystemExit):
        main(argv)
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= columns
    assert "None" not in said.replace("None takes", "")


def test_help_begins_with_what_is_asked_for_most_and_names_every_field_once(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = capsys.readouterr().out
    flags = [line.split()[0] for line in said.splitlines() if line.startswith("  --")]
    assert flags[0] == "--model.name"
    assert flags.index("--train.steps") < flags.index("--state.dir") < flags.index("--model.layers")
    assert len(set(flags)) == len(flags) > 60
    assert "      Optimizer steps of the whole run. (600)\n" in said


def test_importing_the_command_reads_no_environment_and_imports_little():
    code = "import superstep.cli.main, sys; print({'numpy', 'scipy', 'rich', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout == "set()\n"


def test_an_error_of_the_system_names_path_and_fix(capsys):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device", "/runs/a")

    assert report(full) == 1
    said = capsys.readouterr().err
    assert said == "superstep: fault: /runs/a cannot be used: No space left on device; make room on its disk.\n"
