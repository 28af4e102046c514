"""The clip reward on a GPU: the CPU's scores, and memory that sleep() gives back."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megadiff.rewards.base import RewardContext, RewardSample
from megadiff.rewards.clip import ClipReward
from megadiff.types import Prompt
from tests import tiny_clip

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.mark.parametrize("score", ["pickscore", "hpsv2", "aesthetic"])
def test_scores_are_the_cpu_s_and_sleep_frees_the_memory(tmp_path: Path, score: str) -> None:
    folder = tiny_clip.write_transformers(tmp_path / "clip", tiny_clip.random_state())
    tiny_clip.write_head(folder / tiny_clip.HEAD_FILE)
    prompt = Prompt(text="red cat", id="0")
    samples = [
        RewardSample(pixels=pixels[None], prompt=prompt, sample_index=index)
        for index, pixels in enumerate(tiny_clip.pictures())
    ]

    scores = {}
    rewards = {}
    for device in ("cpu", "cuda"):
        rewards[device] = ClipReward(path=str(folder), score=score)
        rewards[device].open(RewardContext(device=torch.device(device)))
        scores[device] = rewards[device].score(samples)
    # cuDNN computes the convolution of the patches in TF32, with 10 bits of mantissa
    spread = np.std(scores["cpu"])
    np.testing.assert_allclose(scores["cuda"], scores["cpu"], atol=0.1 * spread, rtol=0)

    reward = rewards["cuda"]
    weights = sum(weight.nbytes for weight in reward._networks.parameters())
    awake = torch.cuda.memory_allocated(GPU)
    reserved = torch.cuda.memory_reserved(GPU)
    reward.sleep()
    assert awake - torch.cuda.memory_allocated(GPU) >= weights
    assert torch.cuda.memory_reserved(GPU) < reserved
    reward.wake()
    assert reward.score(samples) == scores["cuda"]
