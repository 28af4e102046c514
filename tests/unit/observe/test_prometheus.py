"""metrics.prom is what Prometheus reads, and as many figures as metrics.jsonl has."""

import logging
import math

from prometheus_client.parser import text_string_to_metric_families

from megadiff.observe.prometheus import PROM_NAME, PromTracker

METRICS = {
    "time/rollout_s": 1.5,
    "reward/a.b/group_std": math.nan,
    "perf/replica_idle_share": 0.25,
    "perf/replica_idle_share/replica_0": 0.1,
    "perf/replica_idle_share/replica_1": 0.4,
}


def test_the_last_step_is_there_with_every_figure(tmp_path):
    run = tmp_path / "a run"
    run.mkdir()
    tracker = PromTracker(run)
    tracker.log(3, {"time/rollout_s": 9.0})
    assert "megadiff_run_time_rollout_s" in (run / PROM_NAME).read_text()
    tracker.log(4, METRICS)  # right behind: it is written at the end
    tracker.close()
    text = (run / PROM_NAME).read_text()
    samples = []
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge" and family.documentation
        samples += family.samples

    assert len(samples) == len(METRICS) + 2
    assert all(sample.labels["run"] == "a run" for sample in samples)
    values = {(s.name, s.labels.get("replica")): s.value for s in samples}
    assert values["megadiff_run_step", None] == 4
    assert values["megadiff_run_time_rollout_s", None] == 1.5
    assert math.isnan(values["megadiff_run_reward_a_b_group_std", None])
    assert values["megadiff_run_perf_replica_idle_share", None] == 0.25
    assert values["megadiff_run_perf_replica_idle_share_of", "replica_1"] == 0.4
    assert [path.name for path in run.iterdir()] == [PROM_NAME]  # nothing half-written


def test_two_keys_of_one_clean_name_are_one_family(tmp_path):
    tracker = PromTracker(tmp_path)
    tracker.log(1, {"reward/clip-l": 0.5, "reward/clip.l": 0.7})
    tracker.close()
    text = (tmp_path / PROM_NAME).read_text()
    assert text.count("# TYPE megadiff_run_reward_clip_l ") == 1
    assert "megadiff_run_reward_clip_l{" in text and " 0.5\n" in text


def test_a_file_that_cannot_be_written_warns_once(tmp_path, caplog):
    run = tmp_path / "gone"
    tracker = PromTracker(run)
    with caplog.at_level(logging.WARNING):
        tracker.log(1, METRICS)
        tracker.log(2, METRICS)
        tracker.close()
    assert len(caplog.records) == 1
