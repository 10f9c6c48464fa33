"""The torch dtypes of a run's configuration."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from superstep.plan.config import Dtype

DTYPES: Mapping[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
