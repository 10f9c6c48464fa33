"""The trainer of a created model: an adapter beside the base's frozen weights, its gradients and its moments."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from superstep.comm.device import Device
from superstep.engine.incremental import PiecemealEngine
from superstep.errors import DataError, Fault, StateError
from superstep.launch.ranks import World
from superstep.model.files.peft_adapter import A, Adapter, B, LoraFactors, write_adapter
from superstep.plan.resolution.lora import PREFIX
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.load_weights import fill
from superstep.state.manifest import Position
from superstep.train.open_engine import open_mesh
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.trainer import Trainer
from superstep.train.weights.model import units_of
from superstep.tune.tinker.config import TinkerConfig
from superstep.tune.tinker.losses import find_loss, join_measures, make_sequence, metric_names
from superstep.tune.tinker.model_request import ModelRequest, run_of
from superstep.tune.tinker.pack_sequences import pack_sequences
from superstep.tune.tinker.proto_messages import ForwardBackward, Numbers, write_output
from superstep.tune.tinker.request_schema import AdamParams
from superstep.tune.tinker.saved_models import ABOUT, About

STEP = "step-000000"


class AdapterTrainer(Trainer):
    """A created model, on this process's device.

    Args:
        config: of the service.
        wanted: the client's request.
        version: the digest of the base's weights.
        device: of the computation.
        beside: another created model, to share its frozen weights; None reads them.

    Attributes:
        wanted: with its seed.

    Raises:
        ConfigError: the model cannot be trained.
        StateError: the base cannot be read.
    """

    def __init__(
        self,
        config: TinkerConfig,
        wanted: ModelRequest,
        version: str,
        device: Device,
        beside: AdapterTrainer | None = None,
    ) -> None:
        self.wanted = wanted if wanted.seed is not None else replace(wanted, seed=secrets.randbits(31))
        self._config = config
        self._version = version
        run, world = run_of(config, self.wanted), World(0, 1, device)
        self._incremental = PiecemealEngine(run, units_of(run), open_mesh(world, run))
        super().__init__(world, run, self._incremental, folder=RunFolder(root=config.root), identity={}, files={})
        if beside is None:
            shapes = {piece.name: piece.shape for piece in self._engine.frozen_pieces()}
            fill(config.folder, self._engine.frozen_pieces(), shapes, self.peers)
        else:
            self._engine.share_frozen(beside._engine)
        self._engine.note_loaded(0)

    @property
    def about(self) -> About:
        """The description beside its saved weights."""
        wanted = self.wanted
        assert wanted.seed is not None
        return About(
            base=self._config.name,
            version=self._version,
            rank=wanted.rank,
            alpha=self._config.alpha,
            train_mlp=wanted.train_mlp,
            train_attn=wanted.train_attn,
            train_unembed=wanted.train_unembed,
            seed=wanted.seed,
            step=self._engine.optimizer.steps,
        )

    def forward_backward(self, request: ForwardBackward) -> bytes:
        """Add the gradient of some sequences, if requested; the ``ForwardBackwardOutput``.

        Raises:
            DataError: the sequences are invalid. No gradient has been added.
            Fault: the pass failed. If it added gradients, all since the last update are dropped.
        """
        if not request.data:
            raise DataError("data is empty; give at least one sequence.")
        _, objective = find_loss(request.loss_fn, request.config)
        vocab, most = self.run.shape.vocab, self.run.config.data.sequence_tokens
        lessons = [
            make_sequence(datum, at, request.loss_fn, vocab=vocab, most_tokens=most)
            for at, datum in enumerate(request.data)
        ]
        work = self._incremental.look if request.forward_only else self._incremental.add
        loss, tokens = 0.0, 0
        logprobs: dict[int, Numbers] = {}
        joined: dict[str, float] = {}
        for places, microbatch in pack_sequences(lessons, self._config.batch_tokens, most, self._engine.mesh.device):
            try:
                passed = work(microbatch, objective)
            except RuntimeError as error:
                raise self._make_failure(error, request) from error
            counted = int((microbatch.streams["weights"] != 0).sum())
            joined = join_measures(objective, joined, tokens, passed.measures, counted)
            loss, tokens = loss + passed.loss, tokens + counted
            rows = passed.logp.detach().float().cpu()
            logprobs |= {at: rows[row, : len(lessons[at].tokens)].numpy() for row, at in enumerate(places)}
        metrics = {"loss:sum": loss} | metric_names(objective, joined)
        return write_output([logprobs[at] for at in range(len(lessons))], metrics)

    def _make_failure(self, error: Exception, request: ForwardBackward) -> Fault:
        """The error of a failed pass, after dropping its partial gradients."""
        message = str(error).partition("\n")[0]
        if request.forward_only:
            return Fault(message)
        self._incremental.drop_gradients()
        return Fault(f"{message} The gradients since the last update are gone; give the sequences again.")

    def optim_step(self, adam: AdamParams) -> Mapping[str, float]:
        """Update the adapter by the added gradients; the metrics.

        Raises:
            ConfigError: a setting is out of range.
            Fault: a gradient is not finite.
        """
        norm = self._incremental.update(adam.learning_rate, adam.hyper)
        return {"unclipped_grad_l2:mean": norm}

    def adapter(self) -> Adapter:
        """The current adapter."""
        factors: dict[str, dict[str, torch.Tensor]] = {}
        for piece in self.pieces(("weight",)):
            name = piece.name.removeprefix(PREFIX)
            end = A if name.endswith(A) else B
            factors.setdefault(name.removesuffix(end), {})[end] = piece.values.view(piece.shape)
        return Adapter(
            parts={name: LoraFactors(pair[A], pair[B], self._config.alpha) for name, pair in factors.items()}
        )

    def write_sampler(self, folder: Path) -> None:
        """Write the adapter in PEFT's format."""
        write_adapter(folder, self.adapter(), base=str(self._config.folder))
        (folder / ABOUT).write_text(self.about.text, encoding="utf-8")

    def save_model(self, folder: Path) -> None:
        """Write the state for resuming.

        Raises:
            Fault: it cannot be written.
        """
        self.write(folder / STEP, Position(step=self._engine.optimizer.steps))
        (folder / ABOUT).write_text(self.about.text, encoding="utf-8")

    def load_model(self, folder: Path, about: About, *, optimizer: bool) -> None:
        """Resume from saved state; gradients are dropped.

        Args:
            folder: of it.
            about: its description.
            optimizer: whether to load moments and updates as well; otherwise they start new.

        Raises:
            StateError: it belongs to another model, or is damaged. Nothing has changed.
        """
        require_base(about, self._version, self._config.name)
        folders = checkpoints(folder)
        if not folders:
            raise StateError(f"'{folder}' holds no checkpoint; save it again.")
        self.read(folders[-1], None if optimizer else ("weight",))
        if not optimizer:
            for piece in self.pieces(self._engine.state_kinds[1:]):
                piece.values.zero_()
            self._engine.note_loaded(0)
        self._incremental.drop_gradients()


def require_base(about: About, version: str, name: str) -> None:
    """Check that saved weights belong to this base.

    Raises:
        StateError: they do not.
    """
    if about.version != version:
        raise StateError(
            f"the saved weights add to '{about.base}' of digest {about.version}, and '{name}' of digest {version} is "
            "served; serve that one, or begin anew."
        )
