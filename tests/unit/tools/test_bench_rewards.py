"""The benchmark of rewards as it is called, with few pictures; its GPU parts on a CPU, tiny."""

import json

import bench_rewards
import pytest
import random_llava
from transformers import AutoProcessor


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_threads_of_its_own_hide_a_slow_judge(capsys):
    bench_rewards.measure_scorer(is_tiny=True)
    own, fewer, shared, ratio, *rollouts = lines(capsys.readouterr().out)
    assert (own["own_threads"], fewer["own_threads"], shared["shared_threads"]) == (64, 32, 2)
    # 32 pictures of 0.05 s, two at a time
    assert shared["s_after_last_sample"] >= 0.8
    expected = shared["s_after_last_sample"] / own["s_after_last_sample"]
    assert ratio["times_as_fast"]["64"] == pytest.approx(expected, abs=0.2) and expected > 1
    assert [row["pictures"] for row in rollouts] == [32, 32]
    for row in rollouts:
        assert row["rollout_s"] >= 2 and row["s_after_last_sample"] < row["rollout_s"]


def test_a_part_that_takes_too_long_is_ended_and_keeps_its_figures(capfd):
    assert bench_rewards.main(["--gpu", "--tiny", "--parts", "clip", "--limit-s", "0.5"]) == 1
    machine, failed = lines(capfd.readouterr().out)
    assert machine["part"] == "machine" and machine["cpu"]
    assert failed["part"] == "clip" and failed["failed"] == "took longer than 0.5 s"


def test_clip_is_measured(capsys):
    bench_rewards.measure_clip(is_tiny=True)
    rows = [row for row in lines(capsys.readouterr().out) if "batch" in row]
    assert [row["batch"] for row in rows] == [16, 16, 64, 64]
    for row in rows:
        assert row["images_per_s"] == pytest.approx(row["batch"] / row["seconds"], rel=0.01)


def test_a_random_judge_reads_yes_no_and_pictures(tmp_path):
    folder = tmp_path / "llava"
    assert random_llava.write_llava(folder, is_tiny=True) > 200_000
    processor = AutoProcessor.from_pretrained(folder)
    tokenizer = processor.tokenizer
    for word in random_llava.WORDS:
        assert len(tokenizer.encode(word)) == len(tokenizer.encode(f" {word}")) == 1
    assert tokenizer.decode(tokenizer.encode("a red cup? 是")) == "a red cup? 是"
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Is it?"}]}
    text = processor.apply_chat_template([message], add_generation_prompt=True)
    assert text == "<s>USER: <image>\nIs it? ASSISTANT:"
