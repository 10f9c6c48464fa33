"""Sounds as tensors, and lists of them in JSON lines: ``{"audio": "one.wav", "text": "one"}``.

Uncompressed wav files need nothing else. Other formats, such as ogg and flac, need ``pip install "superstep[sounds]"``.
"""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from superstep.errors import DataError


def list_sounds(path: str | Path, field: str = "audio") -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; ``field`` becomes a path, which is relative to the file's folder.

    Raises:
        DataError: names the first line that is no object with this field.
    """
    file, sounds = Path(path), []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' cannot be read ({error}).") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get(field), str):
            raise DataError(f"{path}:{number} is no object with the field '{field}', the path of a sound.")
        sounds.append({**entry, field: file.parent / entry[field]})
    if not sounds:
        raise DataError(f"'{path}' has no lines; write one object for each sound.")
    return sounds


def sound_seconds(path: str | Path) -> float:
    """The length of a sound, by its header alone; raises as ``read_sound``."""
    if _is_wav(path):
        with _open_wav(path) as file:
            return file.getnframes() / file.getframerate()
    info = _soundfile(path).info(str(path))
    return float(info.frames / info.samplerate)


def read_sound(path: str | Path, rate: int = 16000) -> Tensor:
    """A sound, the mean of its channels: fp32 [samples] between -1 and 1, ``rate`` of them in a second.

    Raises:
        DataError: the file is no sound, or needs a package that is not installed.
    """
    if _is_wav(path):
        with _open_wav(path) as file:
            own_rate, width = file.getframerate(), file.getsampwidth()
            raw = file.readframes(file.getnframes())
            values = _numbers(raw, width).reshape(-1, file.getnchannels())
    else:
        soundfile = _soundfile(path)
        try:
            values, own_rate = soundfile.read(str(path), dtype="float64", always_2d=True)
        except RuntimeError as error:
            raise DataError(f"'{path}' is no sound ({error}); leave it out.") from None
    mono: NDArray[np.float64] = values.mean(1)
    if own_rate != rate and len(mono):  # by its spectrum: frequencies that the new rate lacks are cut
        count = max(1, round(len(mono) * rate / own_rate))
        mono = np.fft.irfft(np.fft.rfft(mono), count) * (count / len(mono))
    return torch.from_numpy(np.ascontiguousarray(mono, np.float32))


def _is_wav(path: str | Path) -> bool:
    return Path(path).suffix.lower() == ".wav"


def _open_wav(path: str | Path) -> wave.Wave_read:
    try:
        return wave.open(str(path), "rb")
    except (OSError, EOFError, wave.Error) as error:
        raise DataError(f"'{path}' is no uncompressed wav file ({error}); leave it out.") from None


def _numbers(raw: bytes, width: int) -> NDArray[np.float64]:
    """Samples of ``width`` bytes between -1 and 1: unsigned for one byte, little-endian signed for more."""
    if width == 1:
        return (np.frombuffer(raw, np.uint8).astype(np.float64) - 128) / 128
    wide = np.zeros((len(raw) // width, 4), np.uint8)
    wide[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)
    return wide.view("<i4")[:, 0] / 2.0**31


def _soundfile(path: str | Path) -> Any:  # noqa: ANN401
    try:
        import soundfile
    except ImportError:
        raise DataError(
            f"'{path}' needs soundfile, which is not installed: pip install \"superstep[sounds]\"; or write it as wav."
        ) from None
    return soundfile
