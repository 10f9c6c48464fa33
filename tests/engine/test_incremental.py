"""A step in pieces: what is added up is one step's gradient, however the tokens are shared out to calls."""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch

import small
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.incremental import PiecemealEngine
from superstep.engine.values.microbatch import Microbatch
from superstep.errors import Fault
from superstep.model.unit import initial
from superstep.numerics.loss import IGNORE
from superstep.numerics.objective import CROSS_ENTROPY
from superstep.numerics.policy import PolicyLoss
from superstep.numerics.update_rules import OptimizerSettings
from superstep.plan.config import LoraConfig
from superstep.plan.resolution.resolve import resolve
from superstep.train.weights.model import units_of

HYPER = OptimizerSettings(beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.01, clip_norm=0.5)
ROWS, TOKENS = 6, 16
TWOS = tuple((slice(row, row + 2), TOKENS) for row in range(0, ROWS, 2))


def run_of(*, exact=False, sequences=2):
    config = small.config(layers=2, sequences=sequences, packed=False, microbatch=2)
    numerics = replace(config.numerics, exact=exact, exact_chunks=8 if exact else None)
    train = replace(
        config.train,
        beta1=HYPER.beta1,
        beta2=HYPER.beta2,
        eps=HYPER.eps,
        weight_decay=HYPER.weight_decay,
        clip_norm=HYPER.clip_norm,
    )
    return resolve(replace(config, lora=LoraConfig(rank=3, alpha=6.0), numerics=numerics, train=train))


def specs_of(run):
    """Units whose B is not zero, so that A has a gradient too."""
    found = []
    for unit in units_of(run):
        params = dict(unit.params)
        for local, param in params.items():
            if param.factor == "b":
                shape = next(p.dims for u in run.outline.units for p in u.parameters if p.name == param.name)
                params[local] = replace(param, values=initial(replace(param, std=0.3), shape, 1))
        found.append(replace(unit, params=params))
    return found


def made(kind, run):
    mesh = build_mesh(run.plan, 0, Device("cpu"), timeout=timedelta(minutes=1))
    return kind(run, specs_of(run), mesh)


def batch(seed=0, **streams):
    """Rows of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, small.VOCAB, (ROWS, TOKENS + 1), generator=generator)
    targets = rows[:, 1:].clone()
    for row in range(ROWS):
        targets[row, TOKENS - 2 * row :] = IGNORE
    made_streams = {name: torch.randn(ROWS, TOKENS, generator=generator) for name in streams.get("names", ())}
    return Microbatch(fields={"tokens": rows[:, :-1].contiguous()}, targets=targets, streams=made_streams, first=0)


def part(whole, rows, length):
    """Some rows, without what is behind ``length``."""
    return Microbatch(
        fields={"tokens": whole.input[rows, :length].contiguous()},
        targets=whole.targets[rows, :length].contiguous(),
        streams={name: stream[rows, :length].contiguous() for name, stream in whole.streams.items()},
        first=0,
    )


def state(engine):
    return {(p.kind, p.name): p.values.clone() for p in engine.pieces(("weight", "exp_avg", "exp_avg_sq"))}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("objective", "names"),
    [(CROSS_ENTROPY, ("weights",)), (PolicyLoss(surrogate="clip"), ("advantages", "old"))],
)
def test_pieces_are_one_step(exact, objective, names):
    one, other = made(Engine, run_of(exact=exact, sequences=ROWS)), made(PiecemealEngine, run_of(exact=exact))
    for step in range(2):
        whole = batch(step, names=names)
        twos = [part(whole, rows, length) for rows, length in TWOS]
        result = one.train_step(twos, valid_tokens=1, divisor=4096.0, lr=0.01, objective=objective)
        # Rows 4 and 5 end after eight targets: they may be given without the rest. Exact mode's bits are those of
        # microbatches of as many rows and tokens.
        parts = TWOS if exact else ((slice(0, 1), TOKENS), (slice(1, 4), TOKENS), (slice(4, 6), 8))
        found = [other.add(part(whole, rows, length), objective) for rows, length in parts]
        scaled = replace(HYPER, clip_norm=HYPER.clip_norm * 4096)
        norm = other.update(0.01, replace(scaled, eps=HYPER.eps * 4096))
        assert sum(f.loss for f in found) == pytest.approx(result.loss * 4096, rel=1e-6)
        assert norm == pytest.approx(result.grad_norm * 4096, rel=1e-5)
    mine, theirs = state(one), state(other)
    assert mine.keys() == theirs.keys()
    for key, values in mine.items():
        factor = {"weight": 1.0, "exp_avg": 4096.0, "exp_avg_sq": 4096.0**2}[key[0]]
        if exact:  # there both are scaled by the same power of two
            assert torch.equal(values, theirs[key]), key
        else:
            torch.testing.assert_close(values * factor, theirs[key], rtol=2e-4, atol=1e-6 * factor)


def test_a_look_adds_nothing_and_says_what_add_says():
    run = run_of()
    engine = made(PiecemealEngine, run)
    before = state(engine)
    whole = batch(names=("weights",))
    looked, added = engine.look(whole, CROSS_ENTROPY), engine.add(whole, CROSS_ENTROPY)
    torch.testing.assert_close(looked.logp, added.logp)
    assert looked.loss == pytest.approx(added.loss)
    engine.drop_gradients()
    assert engine.update(0.01, HYPER) == 0.0
    after = state(engine)
    # Nothing but the decay of the matrices.
    assert all(torch.allclose(after[key], before[key] * (0.9999 if key[0] == "weight" else 1)) for key in before)


def test_gradients_that_are_no_numbers_change_nothing():
    engine = made(PiecemealEngine, run_of())
    before = state(engine)
    whole = batch(names=("weights",))
    whole.streams["weights"][0, 0] = float("nan")
    engine.add(whole, CROSS_ENTROPY)
    with pytest.raises(Fault, match="the gradients have norm nan: no update"):
        engine.update(0.01, HYPER)
    assert all(torch.equal(values, before[key]) for key, values in state(engine).items())
    engine.add(batch(names=("weights",)), CROSS_ENTROPY)
    assert engine.update(0.01, HYPER) > 0


def test_frozen_weights_are_shared():
    run = run_of()
    one, other = made(PiecemealEngine, run), made(PiecemealEngine, run)
    alone = one.look(batch(names=("weights",)), CROSS_ENTROPY).loss
    one.share_frozen(other)
    for piece in other.frozen_pieces():
        piece.values.mul_(1.5)
    changed = one.look(batch(names=("weights",)), CROSS_ENTROPY).loss
    assert changed != alone
    assert changed == other.look(batch(names=("weights",)), CROSS_ENTROPY).loss
    one.add(batch(names=("weights",)), CROSS_ENTROPY)
    assert one.update(0.1, HYPER) > 0
    assert other.look(batch(names=("weights",)), CROSS_ENTROPY).loss == changed
