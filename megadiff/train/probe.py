"""Choose the parity gate's calls: one as the run makes them, and one of unlike prompts.

The first shows how far log_probs are apart in training, in the window where they are furthest. The
second is for mistakes: a pipeline that treats all rows of a call by the first row's text is right
for that row. Its texts differ in length, script and negative text, and its groups have windows of
their own. A run whose calls hold one group never pads a text. So the second call may round more
than training does, which is no reason to refuse the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from safetensors.torch import load, save
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.data.prompts import prompt_id
from megadiff.diffusion import sde
from megadiff.models.adapter import Images, ModelAdapter
from megadiff.models.conditioning import IMAGE_LATENTS
from megadiff.parallel.collectives import agreed, broadcast_bytes, broadcast_json
from megadiff.parallel.mesh import Mesh
from megadiff.rollout.wire import read_record
from megadiff.train.sampling import given_images, sampling_of
from megadiff.types import DTYPES, Prompt, Sampling, Tensors

LONG = (
    "a wide photograph of an old harbour at dusk, fishing boats tied to a wooden pier, "
    'a lighthouse on the cliff behind, and a painted sign that reads "open until nine"'
)
OTHER_SCRIPT = "一只戴着红色围巾的猫坐在窗边，外面正在下雪"
SHORT = "a cup"
MOST_GROUPS = 4  # of a call like the run's
UNLIKE_SAMPLES = 2  # of each group of the other: enough to take one row for another
# (text, negative text): negative texts differ as well, which matters under guidance only.
TEXTS = (
    (LONG, " "),
    (OTHER_SCRIPT, "blurred, dark, low quality, watermark, cropped"),
    (SHORT, "noise"),
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The groups that the gate asks a replica for at once.

    prompts: one a group. num_samples: of each group. conditioning: what the replica must answer
    for each prompt, name → [1, tokens, …]. is_unlike: more unlike than a call of the run.
    """

    prompts: list[Prompt]
    num_samples: int
    conditioning: list[Tensors]
    is_unlike: bool


def own_size(config: Config) -> tuple[int, int]:
    """Return (groups, samples of each) of a call like the run's, but small: all is computed again.

    It holds several groups only where the run's calls do.
    """
    num_samples = min(config.algorithm.group_size, config.train.microbatch_size)
    groups_of_run = config.rollout.batch_size // config.algorithm.group_size
    return max(1, min(groups_of_run, MOST_GROUPS)), num_samples


def unlike_size(config: Config) -> tuple[int, int]:
    """Return (groups, samples of each) of the other call, with at most as many as the run's."""
    rollout = config.rollout
    most = max(rollout.batch_size, config.algorithm.group_size)
    num_groups = min(1 + len(TEXTS), most)
    return num_groups, min(config.algorithm.group_size, most // num_groups, UNLIKE_SAMPLES)


def at_largest_weight(sampling: Sampling, schedule: Tensor) -> Sampling:
    """Return the sampling with the window of its range where a velocity's error counts most.

    schedule: [T+1]. With errors of one size at every step, log_probs are furthest apart there. In
    one run on an H200 they were 2.7 times as far apart at the end of [0, 5) as at its start.
    """
    low, high = sampling.sde_window_range
    size = sampling.sde_window_size
    step = sde.SdeStep(sampling, schedule, schedule[low:high], schedule[low + 1 : high + 1])
    weights = sde.velocity_weight(step).unfold(0, size, 1).sum(1)
    start = low + int(weights.argmax())
    return replace(sampling, sde_window_range=(start, start + size))


def unlike_prompts(
    prompts: Sequence[Prompt], count: int, samplings: Sequence[object]
) -> list[Prompt]:
    """Return `count` prompts, and one more where the step has images of a second shape.

    The first is the first of the run's step, then come the texts above. Each text gets the images
    of a prompt of the step, one with images of the first's sizes: only such prompts share a call.
    samplings: of each prompt, with its images' sizes.
    """
    # columns stay here: they may be no JSON, and only rewards read them
    alike: list[Prompt] = []
    others: list[Prompt] = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        (alike if sampling == samplings[0] else others).append(replace(prompt, fields={}))

    chosen = alike[:1]
    for index, (text, negative_text) in enumerate(TEXTS[: count - 1], start=1):
        images = alike[index % len(alike)].images
        identity = prompt_id(text, negative_text, images)
        chosen.append(Prompt(text=text, id=identity, negative_text=negative_text, images=images))
    return chosen + others[:1]


def prepare(
    adapter: ModelAdapter, prompts: Sequence[Prompt], *, config: Config, mesh: Mesh
) -> list[Call]:
    """Choose the prompts and encode them on rank 0. Collective; nothing where parity.mode is off.

    prompts: of the step to come. Call it before replicas on the same GPUs hold their weights:
    rank 0 loads the text encoder meanwhile.
    """
    if config.parity.mode == "off":
        return []

    num_own, num_own_samples = own_size(config)
    num_unlike, num_unlike_samples = unlike_size(config)
    usual = [replace(prompt, fields={}) for prompt in prompts[:num_own]]
    unlike = agreed(
        lambda: unlike_prompts(prompts, num_unlike, _given(prompts, adapter, config)[1]),
        mesh.cpu_group,
        here=mesh.rank == 0,
    )
    # the ranks' prompts differ, but every replica is asked for the same ones
    rows = [[asdict(prompt) for prompt in call] for call in (usual, unlike or [])]
    rows = broadcast_json(rows, source=0, group=mesh.cpu_group)
    chosen = [read_record(Prompt, row, "prompt") for row in rows[0] + rows[1]]

    # on one rank alone: a text encoder takes gigabytes
    payload = agreed(
        lambda: _encode(adapter, chosen, config=config, device=mesh.device),
        mesh.cpu_group,
        here=mesh.rank == 0,
    )

    conditioning: list[Tensors] = [{} for _ in chosen]
    for key, tensor in load(broadcast_bytes(payload, source=0, group=mesh.cpu_group)).items():
        # `<index>.<name>`, as _encode() writes them
        index, _, name = key.partition(".")
        conditioning[int(index)][name] = tensor

    first = len(rows[0])
    return [
        Call(
            prompts=chosen[rows_of_call],
            num_samples=num_samples,
            conditioning=conditioning[rows_of_call],
            is_unlike=is_unlike,
        )
        for rows_of_call, num_samples, is_unlike in (
            (slice(first), num_own_samples, False),
            (slice(first, None), num_unlike_samples, True),
        )
    ]


def _given(
    prompts: Sequence[Prompt], adapter: ModelAdapter, config: Config
) -> tuple[list[Images], list[Sampling]]:
    """Return each prompt's images, and the sampling with their sizes."""
    sampling = sampling_of(config.rollout)
    if not sampling.images:
        return [()] * len(prompts), [sampling] * len(prompts)
    given = [given_images(prompt.images, sampling, adapter) for prompt in prompts]
    images = [tuple(map(torch.tensor, arrays)) for arrays, _ in given]
    return images, [sized for _, sized in given]


def _encode(
    adapter: ModelAdapter, prompts: Sequence[Prompt], *, config: Config, device: torch.device
) -> bytes:
    """Encode each prompt by itself, so that no text can depend on another's length."""
    sampling = sampling_of(config.rollout)
    dtype = DTYPES[config.model.dtype]
    is_guided = adapter.is_guided(sampling)
    images, samplings = _given(prompts, adapter, config)

    tensors = {}
    with adapter.prompt_encoder(dtype=dtype, device=device) as encode_texts:
        for index, prompt in enumerate(prompts):
            # replicas send negative embeddings only where guidance uses them
            texts = {"": prompt.text}
            if is_guided:
                texts["negative_"] = prompt.negative_text
            for side, text in texts.items():
                for name, value in encode_texts([text], [images[index]]).items():
                    tensors[f"{index}.{side}{name}"] = value

    if sampling.images:
        with adapter.image_encoder(dtype=dtype, device=device) as encode_images:
            for index, sized in enumerate(samplings):
                latents_1LC = adapter.image_latents(encode_images, images[index], sized)
                tensors[f"{index}.{IMAGE_LATENTS}"] = latents_1LC.cpu()
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})
