"""Open the service of a folder: the sampler's engine at once, models when clients create them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from superstep.comm.device import Device
from superstep.data.tokenizer import load_tokenizer
from superstep.serve.build_engine import open_engine
from superstep.serve.config import ServeConfig
from superstep.serve.text.detokenize import TokenTexts
from superstep.tune.tinker.config import TinkerConfig
from superstep.tune.tinker.sampler import PromptSampler
from superstep.tune.tinker.saved_models import SavedModels
from superstep.tune.tinker.service import TinkerService


def open_service(
    config: TinkerConfig, device: Device, tell: Callable[[str], None] = lambda line: None
) -> TinkerService:
    """The service of a folder's model.

    Raises:
        ConfigError: it cannot be served with these settings.
        StateError: the folder holds no model, or it is damaged.
    """
    # In exact mode the compiled decoder supports no adapters, which this service needs.
    serve = ServeConfig(
        context_tokens=config.context_tokens,
        compute=config.compute,
        exact=config.exact,
        kernels=None if config.exact else config.kernels,
    )
    engine = open_engine(config.folder, serve, device=device)
    tokenizer = config.folder / "tokenizer.json"
    words = TokenTexts(load_tokenizer(tokenizer)) if tokenizer.is_file() else None
    filled = replace(config, context_tokens=engine.info.context_tokens)
    return TinkerService(filled, PromptSampler(engine, words, config.adapters), SavedModels(config.root), device, tell)
