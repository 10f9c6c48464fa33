"""Rules of the plan: whatever they leave whole, a layout computes what one device does; what cannot be is refused."""

import pytest
from test_parity import assert_proven, references  # noqa: F401

import small
from superstep.cli.flags.options import read_flags
from superstep.errors import ConfigError
from superstep.plan.config import PlanConfig, RunConfig
from superstep.plan.config_io import read_config, write_config
from superstep.plan.resolution.resolve import resolve

HEADS = (("heads", "none"), ("kv_heads", "none"))
FFN, VOCAB = ("ffn", "none"), ("vocab", "none")


def run_of(rules, *, tied=True, **plan):
    return resolve(small.config(layers=small.layers_for(plan), tied=tied, rules=tuple(sorted(rules)), **plan))


@pytest.mark.multiproc
def test_what_the_rules_leave_whole_is_computed_right(pool, references):  # noqa: F811
    cases = [
        run_of((FFN,), tp=2),
        run_of((FFN,), tp=2, sequence_parallel=False, recompute="selective"),
        run_of((VOCAB,), tp=2),
        run_of((VOCAB,), tp=2, sequence_parallel=False, tied=False),
        run_of((VOCAB, FFN), tp=2, tied=False, recompute="full"),
        run_of(HEADS, tp=2, sequence_parallel=False),
        run_of((*HEADS, VOCAB), tp=2, sequence_parallel=False),
    ]
    assert_proven(pool, 2, cases, references, timeout_s=120)


@pytest.mark.multiproc
def test_rules_meet_every_other_axis(pool, references):  # noqa: F811
    cases = [
        run_of((FFN,), tp=2, dp=2, zero=3, microbatch=2),
        run_of((VOCAB,), tp=2, pp=2, microbatch=2),
        run_of((VOCAB, FFN), tp=4, microbatch=2),
        run_of((VOCAB,), tp=2, dp=2, zero=2, tied=False),
    ]
    assert_proven(pool, 4, cases, references, timeout_s=120)


def test_a_table_of_rules_is_read_written_and_read_again(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[plan]\ntp = 2\n[plan.rules]\nvocab = "none"\nffn = "none"\n', encoding="utf-8")
    config = read_config(path)
    assert config.plan.rules == (("ffn", "none"), ("vocab", "none"))
    path.write_text(write_config(config), encoding="utf-8")
    assert read_config(path) == config
    assert "rules" not in write_config(RunConfig())


def test_a_flag_sets_one_rule_and_keeps_the_others():
    base = RunConfig(plan=PlanConfig(rules=(("ffn", "none"), ("vocab", "none"))))

    def given(*argv):
        return read_flags(base, argv, prog="superstep train", description="").plan.rules

    assert given("--plan.rules.vocab", "tp", "--plan.rules.kv-heads=none") == (
        ("ffn", "none"),
        ("kv_heads", "none"),
        ("vocab", "tp"),
    )
    with pytest.raises(ConfigError, match=r"rules\.ffn = 'dp' is not valid; it must be one of 'tp', 'ep', 'none'"):
        given("--plan.rules.ffn", "dp")
    with pytest.raises(ConfigError, match=r"rules is a table: write --plan\.rules\.KEY"):
        given("--plan.rules", "ffn")
