"""Pages that say how to extend the source: their changes, applied to a copy of it, do what the pages say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def changed(page: str, folder: Path, *, without: str | None = None) -> Path:
    """A copy of the package with the changes of a page: each of its diffs is of the file that was named last.

    Args:
        page: below docs/howto.
        folder: for the copy.
        without: leaves out the one diff that has this text, as somebody who reads in haste may.
    """
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "docs" / "howto" / page).read_text(encoding="utf-8")
    found = list(re.finditer(r"^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert found
    assert without is None or sum(without in each[1] for each in found) == 1
    for each in found:
        if without is not None and without in each[1]:
            continue
        name = re.findall(r"`(src/superstep/[\w/]+\.py)`", text[: each.start()])[-1]
        lines = each[1].splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        path = folder / name
        whole = path.read_text(encoding="utf-8")
        assert whole.count(before) == 1, f"{page}: {name} has no such place, or several: {before}"
        path.write_text(whole.replace(before, after), encoding="utf-8")
    return source


def touched(page: str) -> set[str]:
    """The files of the package that a page's steps name."""
    text = (ROOT / "docs" / "howto" / page).read_text(encoding="utf-8")
    return set(re.findall(r"`(src/superstep/[\w/]+\.py)`", text))


def run(script: str, source: Path, folder: Path) -> str:
    """What a script prints that runs with the changed package. It is given both paths, and is a file: ranks import it
    by its name.
    """
    file = folder / "followed.py"
    file.write_text(script, encoding="utf-8")
    path = os.pathsep.join((str(source), str(ROOT / "tests" / "support")))
    command = [sys.executable, str(file), str(source), str(folder)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SCHEDULE = """
import sys
from dataclasses import replace
from pathlib import Path

import superstep
assert str(superstep.__file__).startswith(sys.argv[1]), superstep.__file__

import small
from corpus import write_corpus
from superstep.cost.program.memory.activations import unit_bytes
from superstep.observe.page.bubble import FORMULAS
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.program.peak_memory import high_water
from superstep.launch.ranks import launch_on
from superstep.train.proof.proof_inputs import Cases, prove_case


def main():
    runs = {name: resolve(small.config(pp=2, microbatch=1, schedule=name)) for name in ("1f1b", "eager-1f1b")}
    known, eager = (high_water(compile_step(run.plan), unit_bytes(run)) for run in runs.values())
    assert eager[0].kept_bytes > known[0].kept_bytes, "one microbatch more is in flight"
    assert eager[1].kept_bytes == known[1].kept_bytes
    assert FORMULAS["eager-1f1b"] == FORMULAS["1f1b"]
    try:
        resolve(small.config(pp=2, microbatch=1, chunks=2, schedule="eager-1f1b"))
    except superstep.errors.ConfigError as error:
        assert "runs one stage on a rank" in str(error)
    else:
        raise AssertionError("two stages on a rank are taken")
    folder = Path(sys.argv[2])
    corpus = write_corpus(folder / "corpus", vocab=small.VOCAB)
    case = Cases(folder / "references", corpus, steps=1).case(runs["eager-1f1b"], reruns=False)
    verdict = launch_on("cpu", 2, prove_case, case)
    assert verdict.is_proven, verdict.first and verdict.first.describe()


if __name__ == "__main__":
    main()
"""

FAMILY = """
import sys
from pathlib import Path

import torch
from transformers import SeedOssConfig, SeedOssForCausalLM

from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.hf import load_weights
from superstep.model.unit import global_tensors
from superstep.plan.model.hf_config import from_hf_config
from superstep.plan.model.hf_families import DEFAULTS

folder = Path(sys.argv[2]) / "model"
sizes = dict(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
config = SeedOssConfig(
    **sizes, num_key_value_heads=2, head_dim=32, attention_dropout=0.0, residual_dropout=0.0,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)
torch.manual_seed(0)
theirs = SeedOssForCausalLM(config).eval()
for parameter in theirs.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
theirs.save_pretrained(folder)
shape = from_hf_config(folder / "config.json")
assert shape.qkv_bias and shape.head_dim == 32
ours = Decoder(shape)
load_weights(folder, global_tensors(ours, units(shape)))
tokens = torch.randint(160, (2, 24))
with torch.no_grad():
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=2e-4)
plain = SeedOssConfig()
for key in ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"):
    assert DEFAULTS["seed_oss"][key] == getattr(plain, key), key
"""


SAMPLER = """
from superstep.errors import ConfigError
from superstep.http.body_validation import read_model
from superstep.serve.api.generate_endpoint import GenerateFields
from superstep.serve.api.openai.completions import CompletionFields
from superstep.serve.scheduling.request import Request, Sampling, check_request
from superstep.train.proof.sampler import draw_fault

assert read_model(GenerateFields, {"prompt": [1], "sampling": {"top_a": 0.5}}).sampling.top_a == 0.5
assert read_model(CompletionFields, {"prompt": "", "top_a": 0.5}).top_a == 0.5
assert not Sampling(top_a=0.5).is_plain
print(draw_fault())
try:
    check_request(Request(id=0, prompt=(1,), sampling=Sampling(top_a=2.0)), vocab=9, context_tokens=9)
except ConfigError as error:
    assert str(error) == "top_a = 2.0 must be from 0 to 1.", error
else:
    raise AssertionError("top_a = 2 is taken")
"""


@pytest.mark.parametrize("page", sorted(each.name for each in (ROOT / "docs" / "howto").glob("add-a*.md")))
def test_an_extension_touches_three_files_at_most(page):
    if page != "add-a-pass.md":  # a pass is compiled into the step, which is more
        assert 1 <= len(touched(page)) <= 3


@pytest.mark.multiproc
def test_a_schedule_that_is_added_as_the_page_says_is_proven(tmp_path):
    source = changed("add-a-schedule.md", tmp_path)
    run(SCHEDULE, source, tmp_path)


def test_a_family_that_is_added_as_the_page_says_has_the_logits_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    source = changed("add-a-model-family.md", tmp_path)
    run(FAMILY, source, tmp_path)


def test_a_sampler_option_that_is_added_as_the_page_says_draws_as_plain_code_does(tmp_path):
    assert run(SAMPLER, changed("add-a-sampler-option.md", tmp_path), tmp_path) == ""


def test_a_sampler_option_that_lacks_the_change_of_which_the_page_warns_is_found(tmp_path):
    source = changed("add-a-sampler-option.md", tmp_path, without="sampling.top_a == 0.0:")
    assert "the number of tokens to draw from is" in run(SAMPLER, source, tmp_path)
