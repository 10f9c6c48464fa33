"""Faults to plant in what is read, where training stands, and what a checkpoint brings back."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch.distributed as dist

from superstep.data import prefetch
from superstep.data import shuffle as shuffle_module
from superstep.data import token_stream as stream_module
from superstep.engine.engine import Engine
from superstep.engine.executor import Executor
from superstep.train import corpus_trainer, run_state
from superstep.train.corpus_trainer import CorpusTrainer


def loaded(change):
    inner = CorpusTrainer.load

    def load(self, checkpoint):
        return change(self, inner(self, checkpoint))

    return mock.patch.object(CorpusTrainer, "load", load)


def not_loaded(kind):
    def forget(session, position):
        for piece in session.pieces([kind]):
            piece.values.zero_()
        return position

    return loaded(forget)


def cursor_of_each_step():
    inner = CorpusTrainer.advance

    def advance(self, position, *, samples, tokens):
        return inner(self, position, samples=samples + position.step + 1, tokens=tokens)

    return mock.patch.object(CorpusTrainer, "advance", advance)


def prefetch_skips():
    class Wider:
        def __init__(self, source):
            self.batch = source.batch
            self.batch_sequences = source.batch_sequences + 1

    inner = prefetch.Prefetcher.__init__

    def init(self, source, **rest):
        inner(self, Wider(source), **rest)

    return mock.patch.object(prefetch.Prefetcher, "__init__", init)


def loop_reads_other_rows():
    inner = corpus_trainer.rows

    def rows(plan, mesh):
        found = inner(plan, mesh)
        size = found.stop - found.start
        return slice(0, size) if found.start else slice(size, 2 * size)

    return mock.patch.object(corpus_trainer, "rows", rows)


def own_order():
    inner = shuffle_module.permute

    def permute(positions, count, *, seed, epoch):
        return inner(positions, count, seed=seed + (dist.get_rank() if dist.is_initialized() else 0), epoch=epoch)

    return mock.patch.object(shuffle_module, "permute", permute)


def new_order_after_a_restart():
    inner = corpus_trainer.stream_of
    made = []

    def stream_of(config, corpus, split):
        made.append(split)
        later = replace(config, train=replace(config.train, seed=config.train.seed + made.count("train") - 1))
        return inner(later, corpus, split)

    return mock.patch.object(corpus_trainer, "stream_of", stream_of)


def rate_of_the_next_step():
    inner = CorpusTrainer.learning_rate
    return mock.patch.object(CorpusTrainer, "learning_rate", lambda self, step: inner(self, step + 1))


def updates_not_counted():
    def forget(session, position):
        session._engine.optimizer.steps = 0
        return position

    return loaded(forget)


def saved_in_bf16():
    inner = run_state.save

    def save(place, pieces, *args, **rest):
        rounded = [replace(p, values=p.values.bfloat16().float()) if p.kind == "weight" else p for p in pieces]
        return inner(place, rounded, *args, **rest)

    return mock.patch.object(run_state, "save", save)


def parameters_not_refreshed():
    return mock.patch.object(Engine, "note_loaded", lambda self, steps, _: setattr(self.optimizer, "steps", steps))


def count_of_tokens():
    inner = stream_module.PackedCut.valid_tokens
    return mock.patch.object(stream_module.PackedCut, "valid_tokens", lambda self, n: inner(self, n) + 1)


def another_each_time():
    inner = Executor._backward
    calls = []

    def backward(self, unit, m):
        calls.append(unit)
        inner(self, unit, m)
        if unit == 2:
            self._machine.buffers[2][0].gradient.view(-1)[0] += 1e-9 * len(calls)

    return mock.patch.object(Executor, "_backward", backward)
