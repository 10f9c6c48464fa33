"""The log-mel spectrogram is that of transformers' Whisper."""

import numpy as np
import pytest
import torch

from superstep.data.samples.log_mel import count_frames, log_mel


@pytest.mark.parametrize("samples", [300, 12345, 16000, 80160])
def test_it_is_that_of_whisper(samples):
    whisper = pytest.importorskip("transformers").WhisperFeatureExtractor()
    generator = torch.Generator().manual_seed(samples)
    sound = torch.randn(samples, generator=generator) * torch.linspace(0, 1, samples) ** 2
    ours = log_mel(sound)
    assert ours.shape == (count_frames(samples), 80)
    wanted = whisper(sound.numpy(), sampling_rate=16000, padding="do_not_pad", return_tensors="np")
    assert np.abs(wanted.input_features[0].T - ours.numpy()).max() < 1e-5


def test_silence_is_the_same_everywhere():
    assert torch.equal(log_mel(torch.zeros(1600)), torch.full((10, 80), -1.5))
