"""The model of recipes/audio_transcripts.py: an encoder of sounds with a CTC loss, and a decoder that reads it.

The encoder has convolutions (as Citrinet, Majumdar 2021) and an output each 40 ms. Its CTC loss (Graves 2006) teaches
it letters in the order of the sound. With the letters so far it tells where the next one begins, whatever that is. The
decoder reads the encoder there.

    B  rows    F  frames of a row    S  places: every fourth frame    T  letters    D  width    V  outputs
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.model.custom.ctc_within import ctc_within, next_places_within, prefixes_within
from superstep.model.custom.within_samples import neighbours_within

REACH = 5  # places of a convolution to each side


class Stem(nn.Module):
    """Two convolutions of three frames, both of every other one."""

    def __init__(self, bands: int, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Linear(3 * bands, width), nn.Linear(3 * width, width)

    def forward(self, mel_BF: Tensor, numbers_BF: Tensor) -> Tensor:
        x_BFD = F.gelu(self.conv1(neighbours_within(mel_BF, numbers_BF)[:, ::2]))
        return F.gelu(self.conv2(neighbours_within(x_BFD, numbers_BF[:, ::2])[:, ::2]))


class Taps(nn.Conv1d):
    """A convolution of each channel alone, within samples."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, 2 * REACH + 1, groups=width)

    def forward(self, x_BSD: Tensor, numbers_BS: Tensor) -> Tensor:
        near = neighbours_within(x_BSD, numbers_BS, REACH).unflatten(-1, (2 * REACH + 1, -1))
        return (near * self.weight.squeeze(1).t()).sum(-2) + self.bias


class Hear(nn.Module):
    """A layer of the encoder: a gated convolution, then a feed-forward."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GLU())
        self.taps = Taps(width)
        self.out = nn.Sequential(nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, width), nn.Dropout(rate))
        self.ffn = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.SiLU(), nn.Dropout(rate),
            nn.Linear(3 * width, width), nn.Dropout(rate),
        )  # fmt: skip

    def forward(self, x_BSD: Tensor, numbers_BF: Tensor) -> Tensor:
        x_BSD = x_BSD + self.out(self.taps(self.gate(x_BSD), numbers_BF[:, ::4]))
        return x_BSD + self.ffn(x_BSD)


class Find(nn.Module):
    """Beside each letter what the encoder gives where the next one begins, and the CTC loss: [B, T, D + V + 2]."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x_BSD: Tensor, mel_BF: Tensor, letters_BT: Tensor, numbers_BT: Tensor) -> Tensor:
        x_BSD, numbers_BS = self.norm(x_BSD), mel_BF[:, ::4]
        logp_BSV = self.linear(x_BSD).float().log_softmax(-1)
        prefix = prefixes_within(logp_BSV, numbers_BS, letters_BT, numbers_BT)
        places_BTS, ended_BT = next_places_within(prefix, logp_BSV[..., 0], numbers_BS, numbers_BT)
        found_BTD, share_BTV = places_BTS @ x_BSD.float(), places_BTS @ logp_BSV.exp()
        ends = ended_BT.unsqueeze(-1), ctc_within(prefix, numbers_BS, numbers_BT).unsqueeze(-1)
        return torch.cat([found_BTD, (share_BTV + 1e-3).log(), *ends], -1).to(x_BSD.dtype)


class Read(nn.Module):
    """The letters, and what was found beside each."""

    def __init__(self, width: int, outputs: int, rate: float) -> None:
        super().__init__()
        self.embed, self.found = nn.Embedding(outputs, width), nn.Linear(width + outputs + 1, width)
        self.dropout = nn.Dropout(rate)

    def forward(self, letters_BT: Tensor, found_BTX: Tensor) -> Tensor:
        return self.dropout(self.embed(letters_BT) + self.found(found_BTX[..., :-1]))


class Write(nn.Module):
    """Logits of the next letter, and the CTC loss behind them: [B, T, V + 1]."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x_BTD: Tensor, found_BTX: Tensor) -> Tensor:
        return torch.cat([self.linear(self.norm(x_BTD)), found_BTX[..., -1:]], -1)


def loss_of_letters(out_BTX: Tensor, targets_BT: Tensor) -> Tensor:
    """The cross entropy of the decoder."""
    return F.cross_entropy(out_BTX[..., :-1].float().flatten(0, 1), targets_BT.flatten(), reduction="sum")


def loss_of_sounds(out_BTX: Tensor, targets_BT: Tensor) -> Tensor:
    """The CTC loss of the encoder."""
    return out_BTX[..., -1].float().sum()
