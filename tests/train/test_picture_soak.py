"""Many steps on rows of text alone, of pictures alone and of both, drawn at random: no layout hangs, and all have the
same bits.
"""

from pathlib import Path

import pytest

from picture_samples import SAMPLES, write_pictures
from superstep.cli.main import main

PARTS = '''
def parts(index):
    """Rows of text alone, of pictures alone, and of both, at random."""
    draw = random.Random(index)
    kind = draw.choice(["text", "pictures", "both"])
    if kind == "text":
        return 24, []
    pictures = [(2 * draw.randint(1, 2), 2 * draw.randint(1, 2)) for _ in range(3)]
    return (0 if kind == "pictures" else draw.randint(1, 12)), pictures


def size('''

LAYOUTS = {
    "zero": ["--plan.dp", "2", "--plan.zero", "3", "--plan.recompute", "full"],
    "pipeline": ["--plan.dp", "1", "--plan.zero", "0", "--plan.pp", "2", "--plan.schedule", "interleaved"],
    "both": ["--plan.dp", "2", "--plan.pp", "2", "--plan.zero", "2", "--plan.recompute", "selective"],
}


@pytest.mark.multiproc
@pytest.mark.parametrize("steps", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_random_batch_hangs_and_all_layouts_have_the_same_bits(tmp_path, monkeypatch, steps):
    monkeypatch.chdir(tmp_path)
    start, end = SAMPLES.index("def parts("), SAMPLES.index("def size(")
    text = f"import random\n{SAMPLES[:start]}{PARTS}{SAMPLES[end + len('def size(') :]}"
    write_pictures(tmp_path, text.replace('return 60 if split == "train"', 'return 600 if split == "train"'))
    length = ["--train.steps", str(steps), "--train.eval-every", str(steps), "--state.save-every", str(steps)]
    weights = {}
    for name, layout in LAYOUTS.items():
        chunks = ["--plan.chunks", "2"] if "interleaved" in layout else []
        place = ["--state.dir", name, "--numerics.exact", "true", "--train.batch-sequences", "4"]
        assert main(["train", "run.toml", *length, *place, *layout, *chunks]) == 0
        (checkpoint,) = Path(name, "checkpoints").iterdir()
        weights[name] = (checkpoint / "model.safetensors").read_bytes()
    assert len(set(weights.values())) == 1
