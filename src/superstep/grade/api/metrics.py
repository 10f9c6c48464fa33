"""GradeMetrics: counters of the graders for Prometheus."""

from __future__ import annotations

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from superstep.grade.verdict import Kind, Verdict

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0)


class GradeMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.verdicts = Counter("superstep:grades", "Grades, by verdict.", ["verdict"], registry=self.registry)
        self.retries = Counter(
            "superstep:grade_retries", "Times that a grader failed and was asked again.", registry=self.registry
        )
        self.refused = Counter(
            "superstep:grade_requests_refused", "Requests that were not answered.", ["status"], registry=self.registry
        )
        self.running = Gauge("superstep:grades_running", "Grades under way or waiting.", registry=self.registry)
        self.seconds = Histogram(
            "superstep:grade_seconds", "From a rollout to its verdict.", registry=self.registry, buckets=SECONDS
        )
        for kind in get_args(Kind):  # so that all of them are there from the start
            self.verdicts.labels(kind)

    def count_retry(self, verdict: Verdict) -> None:
        self.retries.inc()

    def count_grade(self, verdict: Verdict, seconds: float) -> None:
        self.verdicts.labels(verdict.kind).inc()
        self.seconds.observe(seconds)
