"""A verb's command line: an optional run.toml, then any field of its settings as a flag.

    --plan.tp 2   --plan.tp=2   --data.corpus a.txt b.txt   --data.text-field body   --plan.dp None
    --plan.rules.ffn none                                       one entry of a table

An error is one line, in the words of a run.toml's error.
"""

from __future__ import annotations

import math
import shlex
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar

from superstep.cli.flags.help import write_help
from superstep.errors import ConfigError, did_you_mean
from superstep.plan.config import PlanConfig, RunConfig, StateConfig
from superstep.plan.config_io import alternatives, describe_type, read_config, section_of, table_entry
from superstep.plan.mesh import AXES
from superstep.plan.resolution.resolve import Resolved

T = TypeVar("T")

COMMON = (
    "model.name",
    "data.corpus",
    "train.steps",
    "train.batch_sequences",
    "train.lr",
    "plan.dp",
    "plan.pp",
    "plan.tp",
    "plan.zero",
    "numerics.compute",
    "state.dir",
    "state.existing",
)
"""First fields in the help of a run."""

YIELDING = ("plan.microbatch", "plan.microbatch_group", "plan.schedule", "plan.zero", "plan.dp")
"""Fields that a demo or a saved run has set: they yield to the user's settings if no flag names them."""

DEMO = RunConfig(plan=PlanConfig(dp=2, zero=2, microbatch=4), state=StateConfig(dir="runs/demo"))
"""Two ranks, each with half of the gradients and of the optimizer."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a flag's number, given at its field: ``tasks: Annotated[int, Bounds(least=1, most=9)]``."""

    least: float | None = None
    above: float = -math.inf
    most: float = math.inf
    is_finite: bool = False

    def __str__(self) -> str:
        """The bounds in an error message."""
        if self.least is not None:
            return f"at least {self.least:g}" if self.most == math.inf else f"from {self.least:g} to {self.most:g}"
        more = " and finite" if self.is_finite else "" if self.most == math.inf else f" and at most {self.most:g}"
        return f"above {self.above:g}{more}"

    def has(self, value: float) -> bool:
        """Whether a number is within the bounds; NaN is not."""
        is_high_enough = value > self.above if self.least is None else value >= self.least
        return is_high_enough and value <= self.most and (math.isfinite(value) or not self.is_finite)


def read_run(path: Path) -> RunConfig:
    """The run of a TOML file.

    Raises:
        ConfigError: it cannot be used, or has another suffix: an empty file would be the demo.
    """
    if path.is_file() and path.suffix != ".toml":
        raise ConfigError(
            f"'{path}' is not a .toml file; name a run.toml, or train on the text of a file: "
            f"superstep train --data.corpus {shlex.quote(str(path))}."
        )
    return read_config(path)


def ranks_of(plan: PlanConfig) -> int:
    """The number of ranks of a plan, with open axes counted as 1."""
    return math.prod(getattr(plan, axis) or 1 for axis in AXES)


def settle(config: RunConfig, argv: Sequence[str], resolve: Callable[[RunConfig], Resolved]) -> Resolved:
    """Resolve a run with settings that are not the user's own, changed by the flags in ``argv``.

    As few as possible of the ``YIELDING`` fields without a flag become automatic again.

    Raises:
        ConfigError: the flags' settings cannot work; the message names no yielding field without a flag.
    """
    named = list_named_fields(argv)
    free = [name for name in YIELDING if name not in named and _plan_field(config.plan, name) is not None]
    for count in range(len(free)):
        for names in combinations(free, count):
            try:
                return resolve(_automatic(config, names))
            except ConfigError:
                continue
    return resolve(_automatic(config, free))


def list_named_fields(argv: Sequence[str]) -> set[str]:
    """The fields that flags name."""
    return {flag.replace("-", "_") for flag, _ in _groups(argv)}


def _plan_field(plan: PlanConfig, name: str) -> object:
    """The value of a field; None if it is automatic."""
    key = name.removeprefix("plan.")
    value: object = getattr(plan, key)
    return None if value == getattr(PlanConfig(), key) else value


def _automatic(config: RunConfig, names: Sequence[str]) -> RunConfig:
    keys = [name.removeprefix("plan.") for name in names]
    return replace(config, plan=replace(config.plan, **{key: getattr(PlanConfig(), key) for key in keys}))


def read_flags(base: T, argv: Sequence[str], *, prog: str, description: str, common: Sequence[str] = ()) -> T:
    """A dataclass, with possibly nested dataclasses, with the flags' fields replaced.

    Args:
        common: first fields in the help.

    Raises:
        ConfigError: a flag is wrong, or a number is out of its field's bounds.
        SystemExit: after printing help.
    """
    if asks_for_help(argv):
        print(write_help(base, usage=f"{prog} [--FLAG VALUE ...]", description=description, common=common), end="")
        raise SystemExit(0)
    hints = dict(_hints(type(base), ""))
    for flag, words in _groups(argv):
        name = flag.replace("-", "_")
        table, _, key = name.rpartition(".")
        if (entry := table_entry(hints.get(table))) is not None:
            base = _with(base, table.split("."), _enter(base, table, key, _value(flag, words, entry)))
            continue
        if name not in hints:
            raise ConfigError(f"unknown flag --{flag}{_nearest(name, hints, prog)}")
        base = _with(base, name.split("."), _value(flag, words, hints[name]))
    _check_bounds(base, "")
    return base


def read_names(
    base: T, argv: Sequence[str], *, prog: str, description: str, common: Sequence[str] = ()
) -> tuple[list[str], T]:
    """The words before all flags, and the flags; raises as ``read_flags`` does."""
    names = list(takewhile(lambda word: not word.startswith("-"), argv))
    return names, read_flags(base, argv[len(names) :], prog=prog, description=description, common=common)


def read_name(
    base: T, argv: Sequence[str], missing: str, *, prog: str, description: str, common: Sequence[str] = ()
) -> tuple[str, T]:
    """The only word before the flags, such as a run or a model, and the flags; raises as ``read_flags`` does.

    Args:
        missing: the error without the word.
    """
    names, options = read_names(base, argv, prog=prog, description=description, common=common)
    if not names:
        raise ConfigError(missing)
    if len(names) > 1:
        raise _stray(names[1])
    return names[0], options


def _check_bounds(options: Any, prefix: str) -> None:  # noqa: ANN401
    for name, hint in typing.get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name)
        if section_of(hint) is not None and value is not None:
            _check_bounds(value, f"{prefix}{name}.")
        for bounds in getattr(hint, "__metadata__", ()):
            if value is not None and not bounds.has(value):
                shown = f"{prefix}{name}" if prefix else f"--{name.replace('_', '-')}"
                raise ConfigError(f"{shown} = {value} must be {bounds}.")


def sections_of(config: RunConfig) -> dict[str, Any]:
    """The sections of a run by name, without a verb's own options."""
    return {section.name: getattr(config, section.name) for section in fields(RunConfig)}


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether to print help."""
    return "-h" in argv or "--help" in argv


def asks_for_hosts(argv: Sequence[str]) -> bool:
    """Whether several hosts have a launcher each, even under torchrun."""
    return any(word.partition("=")[0] == "--hosts" for word in argv)


def _hints(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """Each field's dotted name and its type."""
    hints = typing.get_type_hints(cls)
    for field in fields(cls):
        hint = hints[field.name]
        section = section_of(hint)
        if section is not None:
            yield from _hints(section, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hint


def _groups(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag without its dashes, with its words."""
    group: tuple[str, list[str]] | None = None
    for word in argv:
        if not word.startswith("--"):
            if group is None:
                raise _stray(word)
            group[1].append(word)
            continue
        if group is not None:
            yield group
        flag, has_value, value = word[2:].partition("=")
        group = flag, [value] if has_value else []
    if group is not None:
        yield group


def _stray(word: str) -> ConfigError:
    return ConfigError(f"'{word}' belongs to no flag; what is named without a flag comes first, before all flags.")


def _nearest(name: str, known: Mapping[str, Any], prog: str) -> str:
    plain = [other for other, hint in known.items() if table_entry(hint) is None]
    same_end = [other for other in plain if other.rpartition(".")[2] == name.rpartition(".")[2]]
    if len(same_end) == 1:
        return did_you_mean(same_end[0], [f"--{same_end[0].replace('_', '-')}"])
    hint = did_you_mean(f"--{name}".replace("_", "-"), [f"--{other}".replace("_", "-") for other in known])
    return hint if hint.startswith("; did") else f"; {prog.partition(' [')[0]} --help lists them."


def _value(flag: str, words: list[str], hint: object) -> object:
    options = alternatives(hint)
    if (entry := table_entry(options[0])) is not None:
        raise ConfigError(f"--{flag} is a table: write --{flag}.KEY with a value that is {describe_type(entry)}.")
    is_list = typing.get_origin(options[0]) is tuple
    if not words and bool in options:
        return True
    if not words and not is_list:
        raise ConfigError(f"--{flag} has no value; it must be {describe_type(hint)}.")
    if len(words) > 1 and not is_list:
        raise _stray(words[1])
    for option in options:
        is_read, value = _convert(words, option)
        if is_read:
            return value
    hint_of_names = " What is named without a flag comes before all flags." if bool in options else ""
    raise ConfigError(f"--{flag} = '{' '.join(words)}' is not valid; it must be {describe_type(hint)}.{hint_of_names}")


def _split_list(words: Sequence[str]) -> Sequence[str]:
    """The items of a list, which may also have run.toml's form: [1, 3]."""
    whole = " ".join(words)
    if not (whole.startswith("[") and whole.endswith("]")):
        return words
    return [item.strip().strip("\"'") for item in whole[1:-1].split(",") if item.strip()]


def _convert(words: Sequence[str], option: Any) -> tuple[bool, object]:  # noqa: ANN401
    """Whether the words are a value of the type, and the value."""
    if typing.get_origin(option) is tuple:
        words = _split_list(words)
        items = [_convert([word], typing.get_args(option)[0]) for word in words]
        return all(is_read for is_read, _ in items), tuple(value for _, value in items)
    (word,) = words
    if typing.get_origin(option) is Literal:
        return word in typing.get_args(option), word
    if option is type(None):
        return word == "None", None
    if option is bool:
        return word.lower() in ("true", "false"), word.lower() == "true"
    try:
        return True, option(word)
    except ValueError:
        return False, None


def _enter(base: Any, table: str, key: str, value: object) -> tuple[tuple[str, object], ...]:  # noqa: ANN401
    """The table with an entry added or replaced. One in an absent table is the first."""
    for name in table.split("."):
        base = None if base is None else getattr(base, name)
    return tuple(sorted({**dict(base or ()), key: value}.items()))


def _with(base: Any, path: Sequence[str], value: object) -> Any:  # noqa: ANN401
    name, *rest = path
    if not rest:
        return replace(base, **{name: value})
    section = getattr(base, name)
    if section is None:  # a flag of an absent table turns it on
        section = typing.cast(type, section_of(typing.get_type_hints(type(base))[name]))()
    return replace(base, **{name: _with(section, rest, value)})
