"""Made-up prompts as wav files: each language hums at its own pitch; the English ones have words."""

import json
import math
import wave
from pathlib import Path

import numpy as np

PITCHES = {"en": 200, "es": 400, "fr": 700, "it": 1100, "ru": 1700}
COUNTS = {"train": 40, "validation": 10}


def write_wav(path: Path, values: np.ndarray, rate: int = 8000) -> None:
    """Values between -1 and 1 as 16-bit numbers."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, len(values), "NONE", ""))
        file.writeframes((values * 32767).astype("<i2").tobytes())


def write_prompts(folder: Path) -> None:
    """``train.jsonl`` and ``validation.jsonl``, with hums of 0.3 to 1.5 seconds, the first of 5."""
    rng = np.random.default_rng(0)
    for split, count in COUNTS.items():
        lines = []
        for number in range(count):
            language, pitch = list(PITCHES.items())[number % len(PITCHES)]
            samples = int(rng.uniform(0.3, 1.5) * 8000) if number else 5 * 8000
            name = f"{language}/{split}-{number}.wav"
            (folder / language).mkdir(parents=True, exist_ok=True)
            hum = 0.3 * np.sin(2 * math.pi * pitch * np.arange(samples) / 8000) + 0.01 * rng.normal(size=samples)
            write_wav(folder / name, hum)
            said = {"text": f"{split} {'abcdefgh'[number % 8]}"} if language == "en" else {}
            lines.append({"audio": name, "language": language, "seconds": samples / 8000} | said)
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
