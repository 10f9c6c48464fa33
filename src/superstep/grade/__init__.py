"""Grading of answers: environments, graders as values, verdicts; processes that cannot hurt the trainer."""
