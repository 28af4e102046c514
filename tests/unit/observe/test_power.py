import time

import pytest
import torch

from megadiff.observe.power import PowerMeter, power_meter


def test_power_is_energy_over_time_since_the_last_call(monkeypatch):
    now = [100.0]
    joules = [5e6]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    meter = PowerMeter(lambda: joules[0])
    for watts in (700.0, 90.0):
        now[0] += 4
        joules[0] += 4 * watts
        assert meter.pop() == pytest.approx(watts)
    now[0] += 1
    joules[0] = 3.0  # the driver was loaded again
    assert meter.pop() == 0
    now[0] += 1
    joules[0] = None  # once it does not say
    assert meter.pop() == 0
    now[0] += 1
    joules[0] = 1403.0
    assert meter.pop() == pytest.approx(700)


def test_a_cpu_has_no_meter():
    assert power_meter(torch.device("cpu")) is None
