"""gensim's Word2Vec on one thread: prints words a processor second and the correlation with WordSim-353 as JSON.

python bench/word2vec_sides/gensim_words.py FOLDER METHOD EPOCHS SEED
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"

from gensim.models import Word2Vec  # noqa: E402


def measure(folder: Path, method: str, epochs: int, seed: int) -> dict[str, float]:
    """Train on the text of a folder."""
    lines = [line.split() for line in (folder / "text.txt").read_text(encoding="utf-8").splitlines()]
    is_tree = method == "tree"
    model = Word2Vec(
        vector_size=100, window=5, min_count=5, sample=1e-3, sg=int(method != "cbow"), hs=int(is_tree),
        negative=0 if is_tree else 5, workers=1, epochs=epochs, seed=seed,
    )  # fmt: skip
    model.build_vocab(lines)
    begin = time.process_time()
    model.train(lines, total_examples=model.corpus_count, epochs=epochs)
    seconds = time.process_time() - begin
    correlation = float(model.wv.evaluate_word_pairs(str(folder / "wordsim353.tsv"))[1][0])
    return {"words_per_cpu_s": model.corpus_total_words * epochs / seconds, "correlation": correlation}


if __name__ == "__main__":
    folder, method, epochs, seed = sys.argv[1:]
    sys.stdout.write(json.dumps(measure(Path(folder), method, int(epochs), int(seed))) + "\n")
