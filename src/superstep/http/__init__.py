"""What every HTTP server shares: limits, keys, the Host header, errors as JSON, server-sent events, draining."""
