"""The parity gate's question: one call of groups whose prompts are unlike one another.

A pipeline that treats all rows of a call by the first row's text is right for that row. So the
texts differ in length, script and negative text, and the gate looks at every group of the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from safetensors.torch import load, save
from torch import Tensor

from megadiff.config.schema import Config
from megadiff.data.prompts import prompt_id
from megadiff.models.adapter import FIRST_FRAME, ModelAdapter
from megadiff.parallel.collectives import agreed, broadcast_bytes, broadcast_json
from megadiff.parallel.mesh import Mesh
from megadiff.rollout.limits import Limits
from megadiff.train.rollout import first_frame_of, sampling_of
from megadiff.types import DTYPES, Prompt

LONG = (
    "a wide photograph of an old harbour at dusk, fishing boats tied to a wooden pier, "
    'a lighthouse on the cliff behind, and a painted sign that reads "open until nine"'
)
OTHER_SCRIPT = "一只戴着红色围巾的猫坐在窗边，外面正在下雪"
SHORT = "a cup"
# (text, negative text): negative texts differ as well, which matters under guidance only.
TEXTS = (
    (LONG, " "),
    (OTHER_SCRIPT, "blurred, dark, low quality, watermark, cropped"),
    (SHORT, "noise"),
)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The groups that the gate asks a replica for, in one call.

    prompts: one a group, the first is the run's own. num_samples: of each group.
    conditioning: what the replica must answer for each prompt, name → [1, tokens, …].
    """

    prompts: list[Prompt]
    num_samples: int
    conditioning: list[dict[str, Tensor]]


def call_size(config: Config) -> tuple[int, int]:
    """Return (groups, samples of each) of the probe: at most as many samples as a call has."""
    rollout = config.rollout
    most = max(rollout.batch_size, config.algorithm.group_size)
    num_groups = min(1 + len(TEXTS), most)
    if rollout.first_frame:  # a call's body holds an image for each group
        frames = Limits().num_first_frames(height=rollout.height, width=rollout.width)
        num_groups = max(1, min(num_groups, frames))
    return num_groups, min(config.algorithm.group_size, most // num_groups)


def probe_prompts(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` unlike prompts: the first of the run's step, then the texts above.

    A model that is given a first frame gets those of the step's prompts in turn, so that images
    differ too where the step's do.
    """
    chosen = [replace(prompts[0], fields={})]
    for index, (text, negative_text) in enumerate(TEXTS[: count - 1], start=1):
        image = prompts[index % len(prompts)].image
        identity = prompt_id(text, negative_text, image)
        chosen.append(Prompt(text=text, id=identity, negative_text=negative_text, image=image))
    return chosen


def prepare(
    adapter: ModelAdapter, prompts: Sequence[Prompt], *, config: Config, mesh: Mesh
) -> Probe | None:
    """Choose the prompts and encode them on rank 0. Collective; None where parity.mode is off.

    prompts: of the step to come. Call it before replicas on the same GPUs hold their weights:
    rank 0 loads the text encoder meanwhile.
    """
    if config.parity.mode == "off":
        return None
    num_groups, num_samples = call_size(config)
    rows = [asdict(prompt) for prompt in probe_prompts(prompts, num_groups)]
    rows = broadcast_json(rows, source=0, group=mesh.cpu_group)
    chosen = [Prompt(**row) for row in rows]  # type: ignore[union-attr]  (a list came back)
    payload = agreed(
        lambda: _encode(adapter, chosen, config=config, device=mesh.device),
        mesh.cpu_group,
        here=mesh.rank == 0,
    )
    tensors = load(broadcast_bytes(payload, source=0, group=mesh.cpu_group))
    return Probe(
        prompts=chosen,
        num_samples=num_samples,
        conditioning=[_of_prompt(tensors, index) for index in range(num_groups)],
    )


def _encode(
    adapter: ModelAdapter, prompts: Sequence[Prompt], *, config: Config, device: torch.device
) -> bytes:
    """Encode each prompt by itself, so that no text can depend on another's length."""
    sampling = sampling_of(config.rollout)
    dtype = DTYPES[config.model.dtype]
    is_guided = any(adapter.num_passes(name, sampling) > 1 for name in adapter.components)
    tensors = {}
    with adapter.prompt_encoder(dtype=dtype, device=device) as encode_texts:
        for index, prompt in enumerate(prompts):
            texts = {"": prompt.text}
            if is_guided:
                texts["negative_"] = prompt.negative_text
            for side, text in texts.items():
                embeds, mask = encode_texts([text])
                tensors[f"{index}.{side}prompt_embeds"] = embeds
                tensors[f"{index}.{side}prompt_mask"] = mask
    if sampling.first_frame:
        with adapter.image_encoder(dtype=dtype, device=device) as encode_images:
            for index, prompt in enumerate(prompts):
                pixels = torch.tensor(first_frame_of(prompt, sampling))
                tensors[f"{index}.{FIRST_FRAME}"] = encode_images(pixels[None]).cpu()
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


def _of_prompt(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    prefix = f"{index}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
