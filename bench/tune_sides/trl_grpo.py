"""TRL's GRPOTrainer on the toy tasks: prints the seconds of its steps as JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from superstep.grade.task import answer_rollout


class Clock(TrainerCallback):
    """Seconds from the beginning of each step to its end, sampling and grades among them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since_s = 0.0

    def on_step_begin(self, args: object, state: object, control: object, **more: object) -> None:
        """A step begins."""
        self._since_s = time.perf_counter()

    def on_step_end(self, args: object, state: object, control: object, **more: object) -> None:
        """It ends."""
        self.seconds.append(time.perf_counter() - self._since_s)


def main() -> None:
    """Trains as the one line of JSON on the command line asks."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    spec = importlib.util.spec_from_file_location("environment", asked["environment"])
    environment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(environment)

    answers = asked["group"] * asked["groups"]
    tasks = [environment.task(index, asked["seed"]) for index in range(asked["groups"] * (asked["steps"] + 2))]
    prompts = [f"User: {task.prompt}\n\nAssistant:" for task in tasks]
    rows = Dataset.from_dict({"prompt": prompts, "index": list(range(len(tasks)))})

    def reward(completions: list[str], index: list[int], **more: object) -> list[float]:
        return [
            float(environment.grade(tasks[i], answer_rollout(text))) for i, text in zip(index, completions, strict=True)
        ]

    model = AutoModelForCausalLM.from_pretrained(asked["folder"], dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(asked["folder"])
    tokenizer.pad_token = tokenizer.eos_token
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=trl.GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=asked["bf16"],
                per_device_train_batch_size=answers,
                num_generations=asked["group"],
                max_completion_length=asked["max_tokens"],
                max_steps=asked["steps"],
                learning_rate=asked["lr"],
                lr_scheduler_type="constant",
                temperature=1.0,
                beta=0.0,
                loss_type="grpo",
                gradient_checkpointing=False,
                save_strategy="no",
                logging_steps=1,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    Path(asked["out"]).write_text(
        json.dumps({"seconds": clock.seconds, "rewards": rewards, "versions": versions}), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
