"""vLLM on a CPU, in an environment that has its wheel."""

from __future__ import annotations

import os

from bench.serve_sides.asked import Answers, Side, answer_jobs


def load(asked: dict) -> tuple[Side, dict]:
    """Its offline engine; prompts are new in each job, so that no cache of them helps."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = asked.get("bind", "nobind")
    os.environ["OMP_NUM_THREADS"] = str(asked["threads"])
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=asked["folder"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=asked.get("eager", False),
        max_model_len=1024,
        max_num_seqs=64,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def side(prompts: list[list[int]], tokens: list[int]) -> Answers:
        ways = [
            SamplingParams(temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
            for n in tokens
        ]
        asked_for = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(out.outputs[0].token_ids) for out in engine.generate(asked_for, ways, use_tqdm=False)]

    return side, {"vllm": vllm.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    answer_jobs(load)
