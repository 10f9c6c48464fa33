"""Engines in processes of their own: their worker, their client, and the load balancer over several."""
