"""transformers: ``generate``, and its continuous batching."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.serve_sides.asked import Answers, Side, answer_jobs

PAD = 0


def load(asked: dict) -> tuple[Side, dict]:
    """The side that ``asked["batching"]`` names: static or continuous."""
    torch.set_num_threads(asked["threads"])
    is_continuous = asked["batching"] == "continuous"
    attention = "paged|sdpa" if is_continuous else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(asked["folder"], dtype=torch.bfloat16, attn_implementation=attention)
    model.eval()
    if torch.cuda.is_available():
        model.cuda()

    @torch.inference_mode()
    def static(prompts: list[list[int]], tokens: list[int]) -> Answers:
        """All prompts side by side, padded on the left, until the longest answer is there."""
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[PAD] * count + prompt for count, prompt in zip(padding, prompts, strict=True)]
        ids = torch.tensor(rows, device=model.device)
        seen = torch.tensor([[0] * count + [1] * (longest - count) for count in padding], device=model.device)
        most = max(tokens)
        out = model.generate(
            ids,
            attention_mask=seen,
            do_sample=False,
            max_new_tokens=most,
            min_new_tokens=most,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        return [row[longest : longest + count].tolist() for row, count in zip(out, tokens, strict=True)]

    if not is_continuous:
        return static, {"transformers": transformers.__version__, "torch": torch.__version__}

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD, max_new_tokens=max(asked["most"], 1))
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()

    def continuous(prompts: list[list[int]], tokens: list[int]) -> Answers:
        names = [
            manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1)
            for prompt, count in zip(prompts, tokens, strict=True)
        ]
        found = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=60)
            if result is None:
                raise SystemExit("transformers' continuous batching gave no result within a minute.")
            if result.is_finished():
                found[result.request_id] = result.generated_tokens
        return [list(found[name])[:count] for name, count in zip(names, tokens, strict=True)]

    return continuous, {"transformers": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    answer_jobs(load)
