"""Pages that say how to extend the source: their changes, applied to a copy of it, do what the pages say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from superstep.cli.main import main
from superstep.numerics.own_loss import load_loss

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
        name = re.findall(r"`((?:src/superstep|recipes)/[\w/]+\.py)`", text[: each.start()])[-1]
        if name.startswith("recipes/"):
            continue
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
from superstep.model.files.hf import load_weights
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


LOSS = """
import torch

from superstep.numerics.objective import LossTarget, objective_sum
from superstep.numerics.policy import PolicyLoss
from superstep.tune.rl.config import RlConfig, RolloutConfig, check_rl
from superstep.tune.tinker.losses import LOSSES, find_loss

torch.manual_seed(0)
logits = torch.randn(64, 9, dtype=torch.float64, requires_grad=True)
targets = torch.randint(9, (64,))
logp = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
old = logp.detach() + torch.randn(64, dtype=torch.float64)
gain = torch.randn(64, dtype=torch.float64)
_, policy = find_loss("cispo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4})
assert (policy.surrogate, round(policy.clip_low, 9), round(policy.clip_high, 9)) == ("cispo", 0.3, 0.4)
theirs = -(gain * (logp - old).exp().clamp(0.7, 1.4).detach() * logp).sum()
(expected,) = torch.autograd.grad(theirs, logits, retain_graph=True)
streams = {"advantages": gain, "old": old}
ours = objective_sum(logp, LossTarget(targets, streams, policy))
(gradient,) = torch.autograd.grad(ours, logits)
torch.testing.assert_close(ours, theirs)
torch.testing.assert_close(gradient, expected)
told = policy.watch(logp.detach(), streams)
assert set(told) == {*policy.sums, *policy.maxima}
check_rl(RlConfig(environment="tasks.py", surrogate="cispo"), RolloutConfig())
"""


ROUTE = """
import asyncio

import httpx

from plain_words import PlainWords, small_tokenizer
from scripted import Scripted
from superstep.serve.app import make_app
from superstep.serve.scheduling.request import ModelInfo

tokenizer = small_tokenizer()
end = (tokenizer.end_of_text,)
info = ModelInfo(name="small", vocab=tokenizer.vocab, context_tokens=64, version="v1", end_of_text=end)
words = PlainWords(tokenizer)
app = make_app(Scripted(info, lambda request: []), words)


async def send(path, body):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await client.post(path, json=body)


messages = [{"role": "user", "content": "the quick fox"}]
found = asyncio.run(send("/render", {"messages": messages}))
assert found.status_code == 200, found.text
tokens = words.chat(messages, [])
assert found.json() == {"prompt": words.decode(tokens), "count": len(tokens)}
assert "the quick fox" in found.json()["prompt"]
for body, param in (({}, "messages"), ({"messages": []}, "messages"), ({"messages": messages, "tokns": 1}, "tokns")):
    found = asyncio.run(send("/render", body))
    assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text
assert asyncio.run(send("/render", {"messages": messages, "model": "other"})).status_code == 404
assert "POST /render" in asyncio.run(send("/nowhere", {})).json()["error"]["message"]
"""


OPTIMIZER = """
import sys
from dataclasses import replace
from pathlib import Path

import small
import superstep
from corpus import write_corpus
from superstep.cost.program.memory.memory import rank_bytes
from superstep.launch.ranks import launch_on
from superstep.numerics.update_rules import RULES
from superstep.plan.optimizers import MOMENTS
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.train.proof.proof_inputs import Cases, prove_case


def main():
    assert str(superstep.__file__).startswith(sys.argv[1]), superstep.__file__
    assert set(RULES) == set(MOMENTS) == {"adamw", "lion", "sgd", "momentum"}
    config = small.config(layers=2, dp=2, zero=2)
    runs = {name: resolve(replace(config, train=replace(config.train, optimizer=name, lr=0.1))) for name in MOMENTS}
    held = {name: rank_bytes(run, compile_step(run.plan))[0].optimizer for name, run in runs.items()}
    assert held["momentum"] == held["lion"] < held["adamw"]
    folder = Path(sys.argv[2])
    corpus = write_corpus(folder / "corpus", vocab=small.VOCAB)
    case = Cases(folder / "references", corpus, steps=3).case(runs["momentum"], reruns=True)
    verdict = launch_on("cpu", 2, prove_case, case)
    assert verdict.is_proven, verdict.first and verdict.first.describe()


if __name__ == "__main__":
    main()
"""


REWARD = """
from superstep.grade.graders.text import Words

verdicts = [Words(text, "a b c d").verdict(None) for text in ("a b c d", "a b d c", "b a d c", "a b c d e", "")]
assert [(each.kind, each.score) for each in verdicts] == [("ok", 1.0), ("ok", 0.5), *[("wrong", 0.0)] * 3], verdicts
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


def test_a_loss_that_is_added_as_the_page_says_has_the_derivative_of_autograd(tmp_path):
    run(LOSS, changed("add-a-loss.md", tmp_path), tmp_path)


def test_a_route_that_is_added_as_the_page_says_answers_and_refuses(tmp_path):
    run(ROUTE, changed("add-an-http-route.md", tmp_path), tmp_path)


def block(page: str, language: str) -> str:
    """The first fenced block of a language on a page."""
    text = (ROOT / "docs" / "howto" / page).read_text(encoding="utf-8")
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_file_of_the_page_about_losses_of_one_s_own_is_the_recipe():
    recipe = (ROOT / "recipes" / "focal_loss.py").read_text(encoding="utf-8")
    assert block("own-loss.md", "python") == recipe
    logp = torch.tensor([-0.1, -2.0])
    torch.testing.assert_close(
        load_loss(str(ROOT / "recipes" / "focal_loss.py"))(logp), -((1 - logp.exp()) ** 2) * logp
    )


def test_a_reward_as_the_page_says_it_withstands_the_attacks_and_its_first_version_does_not(tmp_path, capsys):
    recipe = ROOT / "recipes" / "sort_words.py"
    good = block("add-a-reward.md", "python")
    assert good == recipe.read_text(encoding="utf-8")
    change = block("add-a-reward.md", "diff").splitlines(keepends=True)
    later, first = ("".join(line[1:] for line in change if line[0] == sign) for sign in "-+")
    assert good.count(later) == 1
    naive = tmp_path / "naive.py"
    naive.write_text(good.replace(later, first), encoding="utf-8")
    assert main(["grade", "check", str(recipe), "--grade.sandbox", "none"]) == 0
    assert "none of them got a score" in capsys.readouterr().out
    assert main(["grade", "check", str(naive), "--grade.sandbox", "none"]) == 1
    said = capsys.readouterr().out
    assert "WEAK  prompt copied: is paid 1" in said
    assert "WEAK  every option: is paid 1" in said


def test_a_check_that_is_added_as_the_page_says_decides(tmp_path):
    run(REWARD, changed("add-a-reward.md", tmp_path), tmp_path)


@pytest.mark.multiproc
def test_an_optimizer_that_is_added_as_the_page_says_is_proven(tmp_path):
    run(OPTIMIZER, changed("add-an-optimizer.md", tmp_path), tmp_path)
