"""A small model as a folder that a server opens: random weights, and a tokenizer of a few lines."""

from __future__ import annotations

from pathlib import Path

import torch

from superstep.data.tokenizer import train_tokenizer
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import save_weights
from superstep.model.unit import global_tensors, initial, parameters
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of

LINES = [
    '{"name": "Ann", "age": 7}\n',
    "To be, or not to be: that is the question.\n",
    "Ümläute, 漢字 and 🙂 as well.\n",
]


def write_folder(folder: Path, **model: object) -> Path:
    """The folder, written."""
    tokenizer = train_tokenizer(LINES * 20, 400)
    shape = shape_of(ModelConfig(name="tiny", vocab=tokenizer.vocab, **model))
    decoder = Decoder(shape)
    with torch.no_grad():
        for spec, param in parameters(decoder, units(shape)).values():
            # Larger than in training, so that one token is much likelier than another.
            param.copy_(initial(spec, param.shape, 0) * (4 if param.dim() > 1 else 1))
    save_weights(folder, global_tensors(decoder, units(shape)), shape)
    tokenizer.save(folder / "tokenizer.json")
    return folder
