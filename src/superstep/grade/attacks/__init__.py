"""Attacks on graders: answers that are wrong, and what it shows when a grader pays for one."""
