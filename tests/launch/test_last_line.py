"""What a rank that has died wrote last."""

import pytest

from superstep.launch.rank_process import last_line

STACKS = """Fatal Python error: Segmentation fault

Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 3 in wait

Current thread 0x02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 9 in sum
  File "/home/me/model.py", line 12 in forward
  File "/home/me/train.py", line 40 in step

Extension modules: numpy, torch (total: 2)
"""


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("", ""),
        ("one\ntwo\n\n", "two"),
        (STACKS, 'Fatal Python error: Segmentation fault (File "/home/me/model.py", line 12 in forward)'),
        ("strict device: why\n" + STACKS, 'strict device: why (File "/home/me/model.py", line 12 in forward)'),
        ("Fatal Python error: Aborted\n", "Fatal Python error: Aborted (no line of Python)"),
    ],
)
def test_it_is_the_cause_and_not_the_end_of_the_stacks(text, last):
    assert last_line(text.split("\n")) == last
