"""A small model to begin with, and conversations that it learns within a test."""

import json
from pathlib import Path

from chats import CHATML
from model_folder import write_folder

RECIPE = """
start = "base"

[data]
corpus = ["chats.jsonl"]
sequence_tokens = 96
validation_fraction = 0.1

[train]
steps = 6
batch_sequences = 4
lr = 3e-3
warmup_steps = 1
eval_every = 3
eval_batches = 2
min_lr_ratio = 1.0

[plan]
microbatch = 2

[state]
dir = "tuned"
save_every = 3

[observe]
peak_flops = 1e12
"""

WORDS = ("to", "be", "or", "not", "that", "is", "the")


def asked(number):
    """A question and its answer: the word that comes first in it."""
    word, other = WORDS[number % len(WORDS)], WORDS[(number * 5 + 3) % len(WORDS)]
    return f"{word}, {other}", word


def conversation(number, turns=1):
    messages = []
    for turn in range(turns):
        question, answer = asked(number + turn)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def preference(number):
    """Two answers: the word that comes first in the question, and the other one."""
    question, answer = asked(number)
    other = question.split(", ")[1]
    messages = [[{"role": "user", "content": question}, {"role": "assistant", "content": a}] for a in (answer, other)]
    return {"prompt": messages[0][:1], "chosen": messages[0][1:], "rejected": messages[1][1:]}


def preferences(count):
    """Records whose two answers differ."""
    return [each for each in map(preference, range(count)) if each["chosen"] != each["rejected"]]


def write_records(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def make_files(folder: Path, *, count=60, template: str | None = None):
    """Write base, chats.jsonl and recipe.toml."""
    write_folder(folder / "base")
    if template:
        (folder / "base" / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_records(folder / "chats.jsonl", [conversation(k, 1 + k % 3) for k in range(count)])
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    return folder


__all__ = ["CHATML", "RECIPE", "asked", "conversation", "make_files", "preferences", "write_records"]
