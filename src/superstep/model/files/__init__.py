"""Weights and adapters in the files of Hugging Face and PEFT."""
