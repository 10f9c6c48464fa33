"""Files that make a checkpoint a Hugging Face folder: configurations beside the weights, so that generation ends where
a document does.

    config.json              the decoder, and its special tokens
    generation_config.json   the tokens that end a text
    tokenizer.json           text to ids
    tokenizer_config.json    its special tokens
    chat_template.jinja      how conversations are rendered, if it has learnt them

A run on a foreign ``tokenizer.json`` keeps the files beside it, and on a ``config.json`` of that vocabulary its ids:
its end-of-text tokens stay, and the token that ends this run's documents joins them, as do those that end its answers.
``chat.json`` beside the run's tokens names the rendering of conversations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from superstep.data.tokenizer import load_tokenizer
from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.plan.model.hf_config import TOKEN_IDS, to_hf_config
from superstep.plan.model.shape import ModelShape


def hf_files(config: RunConfig, shape: ModelShape | None, tokenizer: Path) -> dict[str, str]:
    """The files by name.

    Args:
        config: the run's.
        shape: the decoder's; None for a user's own model, which no other loader supports.
        tokenizer: the ``tokenizer.json`` that made the run's tokens.

    Raises:
        ConfigError: a file beside a foreign one cannot be read.
    """
    loaded, chat = load_tokenizer(tokenizer), _object(tokenizer.with_name("chat.json"))
    names = _tokenizer_config(config, shape, loaded.core.id_to_token(loaded.end_of_text))
    files = {"tokenizer.json": tokenizer.read_text(encoding="utf-8")}
    if chat:
        names = {**chat["special"], **names, "chat_template": _template_list(chat["sources"])}
        if set(chat["sources"]) == {"default"}:
            files["chat_template.jinja"] = names.pop("chat_template")[0]["template"]
    files["tokenizer_config.json"] = _text(names)
    if shape is None or config.lora is not None:  # an adapter's folder is not a model
        return files
    # With a tokenizer trained on the corpus, a foreign shape's ids would be arbitrary words.
    is_foreign = config.data.tokenizer is not None and config.model.name.endswith(".json")
    foreign = Path(config.model.name) if is_foreign else None
    settings = _object(foreign)
    generation = _object(foreign and foreign.with_name("generation_config.json"))
    ends = _ends(settings)
    for more in (_ends(generation), [loaded.end_of_text], chat.get("ends", [])):
        ends = _with(ends, more)
    ids = {name: settings.get(name) for name in TOKEN_IDS} | {"eos_token_id": ends[0] if len(ends) == 1 else ends}
    # generate pads the rows of a batch that ended before others.
    padding = {"pad_token_id": loaded.end_of_text} if ids["pad_token_id"] is None else {}
    return files | {
        "config.json": _text({**to_hf_config(shape), **ids}),
        "generation_config.json": _text(
            {**_find_known_ids(ids), **padding, **generation, "eos_token_id": ids["eos_token_id"]}
        ),
    }


def _tokenizer_config(config: RunConfig, shape: ModelShape | None, end: str | None) -> dict[str, Any]:
    beside = None if config.data.tokenizer is None else Path(config.data.tokenizer).with_name("tokenizer_config.json")
    ours: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": end,
    }
    if shape is not None:
        ours["model_max_length"] = shape.max_tokens
    return ours | _object(beside)


def _template_list(sources: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "template": source} for name, source in sources.items()]


def _ends(raw: dict[str, Any]) -> list[int]:
    ends = raw.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _with(ends: list[int], more: list[int]) -> list[int]:
    return ends + [each for each in more if each not in ends]


def _find_known_ids(ids: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in ids.items() if value is not None}


def _object(path: Path | None) -> dict[str, Any]:
    """The object in a file; empty for a missing or invalid file."""
    if path is None or not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); fix it, or remove it from the folder.") from error
    return raw if isinstance(raw, dict) else {}


def _text(raw: dict[str, Any]) -> str:
    return json.dumps(raw, indent=2) + "\n"
