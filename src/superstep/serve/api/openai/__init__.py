"""OpenAI's endpoints, as its official client speaks to them."""
