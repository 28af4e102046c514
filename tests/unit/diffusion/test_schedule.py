"""Golden values, and the schedule of diffusers' own scheduler."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from megadiff.diffusion.schedule import (
    check_window,
    qwen_image_shift,
    qwen_image_sigmas,
    static_sigmas,
)
from megadiff.types import Sampling

CONFIG = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
}
GOLDEN_WAN = [1, 0.978, 0.952, 0.921, 0.882, 0.833, 0.769, 0.682, 0.556, 0.357, 0]


@pytest.mark.parametrize("num_steps", [1, 2, 10, 50])
@pytest.mark.parametrize("num_tokens", [16, 1024, 8192])
def test_qwen_image_equals_diffusers(num_steps, num_tokens):
    scheduler = FlowMatchEulerDiscreteScheduler(time_shift_type="exponential", **CONFIG)
    mu = 0.5 + (num_tokens - 256) * 0.4 / (8192 - 256)
    if num_steps == 1:  # diffusers divides 0 by 0 when it stretches a single sigma
        assert qwen_image_sigmas(1, num_tokens=num_tokens, scheduler_config=CONFIG).tolist() == [
            1.0,
            0.0,
        ]
        return
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / num_steps, num_steps), mu=mu)
    ours = qwen_image_sigmas(num_steps, num_tokens=num_tokens, scheduler_config=CONFIG)
    torch.testing.assert_close(ours, scheduler.sigmas, atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_tokens", [16, 1024])
def test_the_shift_is_the_schedule_before_its_stretch(num_tokens):
    """The stretch maps the last sigma to shift_terminal and 1 to 1; without it nothing is left but
    the shift.
    """
    plain = torch.linspace(1, 0.1, 10, dtype=torch.float64)
    shifted = qwen_image_shift(plain, num_tokens=num_tokens, scheduler_config=CONFIG)
    stretched = 1 - (1 - shifted) * 0.98 / (1 - shifted[-1])
    sigmas = qwen_image_sigmas(10, num_tokens=num_tokens, scheduler_config=CONFIG)
    torch.testing.assert_close(sigmas[:-1], stretched.float())
    assert shifted.dtype == torch.float64 and (shifted[1:] > plain[1:]).all() and shifted[-1] > 0.1


def test_wan_golden():
    of_5b, of_14b = (static_sigmas(10, shift=shift, last=0.1) for shift in (5.0, 12.0))
    torch.testing.assert_close(of_5b, torch.tensor(GOLDEN_WAN), atol=5e-4, rtol=0)
    assert int((of_5b[:-1] >= 0.875).sum()) == 5
    assert int((of_14b[:-1] >= 0.875).sum()) == 7


def test_schedule_without_its_config_is_refused():
    with pytest.raises(ValueError, match="shift_terminal"):
        qwen_image_sigmas(
            10,
            num_tokens=16,
            scheduler_config={k: v for k, v in CONFIG.items() if k != "shift_terminal"},
        )
    with pytest.raises(ValueError, match="use_dynamic_shifting"):
        qwen_image_sigmas(
            10, num_tokens=16, scheduler_config=CONFIG | {"use_dynamic_shifting": False}
        )


@pytest.mark.parametrize(
    ("num_steps", "size", "window", "text"),
    [
        (10, 3, (0, 2), "3 > 2"),
        (4, 2, (0, 4), "never stochastic"),
        (10, 2, (5, 3), "range must rise"),
        (10, -1, (0, 5), ">= 0"),
    ],
)
def test_windows_that_do_not_fit(num_steps, size, window, text):
    with pytest.raises(ValueError, match=text):
        check_window(sampling(num_steps, size, window))


def sampling(num_steps, size, window):
    return Sampling(
        height=32,
        width=32,
        num_inference_steps=num_steps,
        sde_window_size=size,
        sde_window_range=window,
    )


def test_windows_that_fit():
    check_window(sampling(10, 2, (0, 5)))
    check_window(sampling(10, 9, (0, 9)))
