"""The bench of model families, as far as a CPU goes: each family's cut, and one of them measured beside its peer."""

from __future__ import annotations

import json

import pytest

from bench import families
from superstep.comm.device import Device

TINY = families.Cut(
    layers=2, width=32, heads=4, head_dim=16, ffn=64, vocab=64, window=8, experts=4, tokens=16, sequences=2,
    microbatch=1,
)  # fmt: skip


@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.parametrize("cut", [families.LARGE, TINY], ids=["large", "tiny"])
def test_a_cut_family_keeps_what_makes_it_one_and_can_be_planned(name, cut, tmp_path):
    shape = cut.shape(name)
    whole = families.SHAPES[families.FAMILIES[name]]
    assert (shape.style, shape.family, shape.qk_norm) == (whole.style, whole.family, whole.qk_norm)
    for part in ("moe", "latent", "delta", "window"):
        assert (getattr(shape, part) is None) == (getattr(whole, part) is None)
    assert bool(shape.full_layers) == bool(whole.full_layers)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(families.to_hf_config(shape)), encoding="utf-8")
    run = families.run_of(path, cut, is_compiled=False)
    assert run.shape == shape
    assert families.predicted_bytes(run) > 4 * 4 * cut.vocab * cut.width


@pytest.mark.parametrize("name", ["gemma2", "deepseek-v3"])
def test_a_family_is_measured_beside_transformers(name):
    found = families.family(name, TINY, Device("cpu"), 2, ("superstep", "transformers"))
    ours, theirs = found["sides"]
    assert len(ours["all_step_s"]) == len(theirs["all_step_s"]) == 2
    assert found["attention of transformers"] == ("eager" if name == "gemma2" else "sdpa")
    assert "superstep" in families.told(found)


def test_what_fails_is_noted_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    def broken(name, *_):
        if name == "gemma2":
            raise ValueError("no such kernel")
        return {"sides": []}

    monkeypatch.setattr(families, "family", broken)
    out = tmp_path / "families.json"
    assert families.main(["--only", "gemma2", "olmo3", "--out", str(out)]) == 1
    assert json.loads(out.read_text())["families"] == {
        "gemma2": {"failed": "ValueError: no such kernel"},
        "olmo3": {"sides": []},
    }
    assert "FAILED ValueError: no such kernel" in capsys.readouterr().out
