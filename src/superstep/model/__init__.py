"""The decoder in plain torch for one device; LoRA modules, mixtures of experts with their routers, users' models.

``decoder.py`` is the model, ``axes.py`` names its axes, ``hf.py`` reads Hugging Face weights.
"""
