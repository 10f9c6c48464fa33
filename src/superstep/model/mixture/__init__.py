"""A mixture of experts: routers, experts, and how tokens are sent to them."""
