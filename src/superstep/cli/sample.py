"""superstep sample: text from a checkpoint of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from superstep.cli.arguments.sample import SampleOptions, read
from superstep.data.tokenizer import Tokenizer, load_tokenizer
from superstep.errors import ConfigError, StateError
from superstep.model.custom.user_model import load_units
from superstep.model.files.hf import load_weights
from superstep.model.unit import UnitGraph
from superstep.plan.config import RunConfig
from superstep.plan.config_io import read_config
from superstep.run.serving.served_model import refuse_adapter
from superstep.serve.batch_generate import generate
from superstep.serve.build_engine import open_engine
from superstep.serve.config import ServeConfig
from superstep.serve.load_rank import KnownModel
from superstep.serve.scheduling.request import Sampling, cut_text
from superstep.state.checkpoint_dirs import checkpoints, step_of
from superstep.state.verify import verify_weights
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.sample import Model
from superstep.train.sample import generate as generate_own
from superstep.train.weights.weights_folder import newest_checkpoint


def main(argv: Sequence[str]) -> int:
    """Print the prompt and its continuation."""
    run, prompt, options = read(argv)
    written = text(run, prompt, options)
    sys.stdout.write(written + "\n")
    return 0


def text(run: Path, prompt: str, options: SampleOptions) -> str:
    """The prompt and its continuation by a checkpoint of a run.

    Raises:
        StateError: there is no such run, or it has no such checkpoint.
        ConfigError: the prompt is longer than a sequence of the run.
    """
    config, checkpoint = _find_checkpoint(run, options.step)
    verify_weights(checkpoint)
    tokenizer = load_tokenizer(checkpoint / "tokenizer.json")
    ids = tokenizer.encode(prompt)
    if config.model.source is None:
        sampling = Sampling(max_tokens=options.tokens, temperature=options.temperature, seed=options.seed)
        drawn = _generate_text(config, checkpoint, ids, sampling, tokenizer)
    else:
        drawn = list(
            generate_own(
                _own(config, checkpoint),
                ids,
                tokens=options.tokens,
                window_tokens=config.data.sequence_tokens,
                temperature=options.temperature,
                seed=options.seed,
                end_of_text=tokenizer.end_of_text,
            )
        )
    return tokenizer.decode(ids + drawn)


def _find_checkpoint(run: Path, step: int | None) -> tuple[RunConfig, Path]:
    """A run's configuration, and its checkpoint of a step, or the newest."""
    folder = RunFolder(root=run)
    if not folder.config.is_file():
        raise StateError(f"'{run}' is not a run directory: it has no run.toml. Name the folder of a run.")
    config = read_config(folder.config)
    if config.data.source is not None:
        raise ConfigError(
            f"'{run}' was trained on the samples of {config.data.source}, which are no text, and superstep sample "
            "continues text; load the model.safetensors of its checkpoint in Python."
        )
    if config.lora is not None:
        refuse_adapter(run)
    if step is None:
        return config, newest_checkpoint(run)
    kept = {step_of(place): place for place in checkpoints(folder.checkpoints)}
    if step not in kept:
        raise StateError(f"'{run}' has no checkpoint of step {step}; choose one of {sorted(kept)}.")
    return config, kept[step]


def _generate_text(
    config: RunConfig, checkpoint: Path, prompt: list[int], sampling: Sampling, tokenizer: Tokenizer
) -> list[int]:
    """The engine's answer, without the end of text. Prompt and answer are at most a sequence of the run."""
    serve = ServeConfig(
        context_tokens=config.data.sequence_tokens,
        requests=1,
        compute=config.numerics.compute,
        exact=config.numerics.exact,
    )
    engine = open_engine(checkpoint, serve, known=KnownModel(version=checkpoint.name))
    room = engine.info.context_tokens - len(prompt)
    if room > 0 and (cut := cut_text("--tokens", sampling.max_tokens, room)) is not None:
        sys.stderr.write(cut + "\n")
    (answer,) = generate(engine, [prompt], sampling)
    return [token for token in answer.ids if token != tokenizer.end_of_text]


def _own(config: RunConfig, checkpoint: Path) -> Model:
    """The units of a user's file, in sequence."""
    model = UnitGraph(load_units(config), config.train.seed)
    load_weights(checkpoint, {name: view for spec, param in model.parts.values() for name, view in spec.views(param)})
    return model
