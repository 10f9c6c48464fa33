"""Pictures in text: samples with a token for each square of patches; whatever does not fit is refused in one line."""

import pytest
import torch

from picture_samples import SAMPLES, write_pictures
from superstep.data.samples.patches import cut_patches, place_tokens
from superstep.data.samples.sample_file import check_pure, open_samples
from superstep.errors import DataError
from superstep.plan.model.multimodal.vision_shape import VisionShape

SHAPE = VisionShape(layers=1, width=8, heads=1, ffn=8, patch=2, frames=2, merge=2, side=2, outputs=8)


def test_text_pictures_and_both_are_samples_of_one_file(tmp_path):
    samples = open_samples(write_pictures(tmp_path))
    check_pure(samples, seed=0)
    assert samples.fields.placeholders == {"pixels": (30, 4)}
    kinds = {(bool(size["pixels"]), size["tokens"] > size["pixels"] // 4) for size in samples.sizes("train")}
    assert kinds == {(False, True), (True, True), (True, False)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("(PICTURE, MERGE**2)}", "(PICTURE, 0)}"), "give for each field a token, at least 1, and the number of rows"),
        (("(PICTURE, MERGE**2)}", "(0, MERGE**2)}"), "give for each field a token, at least 1, and the number of rows"),
        (("{\"pixels\": (PICTURE", "{\"pixel\": (PICTURE"), "'pixel', which is no field; did you mean 'pixels'?"),
        (("\"pixels\": 48, \"patches\": 48", "\"pixels\": 50, \"patches\": 48"), "= 50 is no multiple of the 4 rows"),
        (("MERGE**2)}", "MERGE**2), \"patches\": (PICTURE, 4)}"), "gives token 30 to two fields; give each its own."),
        (("\"tokens\": tokens,\n        \"pos", "\"tokens\": tokens.int(),\n        \"pos"), "no field 'tokens' of"),
        (
            ("% 29 + 1,\n    ])", "% 29 + 1,\n    ])\n    tokens[:1] = PICTURE"),
            "has 0 rows of 'pixels' and 1 token 30 in 'tokens', and each stands for 4 rows; give it none of these "
            "tokens, or 4 rows.",
        ),
        (
            ("% 29 + 1,\n    ])", "% 29 + 1,\n    ])\n    tokens[tokens == PICTURE] = 1"),
            "has 16 rows of 'pixels' and no token 30 in 'tokens', and each stands for 4 rows; give it 4 of these "
            "tokens, or no rows.",
        ),
        (
            ("float() for rows", "float() + torch.rand(()) for rows"),
            "gives another 'pixels' when it is read again; let it depend on split, index and noise alone",
        ),
    ],
)  # fmt: skip
def test_a_file_whose_tokens_do_not_fit_is_refused_in_one_line(tmp_path, change, says):
    assert SAMPLES.count(change[0]) == 1
    path = write_pictures(tmp_path, SAMPLES.replace(*change))
    with pytest.raises(DataError) as refused:
        check_pure(open_samples(path), seed=0)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("data.source: ")


def test_patches_of_a_token_are_together():
    picture = torch.arange(3 * 4 * 8).view(3, 4, 8).float()
    pixels, patches = cut_patches(picture, SHAPE)
    assert patches.tolist() == [
        [0, 0, 2, 4], [0, 1, 2, 4], [1, 0, 2, 4], [1, 1, 2, 4], [0, 2, 2, 4], [0, 3, 2, 4], [1, 2, 2, 4], [1, 3, 2, 4],
    ]  # fmt: skip
    for patch, (row, column, *_) in zip(pixels.view(8, 3, 2, 2, 2), patches.tolist(), strict=True):
        wanted = picture[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        assert torch.equal(patch[:, 0], wanted)
        assert torch.equal(patch[:, 1], wanted)
    with pytest.raises(DataError, match="sides that are multiples of 4"):
        cut_patches(picture[:, :3], SHAPE)


def test_text_behind_a_picture_goes_on_after_its_longer_side():
    tokens = torch.tensor([1, 1, 9, 9, 9, 9, 1, 9, 1])
    places = place_tokens(tokens, 9, [(2, 8), (2, 2)], 2)
    assert places.tolist() == [
        [0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 2, 5], [6, 6, 6], [7, 7, 7], [8, 8, 8],
    ]  # fmt: skip
    assert place_tokens(tokens[:2], 9, [], 2).tolist() == [[0, 0, 0], [1, 1, 1]]
