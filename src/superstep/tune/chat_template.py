"""The chat template of a tuned model: its own, another, or a default without special tokens."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from superstep.data.tokenizer import Tokenizer
from superstep.errors import ConfigError
from superstep.serve.text.chat_template import DEFAULT, ChatTemplate, load_chat_template

PLAIN = (
    "{% for message in messages %}"
    "{{ message.role | capitalize }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""The server's default template, with the end of text after an answer, so that it can be learnt."""


def template_of(folder: Path, tokenizer: Tokenizer, named: str | None) -> ChatTemplate:
    """The template to tune with.

    Args:
        folder: of the initial model.
        tokenizer: of that model.
        named: a template file that replaces the folder's.

    Raises:
        ConfigError: it cannot be read.
    """
    if find_spec("jinja2") is None:
        raise ConfigError("conversations are shown by jinja2, which is not installed: pip install 'superstep[serve]'.")
    template = load_chat_template(folder)
    sources = template.sources if template.source() != DEFAULT else {"default": PLAIN}
    if named is not None:
        try:
            sources = {"default": Path(named).read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"sft.template = '{named}' cannot be read ({error}); name a Jinja file in UTF-8."
            ) from None
    end = tokenizer.core.id_to_token(tokenizer.end_of_text)
    made = ChatTemplate(sources, {"eos_token": end or "", **template.special})
    made.check()
    return made
