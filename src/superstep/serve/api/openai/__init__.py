"""OpenAI's endpoints (chat and text completions, models), as its official client speaks to them."""
