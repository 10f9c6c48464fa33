"""CTC on rows of several samples, beside torch's loss of each sample alone."""

import torch
import torch.nn.functional as F

from superstep.model.custom.ctc_within import ctc_within, next_places_within, prefixes_within

# Two samples in the first row; one with equal letters and padding in the second.
NUMBERS = torch.tensor([[0] * 5 + [1] * 4, [0] * 7 + [-1] * 2])
LETTERS = torch.tensor([[0, 2, 2, 0, 3], [0, 1, 5, 5, 0]])
LETTER_NUMBERS = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]])
ALONE = [(0, slice(0, 5), [2, 2]), (0, slice(5, 9), [3]), (1, slice(0, 7), [1, 5, 5])]


def outputs():
    logits = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return logits, logits.log_softmax(-1)


def torch_loss(logp, letters):
    sizes = torch.tensor([len(logp)]), torch.tensor([len(letters)])
    return F.ctc_loss(logp[:, None], torch.tensor([letters]), *sizes, reduction="sum")


def test_losses_and_gradients_are_those_of_torch_for_each_sample_alone():
    logits, logp = outputs()
    losses = ctc_within(prefixes_within(logp, NUMBERS, LETTERS, LETTER_NUMBERS), NUMBERS, LETTER_NUMBERS)
    wanted = [torch_loss(logp[row, places], letters) for row, places, letters in ALONE]
    assert (losses != 0).tolist() == [[False, False, True, False, True], [False, False, False, True, False]]
    torch.testing.assert_close(losses[losses != 0], torch.stack(wanted))
    (ours,) = torch.autograd.grad(losses.sum(), logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(sum(wanted), logits)
    torch.testing.assert_close(ours, theirs)


def test_a_sound_too_short_for_its_letters_has_no_loss():
    _, logp = outputs()
    numbers = torch.tensor([[0] * 2 + [1] * 7, [0] * 3 + [-1] * 6])
    losses = ctc_within(prefixes_within(logp, numbers, LETTERS, LETTER_NUMBERS), numbers, LETTER_NUMBERS)
    assert (losses != 0).tolist() == [[False, False, False, False, True], [False] * 5]


def test_the_next_letter_begins_where_ctc_says():
    """The share of a place is that of all ways to go on with any letter there, or to end."""
    _, logp = outputs()
    prefix = prefixes_within(logp, NUMBERS, LETTERS, LETTER_NUMBERS)
    places, ended = next_places_within(prefix, logp[..., 0], NUMBERS, LETTER_NUMBERS)
    own = LETTER_NUMBERS >= 0
    torch.testing.assert_close((places.sum(-1) + ended)[own], torch.ones(int(own.sum())))
    assert not places[0, :3, 5:].any()
    assert not places[0, 3:, :5].any()
    # The first letter of the second sample: all blanks before it, then no blank.
    blank = logp[0, 5:, 0].detach()
    before = F.pad(blank.cumsum(0), (1, 0))
    ways = torch.cat([before[:-1] + (1 - blank.exp()).log(), before[-1:]])
    torch.testing.assert_close(torch.cat([places[0, 3, 5:], ended[0, 3:4]]), ways.softmax(0))


def test_what_a_decoder_reads_does_not_tell_later_letters():
    _, logp = outputs()
    changed = LETTERS.clone()
    changed[1, 3] = 4
    for letters in (LETTERS, changed):
        prefix = prefixes_within(logp, NUMBERS, letters, LETTER_NUMBERS)
        places, ended = next_places_within(prefix, logp[..., 0], NUMBERS, LETTER_NUMBERS)
        if letters is LETTERS:
            before = places, ended
    assert torch.equal(places[1, :3], before[0][1, :3])
    assert torch.equal(ended[1, :3], before[1][1, :3])
    assert not torch.equal(places[1, 3], before[0][1, 3])
