"""Text files beside the tensors of a checkpoint, so that it is a folder of Hugging Face's and names its data."""

from __future__ import annotations

import json
from pathlib import Path

from superstep.data.sources.conversations import PREPROCESSOR
from superstep.data.token_files import MEDIA_SETTINGS
from superstep.plan.model.multimodal.families import read_multimodal, write_multimodal
from superstep.plan.resolution.resolve import Resolved
from superstep.train.weights.hf_files import hf_files
from superstep.train.weights.lora_base import draw_base, files_of

TEMPLATE = "chat_template.jinja"


def files_beside_corpus(run: Resolved, corpus: Path) -> dict[str, str]:
    """Those of a run on a corpus, by name.

    Args:
        run: with adapters, their base is drawn, until weights are given.
        corpus: the folder of token files.
    """
    if run.samples is not None:
        return _describe_model(run) | _list_conversation_files(run, corpus)
    files = hf_files(run.config, run.decoder, corpus / "tokenizer.json")
    files["corpus.json"] = (corpus / "corpus.json").read_text(encoding="utf-8")
    return files if run.config.lora is None else files | files_of(run, draw_base(run))


def _describe_model(run: Resolved) -> dict[str, str]:
    """The ``config.json`` of a family that reads more than text; nothing for a user's model."""
    shape = read_multimodal(run.config)
    return {} if shape is None else {"config.json": json.dumps(write_multimodal(shape), indent=2) + "\n"}


def _list_conversation_files(run: Resolved, corpus: Path) -> dict[str, str]:
    """What a run on conversations with pictures or sounds keeps beside its model; nothing for a file of samples."""
    if not (corpus / MEDIA_SETTINGS).is_file():
        return {}
    settings = json.loads((corpus / MEDIA_SETTINGS).read_text(encoding="utf-8"))
    files = hf_files(run.config, None, corpus / "tokenizer.json")
    files["corpus.json"] = (corpus / "corpus.json").read_text(encoding="utf-8")
    if settings["preprocessor"]:
        files[PREPROCESSOR] = json.dumps(settings["preprocessor"], indent=2) + "\n"
    return files


def files_beside_start(run: Resolved, start: Path) -> dict[str, str]:
    """Those of a run that tunes the model in a folder, by name."""
    files, template = hf_files(run.config, run.decoder, start / "tokenizer.json"), start / TEMPLATE
    return files | ({TEMPLATE: template.read_text(encoding="utf-8")} if template.is_file() else {})
