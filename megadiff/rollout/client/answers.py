"""Bound and check what a replica answers with samples."""

from __future__ import annotations

from collections.abc import Sequence

from megadiff.types import RolloutGroup, RolloutRequest, Sampling

JSON_BYTES = 2**26  # the fingerprints of a large model's tensors, of several workers, are some MiB
CONDITIONING_BYTES = 2**28  # of a group's embeddings and masks


def check_groups(groups: Sequence[RolloutGroup], requests: Sequence[RolloutRequest]) -> None:
    """Raise ValueError where the groups are not those that were asked for, in order.

    Also where columns have shapes that no such samples have.
    """
    asked = [(request.prompt.id, request.sample_indices) for request in requests]
    answered = [(group.prompt.id, group.sample_indices) for group in groups]
    if answered != asked:
        raise ValueError(f"it has the groups {answered}, and was asked for {asked}")
    for group, request in zip(groups, requests, strict=True):
        if request.policy_version not in (None, group.policy_version):
            raise ValueError(
                f"prompt {group.prompt.id} was drawn with version {group.policy_version}, and "
                f"asked for with {request.policy_version}"
            )
        _check_shapes(group, request.sampling)


def _check_shapes(group: RolloutGroup, sampling: Sampling) -> None:
    size_FHWC = [sampling.num_frames, sampling.height, sampling.width, 3]
    if list(group.pixels_GFHWC.shape[1:]) != size_FHWC:
        raise ValueError(
            f"prompt {group.prompt.id} has pixels of shape {list(group.pixels_GFHWC.shape)}, and "
            f"was asked for with {size_FHWC} a sample"
        )
    latents = list(group.latents_GSLC.shape)
    log_probs = list(group.log_probs_GW.shape)
    # a window of W steps has a state before and after each of them
    if len(latents) != 4 or len(log_probs) != 2 or latents[1] != log_probs[1] + 1:
        raise ValueError(
            f"prompt {group.prompt.id} has latents of shape {latents}, which must be [G, W + 1, "
            f"L, C], and log_probs of {log_probs}, [G, W]"
        )


def groups_bytes(requests: Sequence[RolloutRequest]) -> int:
    """Return how many bytes an answer with the groups of these requests may have, generously.

    A sample has its pixels in uint8, and a latent state for each step that is recorded. 16 bytes a
    pixel and state are enough for a model that diffuses pixels in float32; latents have 1 to 4.
    """
    total = JSON_BYTES  # of the header, with all prompts and samplings
    for request in requests:
        sampling = request.sampling
        pixels = sampling.height * sampling.width * sampling.num_frames
        states = sampling.num_inference_steps + 2
        total += CONDITIONING_BYTES + len(request.sample_indices) * pixels * (3 + 16 * states)
    return total
