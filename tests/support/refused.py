"""Configurations that the plan refuses, for ``test_plan_errors``."""

from __future__ import annotations

from dataclasses import replace

from superstep.plan.config import LoraConfig, RunConfig
from superstep.plan.trained_parts import FreezeConfig


def config_of(**values) -> RunConfig:
    """A run with fields set by dotted names, dots written as double underscores."""
    config = RunConfig()
    for name, value in values.items():
        section, field = name.split("__")
        table = getattr(config, section) or {"lora": LoraConfig, "freeze": FreezeConfig}[section]()
        config = replace(config, **{section: replace(table, **{field: value})})
    return config


# the configuration, launched ranks, what the message must say
REFUSED: list[tuple[dict[str, object], int | None, list[str]]] = [
    ({"train__steps": 0}, None, ["train.steps = 0", "at least 1"]),
    ({"train__warmup_steps": -1}, None, ["train.warmup_steps = -1", "at least 0"]),
    ({"train__weight_decay": float("nan")}, None, ["train.weight_decay = nan", "at least 0"]),
    ({"data__sequence_tokens": 1}, None, ["data.sequence_tokens = 1", "at least 2"]),
    ({"data__sequence_tokens": 4096}, None, ["data.sequence_tokens = 4096", "longer than model.name = 'demo'", "2048"]),
    ({"model__weights": "runs/demo"}, None, ["model.weights = 'runs/demo'", "data.tokenizer to the tokenizer.json"]),
    (
        {"model__layers": 100_000},
        None,
        ["model.layers = 100000 is beyond the limit", "model.layers to 2048 or less"],
    ),
    ({"model__ffn": 10**15}, None, ["model: ffn x width x experts is", "numbers", "set them lower"]),
    ({"lora__rank": 0}, None, ["lora.rank = 0", "at least 1"]),
    ({"lora__alpha": float("nan")}, None, ["lora.alpha = nan", "above 0"]),
    ({"lora__dropout": 1.0}, None, ["lora.dropout = 1", "at least 0 and below 1"]),
    ({"model__dropout": 1.0}, None, ["model.dropout = 1.0", "at least 0 and below 1"]),
    ({"lora__targets": ()}, None, ["lora.targets is empty", "all-linear"]),
    ({"lora__targets": ("q_prj",)}, None, ["lora.targets: 'q_prj'", "did you mean 'q_proj'?"]),
    (
        {"lora__base": "nf4"},
        None,
        ["lora.base = 'nf4': model.layers.0.mlp.down_proj has 352 inputs", "blocks of 64", "leave lora.base out"],
    ),
    (
        {"lora__base": "nf4", "model__ffn": 384, "model__kv_heads": 4, "plan__tp": 4},
        None,
        ["plan.tp = 4 with lora.base = 'nf4'", "2 blocks of 64", "set plan.tp to 2"],
    ),
    ({"freeze__params": ("*",), "lora__rank": 2}, None, ["freeze with lora", "leave [freeze] out"]),
    ({"freeze__params": ("*",), "model__experts": 4}, None, ["freeze with model.experts = 4", "leave [freeze] out"]),
    ({"freeze__params": ()}, None, ["freeze.params is empty", "leave [freeze] out"]),
    (
        {"freeze__params": ("model.*", "lm_haed.weight"), "model__tied": False},
        None,
        ["freeze.params: 'lm_haed.weight' matches no", "'model.embed_tokens.weight' to 'lm_head.weight'"],
    ),
    ({"freeze__params": ("*",)}, None, ["freeze.params = ['*'] freezes every parameter", "leave one out"]),
    ({"lora__rank": 2, "model__experts": 4}, None, ["lora with model.experts = 4", "leave [lora] out"]),
    (
        {"train__moments": "8bit", "plan__tp": 2},
        None,
        ["train.moments = '8bit' with plan.tp = 2", "amid a block of 256", "plan.tp to 1, or train.moments to bf16"],
    ),
    (
        {"numerics__master": "bf16"},
        None,
        ["numerics.master = 'bf16' with numerics.compute = 'fp32'", "numerics.compute to bf16"],
    ),
    ({"plan__pp": 0}, None, ["plan.pp = 0", "at least 1"]),
    ({"plan__dp": 0}, None, ["plan.dp = 0", "at least 1"]),
    ({"plan__microbatch": 0}, None, ["plan.microbatch = 0", "at least 1"]),
    ({"plan__microbatch_group": -2}, None, ["plan.microbatch_group = -2", "at least 1"]),
    ({"train__decay_steps": 0}, None, ["train.decay_steps = 0", "at least 1"]),
    ({"train__lr": 0.0}, None, ["train.lr = 0.0", "above 0"]),
    ({"train__lr": float("nan")}, None, ["train.lr = nan", "above 0"]),
    ({"observe__peak_flops": -1.0}, None, ["observe.peak_flops = -1.0", "above 0"]),
    ({"train__beta2": 1.0}, None, ["train.beta2 = 1.0", "below 1"]),
    ({"data__media_tokens": 3}, None, ["data.media_tokens = 3", "reads text alone", "leave it out"]),
    ({"data__validation_fraction": -0.1}, None, ["data.validation_fraction = -0.1", "at least 0"]),
    ({"train__min_lr_ratio": 1.5}, None, ["train.min_lr_ratio = 1.5", "between 0 and 1"]),
    ({"observe__profile": (0,)}, None, ["observe.profile = 0", "steps from 1 to train.steps"]),
    ({"observe__sample": ""}, None, ["observe.sample = ''", "at least one character"]),
    ({"observe__sample": "a", "lora__rank": 2}, None, ["observe.sample = 'a'", "[lora]", "leave observe.sample out"]),
    ({"plan__memory": "0"}, None, ["plan.memory = '0' leaves no room for anything", "leave it out for none"]),
    ({"plan__memory": "0.0GiB"}, None, ["plan.memory = '0.0GiB' leaves no room for anything"]),
    ({"plan__memory": "6GB"}, None, ["plan.memory = '6GB' is no size", "such as '6GiB'"]),
    (
        {"plan__recompute": "auto"},
        None,
        ["plan.recompute = 'auto' needs a limit", "set plan.memory", "'none', 'selective' or 'full'"],
    ),
    (
        {"plan__kept": ("all",)},
        None,
        ["plan.kept with plan.recompute = 'none'", "leave plan.kept out", "plan.recompute to 'auto'"],
    ),
    (
        {"plan__recompute": "auto", "plan__memory": "1GiB", "plan__kept": ("all",)},
        None,
        ["plan.kept has 1 entries and the model 6 units", "one for each"],
    ),
    (
        {"plan__recompute": "auto", "plan__memory": "1GiB", "plan__kept": ("all",) * 5 + ("input",)},
        None,
        ["plan.kept of head has 'input'", "choose one of ['all']"],
    ),
    (
        {"plan__recompute": "auto", "plan__memory": "1GiB", "plan__kept": ("all",) * 5 + ("all all all",)},
        None,
        ["plan.kept of head has 3 choices and a step 1 microbatches", "one for all"],
    ),
    (
        {"plan__recompute": "auto", "plan__memory": "1GiB", "plan__activations": ("device", "disk")},
        None,
        ["plan.activations = ['device', 'disk'] with plan.recompute = 'auto'", "give one place"],
    ),
    ({"plan__zero": 4}, None, ["plan.zero = 4", "set plan.zero to one of [0, 1, 2, 3]"]),
    (
        {"numerics__exact": True, "plan__rules": (("ffn", "none"),)},
        None,
        ["numerics.exact = true", "plan.rules = {'ffn': 'none'}", "leave plan.rules out", "numerics.exact = false"],
    ),
    (
        {"model__experts": 4, "plan__rules": (("experts", "none"),)},
        None,
        ["plan.rules.experts = 'none'", "experts alone", "set plan.rules.experts to 'ep'"],
    ),
    ({"model__mtp_weight": 0.0}, None, ["model.mtp_weight = 0.0 must be above 0 and finite"]),
    (
        {"model__mtp_weight": 0.3, "model__experts": 4},
        None,
        ["model.mtp_weight = 0.3 with experts is not supported", "leave model.mtp_weight out"],
    ),
    (
        {"model__mtp_weight": 0.3, "train__loss": "mine.py"},
        None,
        ["train.loss = 'mine.py' with model.mtp_weight = 0.3", "leave one of them out"],
    ),
    ({"model__positions": "sinusoid"}, None, ["model.positions = 'sinusoid' is unknown", "'alibi', 't5', 'relative'"]),
    (
        {"model__positions": "t5", "model__max_distance": 16},
        None,
        ["model.max_distance = 16 must be between 32 and 65536 for model.positions = 't5'"],
    ),
    (
        {"model__name": "gemma2-2b", "model__positions": "alibi"},
        None,
        ["model.positions = 'alibi' in a model with blocks that differ from Llama's", "leave model.positions out"],
    ),
    (
        {"model__name": "gemma3-1b", "model__experts": 4},
        None,
        ["model.experts = 4 in blocks that differ from Llama's", "leave model.experts out"],
    ),
    (
        {"model__name": "qwen3-next-80b-a3b", "model__shared_experts": 0},
        None,
        ["model.shared_experts = 0", "a gate for shared experts", "leave model.shared_experts out"],
    ),
    (
        {"model__name": "qwen3.5-9b", "plan__cp": 2, "data__sequence_tokens": 8},
        None,
        ["plan.cp = 2 cuts data.sequence_tokens = 8 into 4 runs of 2", "reads 3 tokens", "to 12 or more"],
    ),
    (
        {"model__name": "deepseek-v3", "model__experts": 100},
        None,
        ["model.experts = 100 in 8 groups", "set model.experts to 16 or another multiple"],
    ),
    (
        {"model__name": "deepseek-v3", "model__experts": 8, "model__experts_per_token": 2},
        None,
        ["model.experts = 8 in 8 groups", "of two experts or more; set model.experts to 16"],
    ),
    (
        {"model__name": "deepseek-v3", "model__experts_per_token": 200},
        None,
        ["model.experts_per_token = 200 is more than 4 of 8 groups have", "to 128 or less"],
    ),
    (
        {"model__name": "gpt-oss-20b", "model__shared_experts": 1},
        None,
        ["model.shared_experts = 1 with biases of experts", "leave model.shared_experts out"],
    ),
    (
        {"model__name": "olmo2-7b", "model__qk_norm": False},
        None,
        ["model.qk_norm = false: no model family has such blocks; leave it out"],
    ),
    (
        {"model__name": "qwen2.5-0.5b", "model__experts": 4},
        None,
        ["model.experts = 4 with biases on queries, keys and values", "leave model.experts out"],
    ),
    (
        {"model__name": "qwen2.5-0.5b", "model__qk_norm": True},
        None,
        ["model.qk_norm = true with biases on queries, keys and values", "leave model.qk_norm out"],
    ),
    (
        {"plan__cp": 3},
        None,
        ["data.sequence_tokens = 256", "a multiple of 6", "plan.cp = 3", "6 chunks", "set plan.cp to one of [1, 2, 4,"],
    ),
    (
        {"plan__cp": 2, "plan__tp": 2, "data__sequence_tokens": 254},
        None,
        ["= 254 must be a multiple of 4", "4 chunks, and plan.tp = 2 splits two of them", "set plan.cp to one of [1,"],
    ),
    (
        {"plan__cp": 8, "plan__context": "ulysses"},
        None,
        [
            "plan.cp = 8",
            "plan.context = 'ulysses'",
            "4 query and 2 key heads",
            "set plan.cp to one of [1, 2, 4]",
            "plan.context to 'ring'",
        ],
    ),
    (
        {"plan__cp": 2, "plan__tp": 2, "plan__context": "ulysses", "numerics__exact": True},
        None,
        ["plan.cp = 2", "2 query and 1 key heads", "set plan.cp to one of [1]"],
    ),
    (
        {"plan__replicas": 3, "plan__dp": 4, "plan__zero": 1},
        None,
        ["plan.replicas = 3", "plan.dp · plan.cp = 4 ranks", "set plan.replicas to one of [1, 2]"],
    ),
    ({"plan__replicas": 4, "plan__dp": 4, "plan__zero": 1}, None, ["two or more", "to one of [1, 2]"]),
    (
        {"plan__replicas": 2, "plan__dp": 4},
        None,
        ["plan.replicas = 2", "plan.zero = 0", "set plan.replicas to 1, or plan.zero to one of [1, 2, 3]"],
    ),
    (
        {"plan__replicas": 2, "plan__dp": 4, "plan__zero": 1, "plan__ep": 4, "model__experts": 8},
        None,
        [
            "plan.replicas = 2",
            "the 1 ranks that hold the same experts",
            "plan.ep = 4",
            "set plan.replicas to one of [1]",
        ],
    ),
    ({"numerics__exact_chunks": 0}, None, ["numerics.exact_chunks = 0", "at least 1"]),
    (
        {"numerics__exact": True, "numerics__compile": True},
        None,
        ["numerics.exact = true", "numerics.compile = true", "set numerics.compile to false"],
    ),
    (
        {"numerics__exact": True, "numerics__exact_chunks": 12, "data__sequence_tokens": 48},
        None,
        ["numerics.exact_chunks = 12", "48 tokens", "set numerics.exact_chunks to one of [1, 2, 4, 8, 16]"],
    ),
    (
        {"numerics__exact": True, "numerics__exact_chunks": 32, "data__sequence_tokens": 48},
        None,
        ["numerics.exact_chunks = 32", "a power of two that divides the 48 tokens"],
    ),
    (
        {"numerics__exact": True, "plan__cp": 8},
        None,
        ["plan.cp = 8", "numerics.exact = true", "8 parts", "set plan.cp to one of [1, 2, 4]", "numerics.exact_chunks"],
    ),
    (
        {
            "numerics__exact": True,
            "plan__tp": 3,
            "plan__sequence_parallel": False,
            "model__heads": 6,
            "model__kv_heads": 6,
            "model__head_dim": 32,
            "model__ffn": 384,
            "model__vocab": 768,
        },
        None,
        ["plan.tp = 3", "numerics.exact = true", "2 parts", "set plan.tp to one of [1, 2]"],
    ),
    ({"plan__ep": 2}, None, ["plan.ep = 2", "model.name = 'demo' has none", "set plan.ep to 1"]),
    (
        {"model__experts": 6, "plan__ep": 4, "plan__dp": 4},
        None,
        ["plan.ep = 4", "model.experts = 6", "= 4 ranks", "set plan.ep to one of [1, 2]"],
    ),
    ({"plan__pp": 5}, None, ["= 5 stages", "model.layers = 4", "set plan.pp to one of [1, 2, 3, 4]"]),
    ({"plan__pp": 4, "plan__chunks": 2}, None, ["= 8 stages", "set plan.pp to one of [1, 2]"]),
    ({"plan__pp": 2, "plan__chunks": 5}, None, ["= 10 stages", "set plan.chunks to one of [1, 2]"]),
    ({"plan__pp": 9, "plan__chunks": 5}, None, ["= 45 stages", "set plan.chunks to one of [1]"]),
    (
        {"plan__schedule": "1f1b", "plan__chunks": 2},
        None,
        [
            "plan.schedule = '1f1b'",
            "plan.chunks = 2",
            "set plan.chunks to 1",
            "'interleaved' or 'breadth-first'",
        ],
    ),
    (
        {"plan__schedule": "zb-h1", "plan__chunks": 2},
        None,
        ["plan.schedule = 'zb-h1'", "one stage", "plan.chunks = 2", "set plan.chunks to 1"],
    ),
    (
        {"plan__schedule": "zb-v", "plan__pp": 2},
        None,
        ["plan.schedule = 'zb-v'", "two stages", "plan.chunks = 1", "set plan.chunks to 2"],
    ),
    (
        {"plan__schedule": "zb-v", "plan__chunks": 2, "model__layers": 1},
        None,
        ["plan.schedule = 'zb-v'", "model.layers = 1", "set model.layers to 2"],
    ),
    (
        {"plan__schedule": "zb-h1", "numerics__compile": True},
        None,
        ["plan.schedule = 'zb-h1'", "numerics.compile = true", "set numerics.compile to false", "or", "'1f1b'"],
    ),
    (
        {"plan__schedule": "zb-v", "plan__chunks": 2, "plan__microbatch": 4, "plan__microbatch_group": 2},
        None,
        ["plan.microbatch_group = 2", "plan.schedule = 'zb-v'", "leave it out"],
    ),
    (
        {"plan__pp": 2, "plan__stages": (2, 3)},
        None,
        ["plan.stages = [2, 3]", "2 numbers", "6 units", "4 blocks", "set plan.stages to [4, 2]"],
    ),
    ({"plan__pp": 2, "plan__stages": (6,)}, None, ["plan.stages = [6]", "set plan.stages to [4, 2]"]),
    ({"plan__pp": 2, "plan__stages": (6, 0)}, None, ["plan.stages = [6, 0]", "at least 1"]),
    ({"plan__pp": 2, "plan__stages": ()}, None, ["plan.stages = []", "leave it out"]),
    ({"plan__pp": 3}, 4, ["plan.pp · plan.cp · plan.tp = 3", "4 launched ranks", "a product among [1, 2, 4]"]),
    ({"plan__dp": 2, "plan__pp": 2}, 8, ["= 4 ranks", "8 are launched", "leave plan.dp out"]),
    (
        {"plan__dp": 3},
        None,
        [
            "train.batch_sequences = 16",
            "plan.dp = 3",
            "set plan.dp to one of [1, 2, 4, 8, 16]",
            "a multiple of 3",
        ],
    ),
    (
        {"plan__microbatch": 3, "plan__dp": 2},
        None,
        ["plan.microbatch = 3", "8 sequences", "set plan.microbatch to one of [1, 2, 4, 8]"],
    ),
    (
        {"plan__microbatch_group": 2},
        None,
        ["plan.microbatch_group = 2", "plan.schedule = '1f1b'", "leave it out", "'breadth-first'"],
    ),
    (
        {"plan__pp": 2, "plan__chunks": 2, "plan__microbatch": 16},
        None,
        ["plan.pp = 2", "plan.chunks = 2", "there are 1", "train.batch_sequences to a multiple of 32"],
    ),
    (
        {"plan__pp": 2, "plan__chunks": 2, "plan__microbatch": 1, "plan__microbatch_group": 3},
        None,
        [
            "plan.microbatch_group = 3",
            "16 microbatches",
            "least 2",
            "set plan.microbatch_group to one of [2, 4, 8, 16]",
        ],
    ),
    ({"plan__tp": 4}, None, ["model.kv_heads = 2", "plan.tp = 4", "set plan.tp to one of [1, 2]"]),
    (
        {"plan__tp": 2, "data__sequence_tokens": 255},
        None,
        ["data.sequence_tokens = 255", "plan.tp = 2", "set plan.tp to one of [1]"],
    ),
    (
        {"plan__rules": (("fnn", "none"),)},
        None,
        ["plan.rules.fnn = 'none'", "no parameter of the model has an axis 'fnn'", "did you mean 'ffn'?"],
    ),
    (
        {"plan__rules": (("ffn", "ep"),)},
        None,
        ["plan.rules.ffn = 'ep'", "experts alone", "set plan.rules.ffn to 'tp' or 'none'"],
    ),
    (
        {"plan__rules": (("embed", "tp"),)},
        None,
        [
            "model.embed_tokens.weight",
            "plan.rules.vocab = 'tp' cuts its dim 0",
            "plan.rules.embed = 'tp' its dim 1",
            "set plan.rules.embed to 'none'",
        ],
    ),
    (
        {"plan__rules": (("embed", "tp"), ("vocab", "none"))},
        None,
        ["model.embed_tokens.weight", "plan.rules.embed = 'tp' cuts its dim 1 ('embed', 128)", "rows of embeddings"],
    ),
    (
        {"plan__rules": (("norm", "tp"),)},
        None,
        [
            "model.layers.0.input_layernorm.weight",
            "plan.rules.norm = 'tp' cuts its dim 0 ('norm', 128)",
            "set plan.rules.norm to 'none'",
        ],
    ),
    (
        {"plan__rules": (("kv_heads", "none"),)},
        None,
        [
            "model.layers.0.self_attn.k_proj.weight",
            "plan.rules.kv_heads = 'none'",
            "plan.rules.heads = 'tp'",
            "set plan.rules.kv_heads to 'tp', or both to 'none'",
        ],
    ),
    (
        {"plan__tp": 2, "plan__rules": (("heads", "none"), ("kv_heads", "none"))},
        None,
        ["plan.rules.heads = 'none'", "plan.sequence_parallel = true", "set plan.sequence_parallel to false"],
    ),
    (
        {"plan__tp": 2, "model__ffn": 353},
        None,
        ["model.ffn = 353", "plan.tp = 2", "set plan.tp to one of [1], or plan.rules.ffn to 'none'"],
    ),
    (
        {
            "plan__tp": 2,
            "plan__sequence_parallel": False,
            "plan__rules": (("ffn", "none"), ("heads", "none"), ("kv_heads", "none"), ("vocab", "none")),
        },
        None,
        ["plan.tp = 2", "no parameter of the model has an axis with a rule 'tp'", "set plan.tp to 1"],
    ),
    ({"model__name": "lama3-8b"}, None, ["model.name = 'lama3-8b'", "did you mean 'llama3-8b'?"]),
    ({"model__name": "zzz"}, None, ["model.name = 'zzz'", "choose one of tiny, demo"]),
    ({"model__width": 130}, None, ["model.width = 130", "model.heads = 4", "set model.head_dim"]),
    ({"model__norm_group": 4}, None, ["model.norm_group = 4", "the decoder has no batch norm", "leave it out"]),
    ({"model__layers": 0}, None, ["model.layers = 0", "at least 1"]),
    (
        {"model__kv_heads": 3},
        None,
        ["model.kv_heads = 3", "model.heads = 4", "set model.kv_heads to one of [1, 2, 4]"],
    ),
    ({"model__head_dim": 33}, None, ["model.head_dim = 33", "even", "set model.head_dim to 34"]),
    ({"model__experts": 0}, None, ["model.experts = 0", "at least 1"]),
    (
        {"model__z_weight": 0.1},
        None,
        ["model.z_weight = 0.1", "model.name = 'demo' has none", "set model.experts to 8"],
    ),
    (
        {"model__experts": 8, "model__router": "best"},
        None,
        ["model.router = 'best'", "set model.router to one of 'dropless', 'sigmoid', 'switch', 'top2', 'noisy-topk'"],
    ),
    (
        {"model__experts": 8, "model__router": "switch", "model__experts_per_token": 2},
        None,
        ["model.experts_per_token = 2", "model.router = 'switch'", "set model.experts_per_token to 1"],
    ),
    (
        {"model__experts": 4, "model__experts_per_token": 5},
        None,
        ["model.experts = 4", "too few", "model.experts_per_token = 5", "set model.experts to 5"],
    ),
    (
        {"model__experts": 4, "model__experts_per_token": 4, "model__router": "noisy-topk"},
        None,
        ["model.experts = 4", "model.router = 'noisy-topk'", "set model.experts to 5"],
    ),
    (
        {"model__experts": 8, "model__router": "top2", "model__renormalise": False},
        None,
        ["model.renormalise = false", "model.router = 'top2'", "leave it out, or choose 'dropless'"],
    ),
    (
        {"model__experts": 8, "model__capacity_factor": 2.0},
        None,
        ["model.capacity_factor = 2.0", "model.router = 'dropless'", "leave it out, or choose 'switch' or 'top2'"],
    ),
    (
        {"model__experts": 8, "model__router": "switch", "model__capacity_factor": 0.0},
        None,
        ["model.capacity_factor = 0.0", "above 0"],
    ),
    ({"model__experts": 8, "model__balance_weight": -1.0}, None, ["model.balance_weight = -1.0", "at least 0"]),
]
