"""Faults to plant in what a run reads, in its validation and in its sampler: what all ranks do alike, and wrongly."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch.distributed as dist

from superstep.data import shuffle as shuffle_module
from superstep.data import token_stream as stream_module
from superstep.engine.values.microbatch import microbatches_of
from superstep.serve.compute import sampler as draw_module
from superstep.serve.compute import torch_forward as forward_module
from superstep.train import corpus_trainer
from superstep.train.corpus_trainer import CorpusTrainer, Validation
from superstep.train.proof import prove_tolerance
from superstep.train.proof import stream as proof_stream


def padding_counted():
    def valid_tokens(self, numbers_N):
        return len(numbers_N) * self._length

    return mock.patch.object(stream_module.DocumentCut, "valid_tokens", valid_tokens)


@contextmanager
def rotated_rows():
    inner = prove_tolerance.rows

    def rows(plan, mesh):
        found = inner(plan, mesh)
        size = found.stop - found.start
        first = (found.start + size) % (size * mesh.shape.dp)
        return slice(first, first + size)

    with ExitStack() as stack:
        for module in (prove_tolerance, corpus_trainer, proof_stream):
            stack.enter_context(mock.patch.object(module, "rows", rows))
        yield


def shifted_target():
    inner = stream_module.PackedCut.read

    def read(self, number, tokens_S, targets_S):
        inner(self, number, tokens_S, targets_S)
        targets_S[:-1] = targets_S[1:].copy()

    return mock.patch.object(stream_module.PackedCut, "read", read)


def late_starts():
    inner = stream_module.PackedCut.starts

    def starts(self, number):
        found = inner(self, number)
        found[1:] = found[:-1].copy()
        return found

    return mock.patch.object(stream_module.PackedCut, "starts", starts)


def late_pieces():
    inner = stream_module.DocumentCut.locate

    def locate(self, numbers_N):
        documents_N, starts_N, targets_N = inner(self, numbers_N)
        return documents_N, starts_N + (targets_N > 1), targets_N - (targets_N > 1)

    return mock.patch.object(stream_module.DocumentCut, "locate", locate)


def own_order_later():
    inner = shuffle_module.permute

    def permute(positions, count, *, seed, epoch):
        own = dist.get_rank() if epoch and dist.is_initialized() else 0
        return inner(positions, count, seed=seed + own, epoch=epoch)

    return mock.patch.object(shuffle_module, "permute", permute)


def _validated(session, batches):
    """The losses of some batches of the held-out text, and their tokens."""
    size = session.run.config.train.batch_sequences
    for number in batches:
        batch = session._validation.batch(number * size, session.rows)
        yield session._engine.evaluate(microbatches_of(batch, session.run.plan, session._mesh))


def last_batch_skipped():
    def validate(self):
        found = list(_validated(self, range(self.run.config.train.eval_batches - 1)))
        return Validation(loss=sum(loss for loss, _ in found) / sum(tokens for _, tokens in found))

    return mock.patch.object(CorpusTrainer, "validate", validate)


def mean_of_means():
    def validate(self):
        found = [loss / tokens for loss, tokens in _validated(self, range(self.run.config.train.eval_batches))]
        return Validation(loss=sum(found) / len(found))

    return mock.patch.object(CorpusTrainer, "validate", validate)


def validated_on_training():
    inner = corpus_trainer.stream_of
    return mock.patch.object(corpus_trainer, "stream_of", lambda config, corpus, split: inner(config, corpus, "train"))


def own_rows_validated():
    inner = CorpusTrainer.validate

    def validate(self):
        def rows(plan, mesh):
            count = plan.microbatches * plan.microbatch
            return slice(0, count)

        with mock.patch.object(corpus_trainer, "rows", rows):
            return inner(self)

    return mock.patch.object(CorpusTrainer, "validate", validate)


def top_p_keeps_one_less():
    inner = draw_module.truncate

    def truncated(scores_V, sampling):
        kept, scores = inner(scores_V, sampling)
        count = int(scores.isfinite().sum())
        few = count - (sampling.top_p < 1.0 and count > 1)
        return kept[:few], scores[:few]

    return mock.patch.object(draw_module, "truncate", truncated)


def temperature_multiplied():
    inner = draw_module.draw_plain

    def draw_plain(logits_RV, asked, *totals):
        scaled = logits_RV.clone()
        for row, (how, _) in enumerate(asked):
            scaled[row] *= how.temperature**2
        return inner(scaled, asked, *totals)

    return mock.patch.object(draw_module, "draw_plain", draw_plain)


def same_noise():
    inner = draw_module._key
    return mock.patch.object(draw_module, "_key", lambda seed, position: inner(seed, 0))


def row_before():
    inner = forward_module.TorchForward._logits
    return mock.patch.object(forward_module.TorchForward, "_logits", lambda self, h: inner(self, h.roll(1, 1)))
