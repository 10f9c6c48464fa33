"""The engine's state of a request: its tokens, its pages and its results so far."""

from __future__ import annotations

from collections.abc import Sequence

from superstep.serve.scheduling.kv_pages import page_keys, root_key
from superstep.serve.scheduling.lora_registry import NONE, ChosenAdapter
from superstep.serve.scheduling.request import Finish, Request


class LiveRequest:
    """The engine's own record of a request; the scheduler and ``check`` read it.

    Args:
        request: the request.
        order: number of requests before it.
        page_tokens: positions of a page.
        end_of_text: the model's tokens that end an answer.
        context_tokens: the most tokens, prompt and answer together.
        adapter: of the request.

    Attributes:
        drafts: wanted draft positions after its known tokens.
        guessed: the draft tokens of a step.
        prompt_reported: tokens of the prompt that were reported, if requested; the first has no log-probability.
        is_mixed: whether its keys come from several weights. Such pages are not shared.
    """

    def __init__(
        self,
        request: Request,
        *,
        order: int,
        page_tokens: int,
        end_of_text: Sequence[int],
        context_tokens: int,
        adapter: ChosenAdapter = NONE,
    ) -> None:
        self.request = request
        self.adapter = adapter
        self.order = order
        self.tokens = list(request.prompt)
        self.computed = 0
        self.pages: tuple[int, ...] = ()
        self.drafts = 0
        self.guessed: tuple[int, ...] = ()
        self.cached_tokens = 0
        self.prompt_reported = 1
        self.is_mixed = False
        self._page_tokens = page_tokens
        self._ends = set(request.sampling.stop_tokens) | (set() if request.sampling.ignore_eos else set(end_of_text))
        self._room = min(request.sampling.max_tokens, context_tokens - len(request.prompt))
        self._keys: list[bytes] = []
        self._root = b""
        self._version = ""

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def known(self) -> int:
        """Tokens of the prompt and the answer so far."""
        return len(self.tokens)

    @property
    def left(self) -> int:
        """Tokens that may still be drawn."""
        return self._room - (self.known - len(self.request.prompt))

    @property
    def drawn(self) -> Sequence[int]:
        """The answer so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def urgency(self) -> tuple[int, int]:
        """The sort key of requests: the smallest goes first."""
        return self.request.priority, self.order

    def keys(self, version: str) -> list[bytes]:
        """The keys of its full pages, under these weights."""
        if version != self._version:
            self._keys, self._version = [], version
            self._root = root_key(version, self.adapter.version, self.request.salt)
        self._keys = page_keys(self._root, self.tokens, self._page_tokens, known=self._keys)
        return self._keys

    def page_keys(self) -> Sequence[bytes]:
        """Keys of the pages that it may share: at least one token is computed, to draw the next from."""
        if self.request.sampling.prompt_logprobs:
            return ()
        return self.keys(self._version)[: (self.known - 1) // self._page_tokens]

    def began(self, version: str) -> None:
        """Set the version of the weights for the prefix cache."""
        self.keys(version)

    def restart(self) -> None:
        """Reset after preemption: it keeps its tokens."""
        self.computed, self.pages, self.drafts, self.guessed, self.is_mixed = 0, (), 0, (), False

    def take(self, token: int) -> Finish | None:
        """Add a token to the answer; the finish reason if it is the last."""
        self.tokens.append(token)
        if token in self._ends:
            return "stop"
        return "length" if self.left <= 0 else None
