"""Prometheus' text format, read by its own parser; and what a counted moment costs."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from engine.api.metrics import Family, text
from engine.metrics import BOUNDS, Counter, Durations, Histogram


def test_labels_are_escaped() -> None:
    odd = 'a"b\\c\nd é'
    found = text([Family("x", "gauge", "Help.", [("", {"one": odd, "two": ""}, 1.5)])])
    (family,) = text_string_to_metric_families(found.decode())
    assert (family.name, family.type, family.documentation) == ("x", "gauge", "Help.")
    (sample,) = family.samples
    assert sample.labels == {"one": odd, "two": ""} and sample.value == 1.5


def test_a_family_without_samples_is_left_out() -> None:
    assert text([Family("x", "histogram", "Help.", []), Family("y", "gauge", "Y.", [("", {}, True)])]) == (
        b"# HELP y Y.\n# TYPE y gauge\ny 1\n"
    )


def test_buckets_have_what_is_at_most_their_bound() -> None:
    histogram = Histogram()
    for seconds in (0.0, BOUNDS[0], 0.006, 1.0, 11.0):
        histogram.add(seconds)
    found = dict(histogram.buckets())
    assert found["0.005"] == 2 and found["0.01"] == 3 and found["0.5"] == 3 and found["1"] == 4
    assert found["10"] == 4 and found["+Inf"] == 5 and histogram.sum == 12.011
    assert [float(bound) for bound in found][:-1] == list(BOUNDS)


def test_durations_and_counters() -> None:
    durations = Durations("start")
    durations.since("start", time.monotonic() - 3)
    durations.since("other", time.monotonic())
    assert durations.by_value["start"].sum >= 3 and durations.by_value["other"].counts[0] == 1
    counter = Counter()
    counter.add()
    counter.add(number=2)
    assert counter.counts == {"": 3} and counter.total == 3
    reasons = Counter("a", "b")
    reasons.add("b")
    reasons.add("c")
    assert reasons.counts == {"a": 0, "b": 1, "c": 1}
