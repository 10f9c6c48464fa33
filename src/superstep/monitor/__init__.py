"""What each rank does now: status pages, the flight recorder, hang detection, rank inspection from outside."""
