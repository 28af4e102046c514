import torch

from megadiff.observe import utilisation as module
from megadiff.observe.utilisation import peak_tflops, utilisation


def test_rates_take_the_place_of_work():
    metrics = {"perf/tflop_rollout": 30.0, "perf/tflop_train": 8.0, "time/rollout_s": 3.0}
    rated = utilisation(metrics | {"time/train_s": 4.0, "reward/mean": 0.5}, peak=20.0)
    assert rated == {
        "time/rollout_s": 3.0,
        "time/train_s": 4.0,
        "reward/mean": 0.5,
        "perf/tflops_rollout": 10.0,
        "perf/tflops_train": 2.0,
        "perf/mfu_rollout": 0.5,
        "perf/mfu_train": 0.1,
    }


def test_stages_in_fp8_have_a_share_of_fp8s_peak_as_well():
    """Which is twice bfloat16's."""
    metrics = {"perf/tflop_rollout": 30.0, "perf/tflop_train": 8.0, "time/rollout_s": 3.0}
    rated = utilisation(metrics | {"time/train_s": 4.0}, peak=20.0, in_fp8=["train"])
    assert rated["perf/mfu_train"] == 0.1 and rated["perf/mfu_fp8_train"] == 0.05
    assert "perf/mfu_fp8_rollout" not in rated


def test_without_a_peak_or_seconds_there_is_no_share():
    assert utilisation({"perf/tflop_train": 8.0, "time/train_s": 4.0}, None) == {
        "time/train_s": 4.0,
        "perf/tflops_train": 2.0,
    }
    assert utilisation({"perf/tflop_train": 8.0}, 20.0) == {}


def test_the_longer_name_is_looked_at_first(monkeypatch):
    cuda = torch.device("cuda")
    names = {
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA H100 80GB HBM3": 989.4,
        "NVIDIA H200 NVL": 835.0,
        "NVIDIA H200": 989.4,
        "Another": None,
    }
    for name, peak in names.items():
        monkeypatch.setattr(module.torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_tflops(cuda) == peak
    assert peak_tflops(torch.device("cpu")) is None


def test_tokens_and_images_become_rates_of_their_stage():
    counts = {"perf/tokens_rollout": 90.0, "perf/tokens_train": 60.0, "perf/images": 12.0}
    seconds = {"time/rollout_s": 3.0, "time/train_s": 2.0}
    assert utilisation(counts | seconds, None) == seconds | {
        "perf/tokens_per_s_rollout": 30.0,
        "perf/tokens_per_s_train": 30.0,
        "perf/images_per_s": 4.0,
    }
    assert utilisation(counts, None) == {}
