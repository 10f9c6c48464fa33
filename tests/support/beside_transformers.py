"""Models of more than text beside transformers: their folders, logits and gradients."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from superstep.cli.main import main
from superstep.plan.config import DataConfig, ModelConfig, RunConfig

IMPORTS = """
from superstep.plan.config import DataConfig, ModelConfig, RunConfig
from superstep.plan.model.multimodal.families import read_multimodal
"""


def save_randomly(model, folder):
    """Give a model of transformers random weights, and save it in its folder."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


def run_of(folder):
    """A run on the model of a folder."""
    return RunConfig(model=ModelConfig(name=str(folder / "config.json")), data=DataConfig(source="samples.py"))


def read_encoder_of(samples, name):
    """A file of samples whose encoder is that of the folder hf: the shape NAME, which stands before DECODER."""
    config = 'RunConfig(model=ModelConfig(name="hf/config.json"), data=DataConfig(source="x"))'
    start, end = samples.index(f"{name.upper()} = "), samples.index("DECODER = ")
    text = f"{samples[:start]}{name.upper()} = read_multimodal({config}).{name}\n{samples[end:]}"
    return text.replace("import torch\n", f"import torch\n{IMPORTS}", 1)


def go_back_alike(logits, wanted):
    """Both logits are the same, and both models have the gradients of the same loss."""
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=2e-5)
    factors = torch.randn_like(wanted)
    for each in (logits, wanted):
        (each * factors).sum().backward()


def assert_gradient(parameter, gradient, name):
    largest = float(gradient.abs().max())
    torch.testing.assert_close(parameter.grad, gradient, atol=2e-5 * largest, rtol=2e-5, msg=name)


def train_from_folder(source):
    """Take a step that changes nothing from the folder hf, in the place of the model's file: the checkpoint, and the
    tensors that it has unchanged.
    """
    text = Path("run.toml").read_text()
    Path("run.toml").write_text(text.replace(f'source = "{source}"', 'name = "hf/config.json"\nweights = "hf"', 1))
    assert main(["train", "run.toml", "--train.steps", "1", "--train.lr", "1e-38", "--state.save-every", "1"]) == 0
    (checkpoint,) = Path("run/checkpoints").iterdir()
    before, after = load_file("hf/model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return checkpoint, before
