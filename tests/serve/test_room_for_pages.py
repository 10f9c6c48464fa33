"""Pages that have no room are refused with a context that fits, and never with none."""

from __future__ import annotations

import pytest

from superstep.errors import ConfigError
from superstep.serve.load_rank import require_pages


def test_a_context_that_fits_is_named_where_there_is_one():
    require_pages(10, 1000, 10_000, 16)
    with pytest.raises(ConfigError, match=r"set serve\.context_tokens to 64 or less"):
        require_pages(10, 1000, 9_999, 16)
    for free_bytes in (1_999, 0):
        with pytest.raises(ConfigError, match=r"too little for any context: .* serve\.tp higher") as refused:
            require_pages(10, 1000, free_bytes, 16)
        assert "context_tokens" not in str(refused.value)
