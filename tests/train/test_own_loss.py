"""A loss of a user's file: the same on every layout as autograd makes of it, and refused by file and line."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import small
from corpus import write_corpus
from superstep.comm.device import Device
from superstep.errors import ConfigError
from superstep.launch.ranks import World
from superstep.numerics.own_loss import OwnLoss, load_loss
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.proof_inputs import Cases, prove_case
from superstep.train.proof.prove_exact import Relay, prove_exact, write_bits
from superstep.train.weights.model import resolve_config
from superstep.tune.recipe import refuse_own_loss

FOCAL = """
def loss(logp):
    return -((1 - logp.exp()) ** 2) * logp
"""
LAYOUTS = {
    1: [{"kernels": "torch"}, {}],
    2: [{"dp": 2, "zero": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2, "microbatch": 2}, {"dp": 2, "compute": "bf16"}],
}


def written(folder, text):
    path = folder / "my_loss.py"
    path.write_text(text)
    return path


def run(path, **plan):
    config = small.config(layers=2, **plan)
    return resolve(replace(config, train=replace(config.train, loss=str(path))))


def _prove_each(rank, world, cases):
    return [prove_case(World(rank, world, Device("cpu")), case) for case in cases]


@pytest.mark.multiproc
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_is_proven_with_a_loss_of_a_user_s(pool, tmp_path, world):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path, corpus = written(tmp_path, FOCAL), write_corpus(tmp_path / "corpus", vocab=small.VOCAB)
    made = {name: Cases(tmp_path / name, corpus, steps=2) for name in ("fp32", "bf16")}
    runs = [run(path, **plan) for plan in LAYOUTS[world]]
    cases = [made[r.config.numerics.compute].case(r, reruns=number == 0) for number, r in enumerate(runs)]
    # What one step is with the plain loss is another: the reference is not told the engine's.
    plain = replace(cases[-1], run=replace(cases[-1].run, config=small.config(layers=2, **LAYOUTS[world][-1])))
    *verdicts, other = pool.run(world, _prove_each, [*cases, plain], timeout_s=240)[0]
    torch.set_num_threads(threads)
    for case, verdict in zip(cases, verdicts, strict=True):
        assert verdict.is_proven, (case.run.config.plan, verdict.first and verdict.first.describe(), verdict.again)
    assert other.first is not None
    assert other.first.kind == "loss"


def _exact(rank, world, alone, both, batches, folder):
    here = World(rank, world, Device("cpu"))
    return [
        prove_exact(here, each, batches, folder, Relay(take=folder / "checkpoint", leave=None, step=1)) for each in both
    ]


def _alone(rank, world, alone, batches, folder):
    write_bits(World(rank, world, Device("cpu")), alone, batches, folder, stop=1)


@pytest.mark.multiproc
def test_in_exact_mode_it_has_the_same_bits_on_every_layout(pool, tmp_path):
    path = written(tmp_path, FOCAL)
    how = {"exact": True, "microbatch": 2}
    alone, both = run(path, **how), [run(path, **how, **plan) for plan in ({"dp": 2}, {"tp": 2}, {"pp": 2})]
    batches = small.batches(packed=False)
    (tmp_path / "bits").mkdir()
    pool.run(1, _alone, alone, batches, tmp_path / "bits", timeout_s=120)
    for verdict in pool.run(2, _exact, alone, both, batches, tmp_path / "bits", timeout_s=240)[0]:
        assert verdict.is_proven, verdict.first and verdict.first.describe()


FEW = "def loss(logp):\n    return "
REFUSED = {
    "nothing = 1": r"my_loss.py has no function 'loss\(logp\)'; write one",
    "\nimport nothing_of_the_kind": r"my_loss.py:2 cannot be run: ModuleNotFoundError",
    "def loss(logp)\n    return -logp": r"my_loss.py:1 cannot be run: SyntaxError",
    "def loss(logp):\n    x = 1\n    return logp.nothing": r"my_loss.py:3: loss\(logp\) fails: AttributeError",
    "\n\ndef loss(logp):\n    return -logp.mean()": r"my_loss.py:3: loss\(logp\) gives a torch.float32 of shape \[\];",
    FEW + "[1.0]": r"my_loss.py:1: loss\(logp\) gives a list; return a torch.float32 of shape \[64\]",
    FEW + "-logp.double()": r"my_loss.py:1: loss\(logp\) gives a torch.float64",
    FEW + "-logp.detach()": r"my_loss.py:1: loss\(logp\) has no derivative by logp",
    FEW + "logp.exp().log1p().sqrt() / 0": r"my_loss.py:1: loss\(logp\) gives no number",
    FEW + "-logp * logp.softmax(0)": r"my_loss.py:1: loss\(logp\) looks at several tokens at once",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_loss_of_a_token_is_refused_by_file_and_line(tmp_path, text):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=REFUSED[text]) as raised:
        load_loss(str(path))
    assert "\n" not in str(raised.value)
    config = small.config()
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        resolve_config(replace(config, train=replace(config.train, loss=str(path))))


def test_other_places_of_a_loss_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"train.loss = 'focal' is not a Python file"):
        load_loss("focal")
    train = replace(small.config().train, loss="my_loss.py")
    with pytest.raises(ConfigError, match=r"train.loss = 'my_loss.py': superstep tune rl has a loss of its own"):
        refuse_own_loss(train, "tune rl")


def test_weights_multiply_it(tmp_path):
    objective = OwnLoss(load_loss(str(written(tmp_path, FOCAL))))
    logp, weights = torch.linspace(-3, -0.1, 5), torch.tensor([0.0, 1.0, -2.0, 0.5, 1.0])
    plain, weighed = objective.terms(logp, {}), objective.terms(logp, {"weights": weights})
    assert all(torch.equal(b, a * weights) for a, b in zip(plain, weighed, strict=True))
    leaf = logp.clone().requires_grad_()
    (-((1 - leaf.exp()) ** 2) * leaf).sum().backward()
    assert torch.allclose(plain[1], leaf.grad)


def test_the_page_s_example_is_the_recipe_s_file():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "howto" / "own-loss.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert example == (root / "recipes" / "focal_loss.py").read_text(encoding="utf-8")
    assert float(load_loss(str(root / "recipes" / "focal_loss.py"))(torch.tensor([-1.0]))) == pytest.approx(
        (1 - 2.718281828**-1) ** 2
    )
