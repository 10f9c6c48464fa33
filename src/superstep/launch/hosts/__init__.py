"""Several hosts: membership and heartbeat, the coordinator, its secure channel, copies of state between hosts."""
