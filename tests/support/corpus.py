"""Token files small enough to be made within a test: documents of random ids, and a tokenizer of as many words."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers.models import WordLevel

from superstep.data.batch import SPLITS
from superstep.data.token_files import FORMAT, CorpusManifest
from superstep.data.tokenizer import ENDS_OF_TEXT

DOCUMENTS = 400


def write_corpus(folder: Path, *, vocab: int, seed: int = 1, tokens: tuple[int, int] = (3, 40)) -> Path:
    """A folder that ``open_corpus`` opens, with documents of so many tokens, from the fewest to the most."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for split in SPLITS:
        lengths = random.integers(tokens[0], tokens[1] + 1, DOCUMENTS)
        bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        ids = random.integers(1, vocab, bounds[-1]).astype(np.uint16)
        ids[bounds[1:] - 1] = 0
        ids.tofile(folder / f"{split}.tokens")
        with (folder / f"{split}.index").open("wb") as file:
            np.save(file, bounds)
        sizes[split] = len(ids)
    words = {ENDS_OF_TEXT[0]: 0} | {f"w{number}": number for number in range(1, vocab)}
    tokenizers.Tokenizer(WordLevel(words, unk_token=ENDS_OF_TEXT[0])).save(str(folder / "tokenizer.json"))
    manifest = CorpusManifest(
        format=FORMAT,
        fingerprint="",
        dtype="uint16",
        vocab=vocab,
        end_of_text=0,
        train_tokens=sizes["train"],
        train_documents=DOCUMENTS,
        validation_tokens=sizes["validation"],
        validation_documents=DOCUMENTS,
        text_bytes=sum(sizes.values()),
        bytes_per_token=1.0,
        unigram_nats=4.0,
    )
    (folder / "corpus.json").write_text(json.dumps(asdict(manifest)))
    return folder
