"""Tinker's service: requests on models, the sampler and saved weights."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from superstep.comm.device import Device
from superstep.errors import ConfigError, StateError, UserError, did_you_mean
from superstep.tune.tinker import request_schema
from superstep.tune.tinker.adapter_trainer import AdapterTrainer
from superstep.tune.tinker.config import TinkerConfig
from superstep.tune.tinker.futures import Job, QueueFull, Reply, RequestQueue, Result, error_of
from superstep.tune.tinker.model_request import ModelRequest
from superstep.tune.tinker.prompts import sample_request
from superstep.tune.tinker.proto_messages import ForwardBackward, Sampled, write_sampled
from superstep.tune.tinker.sampler import PromptSampler
from superstep.tune.tinker.saved_models import SavedModels, SavedPath

SILENT_S = 300.0
"""A session without a heartbeat for this long gives up its models when others need the room; clients send one every ten
seconds.
"""

MOST_SAMPLES = 1024
MOST_SESSIONS = 4096
MOST_SAMPLERS = 65_536
"""Sampling sessions of a client: each save for the sampler without a name begins one."""


@dataclass(slots=True)
class ClientSession:
    """A client's session, with the saved weights of its sampling sessions by name; None for the base."""

    heard_s: float
    samplers: dict[str, str | None] = field(default_factory=dict)


class UnknownError(UserError):
    """An id is unknown."""


class TinkerService:
    """The service behind the HTTP interface.

    Args:
        config: with every field filled.
        sampler: of the base.
        store: of saved weights.
        device: for training.
        tell: receives lines about unexpected errors.
    """

    def __init__(
        self,
        config: TinkerConfig,
        sampler: PromptSampler,
        store: SavedModels,
        device: Device,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.config = config
        self.desk = RequestQueue(sampler, tell)
        self.store = store
        self._sampler = sampler
        self._device = device
        self._sessions: dict[str, ClientSession] = {}
        self._models: dict[str, AdapterTrainer] = {}
        self._unnamed = 0

    @property
    def models(self) -> tuple[str, ...]:
        """The created models."""
        return tuple(self._models)

    # Sessions

    def create_session(self) -> str:
        """Create a session; silent ones are dropped if there are too many.

        Raises:
            Full: there are too many clients.
        """
        if len(self._sessions) >= MOST_SESSIONS:
            self._sessions = {name: one for name, one in self._sessions.items() if not _is_silent(one)}
        if len(self._sessions) >= MOST_SESSIONS:
            raise QueueFull(f"{MOST_SESSIONS} sessions are there, as many as may be at once; ask again later.")
        name = uuid.uuid4().hex
        self._sessions[name] = ClientSession(time.monotonic())
        return name

    def hear(self, session: str) -> None:
        """Note a heartbeat of a session.

        Raises:
            Unknown: there is no such session.
        """
        self._session(session).heard_s = time.monotonic()

    def finish(self, session: str) -> None:
        """End a session and its models."""
        self._session(session)
        del self._sessions[session]
        self.desk.submit(f"{session}:finish", lambda reply: self._give_up(session, reply))

    def _session(self, name: str) -> ClientSession:
        if name not in self._sessions:
            raise UnknownError(
                f"session_id = '{name}' is not known; it was finished, or the server has begun again since."
            )
        return self._sessions[name]

    def _give_up(self, session: str, reply: Reply) -> None:
        for name in [name for name in self._models if name.startswith(f"{session}:")]:
            del self._models[name]
        reply(_json({}))

    # Models

    def create_model(self, body: request_schema.CreateModel) -> str:
        """Queue the creation of a model; the request's number."""
        self.hear(body.session_id)
        name = f"{body.session_id}:train:{body.model_seq_id}"

        def job(reply: Reply) -> None:
            self._require_base(body.base_model)
            _require_adam("optimizer_config.type", body.optimizer_config.type)
            lora = body.lora_config
            if lora is None:
                raise ConfigError("lora_config is missing: adapters alone are trained here; give one.")
            wanted = ModelRequest(
                rank=lora.rank,
                seed=lora.seed,
                train_mlp=lora.train_mlp,
                train_attn=lora.train_attn,
                train_unembed=lora.train_unembed,
            )
            self._make(name, wanted)
            reply(_json({"type": "create_model", "model_id": name}))

        return self._submit(f"{name}:0", job)

    def _make(self, name: str, wanted: ModelRequest) -> AdapterTrainer:
        self._make_room()
        beside = next(iter(self._models.values()), None)
        made = AdapterTrainer(self.config, wanted, self._sampler.engine.info.version, self._device, beside)
        self._models[name] = made
        return made

    def _make_room(self) -> None:
        for name in list(self._models):
            session = self._sessions.get(name.partition(":")[0])
            if len(self._models) >= self.config.models and (session is None or _is_silent(session)):
                del self._models[name]
        if len(self._models) >= self.config.models:
            raise ConfigError(
                f"{len(self._models)} models are there, as many as may be at once; close a client that is done, or "
                "start the server with more --models."
            )

    def _model(self, name: str) -> AdapterTrainer:
        if name not in self._models:
            raise StateError(f"model_id = '{name}' is not here; its session has ended, or it was never made.")
        return self._models[name]

    def _require_base(self, name: str | None) -> None:
        known = (self.config.name, str(self.config.folder))
        if name not in known:
            raise ConfigError(f"base_model = '{name}' is not served{did_you_mean(name or '', known)}")

    def info(self, name: str) -> dict[str, Any]:
        """A description of a model for clients.

        Raises:
            Unknown: it does not exist.
        """
        model = self._models.get(name)
        if model is None:
            raise UnknownError(f"model_id = '{name}' is not here; its session has ended, or it was never made.")
        return {
            "type": "get_info",
            "model_data": {"model_name": str(self.config.folder), "tokenizer_id": str(self.config.folder)},
            "model_id": name,
            "is_lora": True,
            "lora_rank": model.wanted.rank,
            "model_name": str(self.config.folder),
        }

    # Training

    def forward_backward(self, body: ForwardBackward, size_bytes: int) -> str:
        """Queue training sequences from a body of ``size_bytes``; the request's number."""
        return self._submit(
            f"{body.model_id}:{body.seq_id}",
            lambda reply: reply(Result(self._model(body.model_id).forward_backward(body), is_proto=True)),
            size_bytes,
        )

    def optim_step(self, body: request_schema.OptimStep) -> str:
        """Queue an update; the request's number."""

        def job(reply: Reply) -> None:
            if body.adam_params is None:
                raise ConfigError("adam_params is missing: AdamW is the one optimizer here; give an update AdamParams.")
            reply(_json({"metrics": self._model(body.model_id).optim_step(body.adam_params)}))

        return self._submit(self._name_request(body.model_id, body.seq_id), job)

    def save_weights(self, body: request_schema.SaveWeights) -> str:
        """Queue a save; the request's number."""

        def job(reply: Reply) -> None:
            model = self._model(body.model_id)
            place = SavedPath(body.model_id, "weights", body.path or f"step-{model.about.step:06d}")
            with self.store.saving(place, overwrite=body.overwrite) as folder:
                model.save_model(folder)
            reply(_json({"type": "save_weights", "path": place.path}))

        return self._submit(self._name_request(body.model_id, body.seq_id), job)

    def save_for_sampler(self, body: request_schema.SaveForSampler) -> str:
        """Queue a save for the sampler; the request's number. Without a name it gets a sampling session."""

        def job(reply: Reply) -> None:
            if body.kind != "snapshot":
                raise ConfigError(
                    f"kind = '{body.kind}' is not here: an answer has the weights that it began with; use snapshot."
                )
            model, session = self._model(body.model_id), body.model_id.partition(":")[0]
            self._unnamed += body.path is None
            place = SavedPath(body.model_id, "sampler_weights", body.path or f"unnamed-{self._unnamed}")
            with self.store.saving(place, overwrite=body.path is None) as folder:
                model.write_sampler(folder)
            result: dict[str, Any] = {"type": "save_weights_for_sampler", "path": place.path}
            if body.sampling_session_seq_id is not None:
                result["sampling_session_id"] = self._add_sampler(session, body.sampling_session_seq_id, place.path)
            reply(_json(result))

        return self._submit(self._name_request(body.model_id, body.seq_id), job)

    def load_weights(self, body: request_schema.LoadWeights) -> str:
        """Queue a load, onto a model or as a new one; the request's number."""
        is_new = body.session_id is not None
        if is_new:
            self.hear(body.session_id or "")
        name = f"{body.session_id}:train:{body.model_seq_id}" if is_new else body.model_id or ""

        def job(reply: Reply) -> None:
            if body.base_model is not None:
                self._require_base(body.base_model)
            _require_adam("optimizer_config.type", body.optimizer_config.type if body.optimizer_config else "adamw")
            folder, about = self.store.find(body.path, "weights")
            if is_new:
                wanted = ModelRequest(
                    rank=about.rank,
                    seed=about.seed,
                    train_mlp=about.train_mlp,
                    train_attn=about.train_attn,
                    train_unembed=about.train_unembed,
                )
                model = self._make(name, wanted)
            else:
                model = self._model(name)
            try:
                model.load_model(folder, about, optimizer=body.optimizer)
            except BaseException:
                if is_new:
                    del self._models[name]
                raise
            reply(_json({"type": "load_weights", "path": body.path, "model_id": name}))

        return self._submit(f"{name}:0" if is_new else self._name_request(name, body.seq_id), job)

    # Sampling

    def create_sampling(self, body: request_schema.CreateSampling) -> str:
        """Create a sampling session of saved weights, or of the base.

        Raises:
            UserError: there are no such weights.
        """
        self.hear(body.session_id)
        if body.model_path is None or body.base_model is not None:
            self._require_base(body.base_model)
        if body.model_path is not None:
            self.store.find(body.model_path, "sampler_weights")
        return self._add_sampler(body.session_id, body.sampling_session_seq_id, body.model_path)

    def _add_sampler(self, session: str, number: int | None, path: str | None) -> str:
        """Add a sampling session; its name, which is the same for a repeated request."""
        if session not in self._sessions:
            raise StateError(f"session_id = '{session}' has ended; create another.")
        samplers = self._sessions[session].samplers
        name = f"{session}:sample:{number}"
        samplers[name] = path
        while len(samplers) > MOST_SAMPLERS:
            del samplers[next(iter(samplers))]
        return name

    def _weights_of(self, sampler: str) -> str | None:
        """The saved weights of a sampling session; None for the base.

        Raises:
            Unknown: there is no such session.
        """
        session = self._sessions.get(sampler.partition(":")[0])
        if session is None or sampler not in session.samplers:
            raise UnknownError(f"sampling_session_id = '{sampler}' is not known; it has ended, or was never begun.")
        return session.samplers[sampler]

    def sampler(self, name: str) -> dict[str, Any]:
        """A description of a sampling session for clients.

        Raises:
            Unknown: there is no such session.
        """
        return {"sampler_id": name, "base_model": str(self.config.folder), "model_path": self._weights_of(name)}

    def sample(self, body: request_schema.SampleBody, size_bytes: int) -> tuple[str, list[str]]:
        """Queue a prompt from a body of ``size_bytes``; the request's number, and one for each answer."""
        path = body.model_path
        if body.sampling_session_id is not None:
            path = self._weights_of(body.sampling_session_id)
        elif path is None:
            self._require_base(body.base_model)
        if not 1 <= body.num_samples <= MOST_SAMPLES:
            raise ConfigError(f"num_samples = {body.num_samples} must be from 1 to {MOST_SAMPLES}.")
        # Without a session two clients may use the same number, so no request counts as a repetition.
        has_session = body.sampling_session_id is not None
        name = self._name_request(body.sampling_session_id or "sample", body.seq_id if has_session else None)

        def tell(reply: Reply, result: Sampled | Exception) -> None:
            reply(Result(write_sampled(result), is_proto=True) if isinstance(result, Sampled) else error_of(result))

        def job(reply: Reply) -> None:
            adapter: Path | None = None
            if path is not None:
                adapter, _ = self.store.find(path, "sampler_weights")
            context = self._sampler.engine.info.context_tokens
            self._sampler.ask(sample_request(body, adapter, context), lambda samples: tell(reply, samples))

        self._submit(name, job, size_bytes)
        return name, [f"{name}:{at}" for at in range(body.num_samples)]

    def _submit(self, name: str, job: Job, size_bytes: int = 0) -> str:
        self.desk.submit(name, job, size_bytes)
        return name

    def _name_request(self, of: str, number: int | None) -> str:
        """A request's name: the same for a repeated request."""
        return f"{of}:{uuid.uuid4().hex if number is None else number}"


def _is_silent(session: ClientSession) -> bool:
    return time.monotonic() - session.heard_s > SILENT_S


def _require_adam(name: str, kind: str) -> None:
    if kind != "adamw":
        raise ConfigError(f"{name} = '{kind}' is not here; adamw is.")


def _json(fields: Mapping[str, Any]) -> Result:
    return Result(json.dumps(fields).encode())
