"""Losses of post-training on layouts, and the same by autograd on whole logits."""

from dataclasses import dataclass, replace
from datetime import timedelta

import torch

import small
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.data.batch import Batch
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.mixture.expert_dispatch import DispatchContext, LocalDispatch
from superstep.model.unit import initial, parameters
from superstep.numerics.loss import IGNORE
from superstep.numerics.objective import CROSS_ENTROPY
from superstep.numerics.policy import PolicyLoss
from superstep.numerics.sequence_losses import sequence_policy
from superstep.numerics.tolerance import TOLERANCE

TOKENS = 32


def config(*, experts=None, exact=False, **plan):
    """A run whose sequences 2 context-parallel ranks can share; targets are ignored here and there."""
    plan = {"layers": 2, "microbatch": small.microbatch_for(plan)} | plan
    found = small.config(packed=False, **plan)
    if experts is not None:
        model = replace(found.model, experts=4, router=experts, ffn=24, balance_weight=0.2)
        found = replace(found, model=model)
    return replace(
        found,
        data=replace(found.data, sequence_tokens=TOKENS),
        numerics=replace(found.numerics, exact=exact, exact_chunks=4 if exact else None),
    )


def batch(seed=1):
    """Rows that end at different places, with numbers of both signs for every stream, some weights zero."""
    (found,) = small.batches(steps=1, packed=False, tokens=TOKENS, seed=seed)
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(found.targets_BS.shape, generator=generator)

    # No stream of a token without a target is looked at.
    nothing = torch.where(found.targets_BS == IGNORE, torch.nan, 0.0)
    weights = normal() * (torch.rand(found.targets_BS.shape, generator=generator) < 0.8)
    streams = {
        "weights": weights,
        "advantages": normal().round(decimals=1),
        "old": normal() * 0.3 - 4.2,
        "sampled": normal() * 0.3 - 4.2,
        "reference": normal() * 0.3 - 4.2,
    }
    streams = {name: stream + nothing for name, stream in streams.items()}
    divisor = float(weights[found.targets_BS != IGNORE].abs().sum())
    return replace(found, streams=streams, divisor=divisor)


ONE = PolicyLoss(clip_low=0.2, clip_high=0.28, correction="tis", cap=1.2, kl="k3", kl_coef=0.1)
TIGHT = PolicyLoss(clip_low=0.0, clip_high=0.0)
ANSWERS = PolicyLoss(clip_low=0.03, clip_high=0.04, kl="k3", kl_coef=0.1)


def weights_only(found, logprobs):
    """Cross entropy with signed weights."""
    return replace(found, streams={"weights": found.streams["weights"]}), CROSS_ENTROPY


def one_pass(found, logprobs):
    """A loss of single tokens, off the policy."""
    return found, ONE


def lag_0(found, logprobs):
    """The log-probabilities of then are those of now."""
    return replace(found, streams={**found.streams, "old": logprobs}), TIGHT


def two_passes(found, logprobs):
    """A loss of whole answers, a row each."""
    is_counted = found.targets_BS != IGNORE
    answer = torch.where(is_counted, torch.arange(len(is_counted))[:, None], -1)
    advantages = found.streams["advantages"][:, 0]
    weighed = sequence_policy(ANSWERS, logprobs, found.streams, answer, advantages)
    return replace(found, streams={"weights": weighed.weights}, divisor=float(len(is_counted))), CROSS_ENTROPY


TRIALS = (weights_only, one_pass, lag_0, two_passes)


@dataclass(frozen=True)
class Result:
    """What an engine made of a batch; gradients by name, whole."""

    logprobs: torch.Tensor
    evaluated: tuple[float, float]
    loss: float
    measures: dict[str, float]
    gradients: dict[str, torch.Tensor]


def results(rank, world, runs, found: Batch, temperature=1.0):
    """Of each run on these ranks every trial; the gradients are those of the pieces this rank holds."""
    return [results_on(Device("cpu"), rank, run, found, temperature) for run in runs]


def results_on(device, rank, run, found, temperature=1.0):
    """Every trial of a run on a rank's device; what it gives is on the host."""
    mesh = build_mesh(run.plan, rank, device, timeout=timedelta(seconds=60))
    try:
        engine = Engine(run, units(run.shape), mesh, temperature=temperature)
        # Streams that nobody reads are cut along all the same.
        logprobs = engine.logprobs(microbatches_of(found.rows(rows(run.plan, mesh)), run.plan, mesh)).cpu()
        return [_trial(engine, *trial(found, logprobs), logprobs) for trial in TRIALS]
    finally:
        mesh.destroy()


def _trial(engine, found, objective, logprobs):
    run = engine.run
    parts = microbatches_of(found.rows(rows(run.plan, engine.mesh)), run.plan, engine.mesh)
    evaluated = engine.evaluate(parts, objective=objective)
    pieces = []

    def keep():
        held = engine.pieces(["gradient"])
        pieces.extend((p.name, p.shape, p.index, p.low, p.values.detach().cpu().clone()) for p in held)

    # Without a learning rate the weights stay, and the next trial begins with them.
    step = engine.train_step(
        parts,
        valid_tokens=found.valid_tokens,
        divisor=found.divisor,
        lr=0.0,
        objective=objective,
        inspect=keep,
    )
    return Result(logprobs, evaluated, step.loss, dict(step.measures), pieces)


def whole(of_ranks):
    """The results of all ranks as one; what several hold must be the same."""
    first = of_ranks[0]
    gradients = {}
    for result in of_ranks:
        for said in ("evaluated", "loss", "measures"):
            assert getattr(result, said) == getattr(first, said), said
        assert torch.equal(result.logprobs, first.logprobs)
        for name, shape, index, low, values in result.gradients:
            tensor = gradients.setdefault(name, torch.full(shape, torch.nan))
            block = tensor[index].reshape(-1)
            before = block[low : low + values.numel()]
            assert bool((before.isnan() | (before == values.flatten())).all()), name
            block[low : low + values.numel()] = values.flatten()
            tensor[index] = block.view(tensor[index].shape)
    assert not any(bool(tensor.isnan().any()) for tensor in gradients.values())
    return replace(first, gradients=gradients)


def compare(ours, theirs, what, allowed=TOLERANCE["fp32"]):
    """With the textbook, within the tolerance of fast mode."""
    assert_near(ours.logprobs, theirs.logprobs, allowed.loss, (what, "logprobs"))
    for name, gradient in theirs.gradients.items():
        assert_near(ours.gradients[name], gradient, allowed.gradient, (what, name))


def assert_near(ours, theirs, rtol, what):
    """Two tensors, by the norm of their difference."""
    far = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
    assert far <= rtol, (what, far)


def _weighted(logp, s):
    return -(s["weights"] * logp).sum()


def _one(logp, s):
    ratio, m, d = (logp - s["old"]).exp(), (s["old"] - s["sampled"]).exp(), s["reference"] - logp
    clipped = torch.minimum(ratio * s["advantages"], ratio.clamp(0.8, 1.28) * s["advantages"])
    return (s["weights"] * (-m.clamp(max=1.2) * clipped + 0.1 * (d.exp() - d - 1))).sum()


def _lag_0(logp, s):
    return -(s["weights"] * s["advantages"] * (logp - logp.detach()).exp()).sum()


def _answer(logp, s):
    ratio, d, gain = (logp - s["old"]).mean().exp(), s["reference"] - logp, s["advantages"][0]
    return -torch.minimum(ratio * gain, ratio.clamp(0.97, 1.04) * gain) + 0.1 * (d.exp() - d - 1).mean()


def textbooks(run, found: Batch, temperature=1.0):
    """What every trial gives by autograd on whole logits, row by row."""
    ways = (_weighted, _one, _lag_0, _answer)
    rows = replace(found, divisor=float(len(found.targets_BS)))
    return [_textbook(run, rows if way is _answer else found, way, temperature) for way in ways]


def _textbook(run, found, loss_of, temperature):
    model, exchange = Decoder(run.shape), LocalDispatch()
    specs = parameters(model, units(run.shape))
    with torch.no_grad():
        for spec, param in specs.values():
            param.copy_(initial(spec, param.shape, run.config.train.seed))
    logprobs, total = torch.zeros(found.targets_BS.shape), 0.0
    for row, (tokens, targets) in enumerate(zip(found.tokens_BS, found.targets_BS, strict=True)):
        given = {}
        if run.shape.moe is not None:
            exchange.now = DispatchContext(sequences=(row,), batch_sequences=len(found.tokens_BS), step=0)
            given = {"exchange": exchange}
        valid = targets != IGNORE
        logits = model(tokens[None], **given)[0] / temperature
        logp = logits.log_softmax(-1)[valid].gather(-1, targets[valid][:, None])[:, 0]
        loss = loss_of(logp, {name: stream[row][valid] for name, stream in found.streams.items()}) / found.divisor
        loss.backward()
        total += loss.item()
        logprobs[row, valid] = logp.detach()
    gradients = {name: view for spec, param in specs.values() for name, view in spec.views(param.grad)}
    return Result(logprobs, (0.0, 0.0), total, {}, gradients)
