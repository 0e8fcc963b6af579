"""Experiments in small: tuning against all settings tried by hand, floors against a scan, a report with all in it."""

import json
import re
from dataclasses import replace

import pytest

from cli.simulate.baselines import family
from cli.simulate.deadlines import Deadlines
from cli.simulate.experiments import (
    TUNING_SEEDS,
    Cell,
    Job,
    Pooled,
    Progress,
    Runner,
    Span,
    Wanted,
    fixed,
    floor,
    run,
    tune,
)
from cli.simulate.report import render
from cli.simulate.stats import interpolated

TINY = Span(warm_up_s=10.0, measured_s=30.0, cool_down_s=5.0)
POLICIES = ("sticky", "vllm-priority", "round-robin", "edf-true-sizes")
CELL = Cell(workload="coding", deadlines=Deadlines.OWN, fleet="homogeneous", load=6.0)
WANTED = Wanted(workloads=("coding",), loads=(6.0,), policies=POLICIES, seeds=3, span=TINY)


@pytest.fixture(scope="module")
def document():
    with Runner(processes=1) as runner:
        return fixed(WANTED, runner)


def test_tuning_takes_the_setting_with_the_fewest_dollars_per_success():
    with Runner(processes=1) as runner:
        tuned = tune(runner, CELL, ("sticky", "vllm-priority"), TINY)
    for name in tuned:
        costs = []
        for index in range(len(family(name).configs)):
            runs = [
                run(Job(cell=CELL, policy=name, config=index, seed=seed, span=TINY))
                for seed in TUNING_SEEDS
            ]
            successes = sum(outcome.successes for outcome in runs)
            costs.append(sum(outcome.fleet_usd for outcome in runs) / successes)
        assert tuned[name] == (costs.index(min(costs)), pytest.approx(min(costs)))
        if name == "vllm-priority":
            assert len(set(costs)) > 1


def test_the_baseline_to_beat_was_best_in_tuning_and_is_no_reference(document):
    cells = {cell["policy"]: cell for cell in document["cells"]}
    assert set(cells) == set(POLICIES)
    (best,) = {cell["best_baseline"] for cell in cells.values()}
    assert best in {"sticky", "vllm-priority"}
    assert cells[best]["cpst_ratio_to_best_baseline"]["ci95"] == [1.0, 1.0]
    worst = cells["round-robin"]
    ratio = worst["cpst_ratio_to_best_baseline"]["value"]
    assert ratio == pytest.approx(worst["cpst_usd"] / cells[best]["cpst_usd"], rel=1e-4)
    assert ratio > 1.0


def test_dollars_add_up_and_nothing_leaks(document):
    for cell in document["cells"]:
        assert cell["leaks"] == 0
        assert cell["fleet_usd"] == pytest.approx(3 * 30 / 3_600 * 52.0)
        assert cell["seeds"] == 3
        # Workflows that are measured end long after the measured time that is paid.
        assert cell["wasted_usd"]["idle"] >= -1e-9
        assert cell["cpst_usd"] * cell["success_ratio"] > 0.0


def test_the_same_arguments_give_the_same_document_in_any_number_of_processes(document):
    with Runner(processes=2, progress=Progress(report=lambda *_: None)) as runner:
        again = fixed(WANTED, runner)
    for each in (document, again):
        json.dumps(each, allow_nan=False)
    assert json.dumps(again["cells"]) == json.dumps(document["cells"])
    assert json.dumps(again["bounds"]) == json.dumps(document["bounds"])


def test_no_policy_is_cheaper_than_the_bound(document):
    (bound,) = document["bounds"].values()
    assert bound["L1"]["cpst_usd"] > 0.0
    assert all(distance >= 0.0 for distance in bound["distance"].values())


@pytest.fixture(scope="module")
def floors():
    wanted = replace(WANTED, loads=(1.0,), policies=("sticky", "round-robin"), seeds=2)
    with Runner(processes=1) as runner:
        return floor(wanted, runner, 0.9)


def test_a_floor_is_where_the_fleet_first_holds_it(floors):
    for cell in floors["cells"]:
        assert cell["fleet_usd_at_floor"] == pytest.approx(
            interpolated([tuple(point) for point in cell["curve"]], 0.9), rel=1e-4
        )
        # The curve is what runs of those fleets give.
        usd, in_time = cell["curve"][0]
        sizes = replace(CELL, load=1.0, engines=round(usd / 13.0))
        config = [each.label for each in family(cell["policy"]).configs].index(cell["config"])
        jobs = [
            Job(cell=sizes, policy=cell["policy"], config=config, seed=seed, span=TINY)
            for seed in (11, 12)
        ]
        pooled = Pooled(outcomes=tuple(run(job) for job in jobs))
        assert in_time == pytest.approx(pooled.in_time_ratio, abs=1e-5)
        assert cell["curve"][-1][1] >= 0.9
    (bound,) = floors["bounds"].values()
    assert all(distance >= 0.0 for distance in bound["distance"].values())


def test_progress_counts_every_run_once():
    seen = []
    progress = Progress(report=lambda done, total, what: seen.append((done, total, what)))
    job = Job(cell=CELL, policy="sticky", config=0, seed=1, span=TINY)
    with Runner(processes=1, progress=progress) as runner:
        runner.play([job, job, replace(job, seed=2)])
        runner.play([job])
    assert [(done, total) for done, total, _ in seen] == [(1, 2), (2, 2)]


def test_the_report_holds_everything_itself(document, floors):
    days = [
        {
            "policy": "headway",
            "engines_on_by_minute": [2, 3, 3],
            "fleet_usd_by_minute": [1.0, 1.5, 1.5],
        }
    ]
    text = render(
        {
            "cells": [*document["cells"], *floors["cells"]],
            "bounds": document["bounds"],
            "timings": document["timings"],
            "days": days,
        }
    )
    for policy in POLICIES:
        assert policy in text
    assert "headway: $4" in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)\s*=\s*[\"']?https?:", text)
    assert text.count("Plotly.newPlot(") >= 6
    assert render({"cells": []}).startswith("<!doctype html>")
