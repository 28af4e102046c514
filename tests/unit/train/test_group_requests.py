"""What a step asks replicas for."""

from __future__ import annotations

from megadiff.train.sampling import group_requests
from megadiff.types import Prompt, PromptBatch, Sampling


def test_groups_of_one_prompt_ask_for_different_samples() -> None:
    """Noise follows from a sample's index: equal indices would be equal samples."""
    a, b = (Prompt(text=text, id=text * 16) for text in "ab")
    sampling = Sampling(height=64, width=64, num_inference_steps=4)
    batch = PromptBatch(prompts=(a, b, a), repeats=(0, 0, 1))
    requests = group_requests(batch, sampling, group_size=3, seed=0, step=5, policy_version=4)
    assert [(request.prompt, request.sample_indices) for request in requests] == [
        (a, (0, 1, 2)),
        (b, (0, 1, 2)),
        (a, (3, 4, 5)),
    ]
    assert {(request.step, request.policy_version) for request in requests} == {(5, 4)}
