"""superstep plan --serve: what a server will do, without one; and what cannot be foreseen is refused in a line."""

import json
from dataclasses import replace

import pytest

from superstep.cli.main import main
from superstep.hardware.cluster_file import cluster, read_cluster, write_cluster
from superstep.hardware.serving_rate import ServingRate

RATE = ServingRate(
    way="bf16-w8a8",
    tp=2,
    block_keys=64,
    is_paged=True,
    term_s=(("layer", 1e-4), ("rows_1", 1e-10), ("rows_512", 2e-9), ("step", 2e-4)),
    held_bytes=2.5,
    beside_bytes=1e8,
    spread=0.03,
)


def test_a_server_on_published_hardware_is_foreseen(capsys, tmp_path):
    out = tmp_path / "plan.json"
    words = ["plan", "llama3-8b", "--serve", "--cluster", "2xH100", "--plan.dp", "2", "--serve.requests", "32"]
    assert main([*words, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "published peak rates" in said
    told = json.loads(out.read_text(encoding="utf-8"))
    assert told["weight_bytes"] == pytest.approx(16.06e9, rel=0.01)
    assert told["page_bytes"] == 16 * 2 * 32 * 8 * 128 * 2
    streams = [each["streams"] for each in told["rooms"]]
    assert streams == sorted(streams, reverse=True)
    first = [each["first_token_s"] for each in told["firsts"]]
    assert first == sorted(first)
    rates = {each["streams"]: each["tokens_per_s"] for each in told["crowds"]}
    assert 60 < rates[1] < 200
    assert rates[2] == pytest.approx(2 * rates[1])  # one for each replica
    assert rates[64] > 10 * rates[1]


def test_a_measured_cluster_file_is_read_and_used(capsys, tmp_path):
    measured = replace(cluster("1xH100").chip, serving=(RATE,))
    file = tmp_path / "here.toml"
    file.write_text(write_cluster(replace(cluster("1xH100"), chip=measured)), encoding="utf-8")
    assert read_cluster(file).chip.serving == (RATE,)
    words = ["plan", "demo", "--serve", "--cluster", str(file), "--serve.quantize", "w8a8", "--plan.tp", "2"]
    assert main([*words, "--serve.pages", "2048"]) == 0
    said = capsys.readouterr().out
    assert "within 3% in the median" in said
    assert "2,048 pages" in said
    assert main(["plan", "demo", "--serve", "--cluster", str(file)]) == 2
    assert "superstep measure --serve bf16 --serve-tp 1 measures it" in capsys.readouterr().err


def planned(tmp_path, *words, name="plan"):
    out = tmp_path / f"{name}.json"
    assert main(["plan", *words, "--serve", "--cluster", "1xH100", "--json", str(out)]) == 0
    return json.loads(out.read_text(encoding="utf-8"))


def test_a_small_model_that_guesses_is_priced(capsys, tmp_path):
    large, small = planned(tmp_path, "llama3-8b"), planned(tmp_path, "llama3.2-1b", name="small")
    both = planned(tmp_path, "llama3-8b", "--serve.speculate", "llama3.2-1b", name="both")
    said = capsys.readouterr().out
    assert large["guesses"] == small["guesses"] == []
    assert (both["weight_bytes"], both["small_weight_bytes"]) == (large["weight_bytes"], small["weight_bytes"])
    assert both["page_bytes"] == large["page_bytes"] + small["page_bytes"]
    # Its pages come out of what both models leave.
    less = large["key_bytes"] - both["key_bytes"]
    assert less == pytest.approx(both["small_weight_bytes"] / 4, rel=0.01)
    # It computes every known token, too: prompts and answers take longer even where nobody guesses.
    for one, alone in zip(both["firsts"], large["firsts"], strict=True):
        assert alone["first_token_s"] < one["first_token_s"] < 1.5 * alone["first_token_s"]
    guesses = {one["streams"]: one for one in both["guesses"]}
    one = guesses[1]
    assert one["tokens"] == 4
    # Four tokens guessed are four steps of the small model beside one of the large one, whose rows cost no more.
    assert one["guess_s"] > 4 * both["small_weight_bytes"] / 3.35e12
    assert one["plain_s"] < one["step_s"] < 1.2 * one["plain_s"]
    assert one["pays_from"] == pytest.approx((one["step_s"] + one["guess_s"]) / one["plain_s"] - 1)
    assert 0 < one["pays_from"] < 4
    assert one["best_tokens_per_s"] == pytest.approx(5 / (one["step_s"] + one["guess_s"]))
    assert guesses[64]["pays_from"] > one["pays_from"]
    assert "a rank: llama3.2-1b, its keys lie in the same pages" in said
    assert "drafting 4 of each" in said
    # A step has 512 rows.
    assert {streams: one["tokens"] for streams, one in guesses.items() if streams >= 64} == {64: 4}
    few = planned(tmp_path, "llama3-8b", "--serve.speculate", "ngram", "--serve.step-tokens", "160", name="few")
    assert {one["streams"]: one["tokens"] for one in few["guesses"]}[64] == 1
    assert few["small_weight_bytes"] == 0
    assert few["page_bytes"] == large["page_bytes"]
    assert {one["guess_s"] for one in few["guesses"]} == {0}
    assert few["firsts"][0] == large["firsts"][0]


def test_a_small_model_is_measured_as_it_is_served(capsys, tmp_path):
    """An exact server's small model computes in fast mode."""
    exact = replace(RATE, way="bf16-exact", tp=1)
    chip = cluster("1xH100").chip
    file = tmp_path / "exact.toml"
    words = ["plan", "demo", "--serve", "--cluster", str(file), "--numerics.exact", "true", "--serve.speculate", "demo"]
    file.write_text(write_cluster(replace(cluster("1xH100"), chip=replace(chip, serving=(exact,)))), encoding="utf-8")
    assert main(words) == 2
    assert "superstep measure --serve bf16 --serve-tp 1 measures it" in capsys.readouterr().err
    both = replace(chip, serving=(exact, replace(RATE, way="bf16", tp=1, held_bytes=2.0)))
    file.write_text(write_cluster(replace(cluster("1xH100"), chip=both)), encoding="utf-8")
    assert main(words) == 0
    assert "small" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama3-8b", "--serve", "--cluster", "1xH100", "--serve.speculate", "demo"], "of the same vocabulary"),
        (["llama3-8b", "--serve", "--cluster", "1xH100", "--serve.speculate", "no/where"], "'no/where' is not there"),
        (
            ["llama3-8b", "--serve", "--cluster", "1xH100", "--serve.speculate", "llama3-70b"],
            "no memory is left for the KV cache",
        ),
        (["--serve"], "name a model"),
        (["nothing", "--serve", "--cluster", "1xH100"], "'nothing' is not there"),
        (["demo", "--serve", "--prompt", "0"], "--prompt = 0 must be at least 1"),
        (["demo", "--serve", "--cluster", "1xH100", "--prompt", "2000"], "are more than a context of 2048 tokens"),
        (["demo", "--serve", "--plan.dp", "2"], "plan.dp = 2 without --cluster"),
        (["demo", "--serve", "--serve.tokens", "3"], "unknown flag --serve.tokens"),
        (["llama3-70b", "--serve", "--cluster", "1xH100"], "no memory is left for the KV cache"),
        (["demo", "--serve", "--cluster", "1xH100", "--plan.tp", "3"], "tp"),
        (["demo", "--serve", "--cluster", "1xH100", "--serve.context-tokens", "9999"], "made for; set"),
        (["demo", "--serve", "--cluster", "1xH100", "--serve.pages", "4"], "takes 128 pages"),
    ],
)
def test_a_mistake_is_one_line(words, said, capsys):
    assert main(["plan", *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
