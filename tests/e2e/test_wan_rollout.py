"""Wan's groups as real replicas draw them, against stock diffusers: log_probs of both experts,
text, pixels, weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanTransformer3DModel
from diffusers.pipelines.wan import pipeline_wan_i2v
from PIL import Image
from torch import Tensor

from megadiff.diffusion import sde
from megadiff.diffusion.noise import group_key, initial_latents_rows, sample_keys
from megadiff.models.conditioning import IMAGE_LATENTS
from megadiff.models.packing import unpack
from megadiff.models.vae import latent_statistics
from megadiff.models.wan22.adapter import WanAdapter
from megadiff.models.wan22.text import cleaned
from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.train.rows import stack_conditioning
from megadiff.types import Prompt, RolloutGroup, RolloutRequest, Sampling
from tests.e2e.pushes import Source, folder_weights, sync_between, urls_of
from tests.encoding import encode_prompts

PLAIN = Sampling(
    height=64,
    width=96,
    num_frames=5,
    num_inference_steps=6,
    sde_window_size=4,
    sde_window_range=(1, 5),
)

TEXT_KINDS = ("ti2v_5b", "t2v_a14b")  # test_families has the others
SAMPLINGS = {
    "plain": PLAIN,
    "guided": dataclasses.replace(PLAIN, guidance_scale=3.0),
    "ode": dataclasses.replace(PLAIN, sde_type="ode"),
    "one noise": dataclasses.replace(
        PLAIN, sde_window_size=2, sde_window_range=(2, 4), same_noise=True
    ),
}
TEXTS = ("a red circle", "two blue stars on  white, 猫", "a red circle")
REQUESTS = [
    RolloutRequest(
        prompt=Prompt(text=text, id=f"{place:016x}", negative_text="bad" * place),
        sampling=PLAIN,
        sample_indices=tuple(range(place + 1)),
        seed=0,
        step=0,
    )
    for place, text in enumerate(TEXTS)
]
GROUP_OF_ROW = [place for place, request in enumerate(REQUESTS) for _ in request.sample_indices]
GAP = {"plain": 1e-5, "guided": 1e-4}
FROM_IMAGE = dataclasses.replace(PLAIN, guidance_scale=3.0, images=((64, 96),))


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What a replica that was pushed the model folder's weights answered, by the name of the
    sampling.
    """

    adapter: WanAdapter
    client: ReplicaClient
    groups: Mapping[str, Sequence[RolloutGroup]]

    def column(self, name: str, field: str) -> Tensor:
        return torch.cat([getattr(group, field) for group in self.groups[name]])

    def conditioning(self, name: str) -> dict[str, Tensor]:
        return stack_conditioning([group.conditioning for group in self.groups[name]])


def sampling_of(name: str, adapter: WanAdapter) -> Sampling:
    second = 2.0 if name == "guided" and len(adapter.components) == 2 else 0.0
    return (
        FROM_IMAGE
        if name == "image"
        else dataclasses.replace(SAMPLINGS[name], guidance_scale_2=second)
    )


@pytest.fixture(scope="module")
def drawn(tiny_wan: dict[str, Path], wan_registries: dict[str, Path]) -> dict[str, Drawn]:
    found = {}
    for kind in wan_registries:
        model = tiny_wan[kind]
        adapter, urls = WanAdapter(model), urls_of(wan_registries[kind])
        source = Source(folder_weights(model, adapter.components))
        with sync_between(source, urls, "http", model=model, folder=Path()) as (sync, _):
            sync.push(0)
        client = ReplicaClient(urls["replica_0"], "replica_0", timeout_s=60)
        groups = {}
        for name in SAMPLINGS:
            sampling = sampling_of(name, adapter)
            groups[name] = client.draw(
                [dataclasses.replace(one, sampling=sampling) for one in REQUESTS]
            ).groups
        found[kind] = Drawn(adapter=adapter, client=client, groups=groups)
    return found


@pytest.mark.parametrize("name", GAP)
@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_log_probs_are_those_of_diffusers(drawn: dict[str, Drawn], kind: str, name: str) -> None:
    one = drawn[kind]
    transformers, log_probs_NW = _transformers(one.adapter), one.column(name, "log_probs_GW")
    recomputed_NW, used = _log_probs(one, transformers, name)
    assert (recomputed_NW - log_probs_NW).abs().max() <= GAP[name]
    assert used == set(one.adapter.components)
    if len(transformers) == 2:  # the other expert would be noticed at every step
        swapped = dict(zip(transformers, reversed(transformers.values()), strict=True))
        wrong_NW, _ = _log_probs(one, swapped, name)
        assert (wrong_NW - log_probs_NW).abs().max(dim=0).values.min() > 10 * GAP[name]


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_one_noise_is_one_state_until_the_window(drawn: dict[str, Drawn], kind: str) -> None:
    one = drawn[kind]
    recomputed_NW, _ = _log_probs(one, _transformers(one.adapter), "one noise")
    assert (recomputed_NW - one.column("one noise", "log_probs_GW")).abs().max() <= 1e-5
    for group in one.groups["one noise"]:
        begins_GLC = group.latents_GSLC[:, 0]
        assert torch.equal(begins_GLC, begins_GLC[:1].expand_as(begins_GLC))
    # the first sample of a group is what it is without
    request = dataclasses.replace(REQUESTS[1], sample_indices=REQUESTS[1].sample_indices[:1])
    own = dataclasses.replace(sampling_of("one noise", one.adapter), same_noise=False)
    alone = one.client.generate(dataclasses.replace(request, sampling=own))
    group = one.groups["one noise"][1]
    assert (group.latents_GSLC[0] - alone.latents_GSLC[0]).abs().max() <= 1e-5
    assert not torch.equal(group.latents_GSLC[0, 1], group.latents_GSLC[1, 1])


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_text_is_encoded_as_by_the_adapter(drawn: dict[str, Drawn], kind: str) -> None:
    conditioning = drawn[kind].conditioning("guided")
    for side, texts in (
        ("", TEXTS),
        ("negative_", [request.prompt.negative_text for request in REQUESTS]),
    ):
        embeds_PTD, mask_PT = encode_prompts(drawn[kind].adapter, texts)
        assert torch.equal(conditioning[f"{side}prompt_mask"], mask_PT)
        assert (
            conditioning[f"{side}prompt_embeds"] - embeds_PTD * mask_PT[..., None]
        ).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", TEXT_KINDS)
@torch.no_grad()
def test_pixels_are_the_decoded_latents(drawn: dict[str, Drawn], kind: str) -> None:
    adapter = drawn[kind].adapter
    latents_NLC, pixels = (
        drawn[kind].column("ode", "latents_GSLC")[:, 0],
        drawn[kind].column("ode", "pixels_GFHWC"),
    )
    vae = AutoencoderKLWan.from_pretrained(adapter.model_folder / "vae")
    mean, std = (
        torch.tensor(vae.config[f"latents_{name}"]).view(1, -1, 1, 1, 1) for name in ("mean", "std")
    )
    latents = unpack(latents_NLC, adapter.grid(SAMPLINGS["ode"]))
    frames = ((vae.decode(latents * std + mean).sample.clamp(-1, 1) + 1) * 127.5).permute(
        0, 2, 3, 4, 1
    )
    assert pixels.shape == (len(GROUP_OF_ROW), 5, 64, 96, 3) and pixels.dtype == torch.uint8
    assert (frames - pixels.float()).abs().max() <= 0.51  # rounded
    assert pixels.float().std() > 5


@torch.no_grad()
def test_from_a_first_frame_as_diffusers_image_to_video(
    drawn: dict[str, Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three groups in one call, two of them of one image: the latents of the stock pipeline with
    Euler's steps.
    """
    monkeypatch.setattr(
        pipeline_wan_i2v, "prompt_clean", cleaned
    )  # its own needs a package to mend broken texts
    one = drawn["ti2v_5b"]
    pixels_2HWC = torch.randint(
        0, 256, (2, 64, 96, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    image_of_group, sampling = (0, 1, 0), dataclasses.replace(FROM_IMAGE, sde_type="ode")
    requests = [
        dataclasses.replace(
            request, sampling=sampling, images=(pixels_2HWC[image].numpy().tobytes(),)
        )
        for request, image in zip(REQUESTS, image_of_group, strict=True)
    ]
    groups = one.client.draw(requests).groups
    with one.adapter.image_encoder(dtype=torch.float32, device="cpu") as encode:
        first_2LC = encode(pixels_2HWC)
    grid = one.adapter.grid(sampling)
    pipeline = WanImageToVideoPipeline.from_pretrained(
        one.adapter.model_folder,
        image_encoder=None,
        image_processor=None,
        scheduler=None,
        expand_timesteps=True,
    )
    pipeline.scheduler = Euler(one.adapter.schedule(sampling))
    pipeline.set_progress_bar_config(disable=True)
    for group, request, image in zip(groups, requests, image_of_group, strict=True):
        given_1LC = group.conditioning[IMAGE_LATENTS]
        assert (given_1LC - first_2LC[image]).abs().max() <= 1e-5
        key = group_key(seed=0, step=0, prompt_id=request.prompt.id)
        (noise_LC,) = initial_latents_rows(
            one.adapter.latents_shape(sampling), sample_keys(key, group.sample_indices[-1:])
        )
        expected = pipeline(
            Image.fromarray(pixels_2HWC[image].numpy()),
            request.prompt.text,
            request.prompt.negative_text,
            latents=unpack(torch.cat([torch.zeros_like(given_1LC), noise_LC[None]], dim=1), grid),
            guidance_scale=sampling.guidance_scale,
            num_inference_steps=sampling.num_inference_steps,
            height=64,
            width=96,
            num_frames=5,
            output_type="latent",
        ).frames
        found = unpack(torch.cat([given_1LC, group.latents_GSLC[-1, -1:]], dim=1), grid)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        mean, std = latent_statistics(pipeline.vae, torch.device("cpu"))
        frames = (pipeline.vae.decode(found * std + mean).sample[0].clamp(-1, 1) + 1) * 127.5
        pixels_FHWC = group.pixels_GFHWC[-1]
        assert pixels_FHWC.shape == (5, 64, 96, 3)
        assert (frames.permute(1, 2, 3, 0) - pixels_FHWC.float()).abs().max() <= 0.51


def test_log_probs_are_of_the_drawn_frames_alone(drawn: dict[str, Drawn]) -> None:
    one, transformers = drawn["ti2v_5b"], _transformers(drawn["ti2v_5b"].adapter)
    image = bytes(range(256)) * (64 * 96 * 3 // 256)
    requests = [
        dataclasses.replace(each, sampling=FROM_IMAGE, images=(image,)) for each in REQUESTS
    ]
    found = dataclasses.replace(one, groups={"image": one.client.draw(requests).groups})
    assert (
        found.column("image", "latents_GSLC").shape[2:]
        == one.adapter.latents_shape(FROM_IMAGE)
        == (6, 192)
    )
    recomputed_NW, _ = _log_probs(found, transformers, "image")
    assert (recomputed_NW - found.column("image", "log_probs_GW")).abs().max() <= 1e-5
    others = []
    for group in found.groups["image"]:
        other = {IMAGE_LATENTS: -group.conditioning[IMAGE_LATENTS]}
        others.append(dataclasses.replace(group, conditioning={**group.conditioning, **other}))
    wrong_NW, _ = _log_probs(
        dataclasses.replace(found, groups={"image": others}), transformers, "image"
    )
    assert (wrong_NW - recomputed_NW).abs().max() > 1e-3


class Euler:
    """What WanImageToVideoPipeline needs of a scheduler: these sigmas, and the plain step between
    them.
    """

    order = 1
    config = SimpleNamespace(num_train_timesteps=1000)

    def __init__(self, sigmas: Tensor) -> None:
        self.sigmas, self.timesteps = sigmas, 1000 * sigmas[:-1]

    def set_timesteps(self, num_steps: int, device: object) -> None:
        assert num_steps == len(self.timesteps)

    def step(
        self, velocity: Tensor, timestep: Tensor, latents: Tensor, return_dict: bool
    ) -> tuple[Tensor]:
        place = int((self.timesteps == timestep).nonzero())
        return (latents + velocity * (self.sigmas[place + 1] - self.sigmas[place]),)


def test_what_the_model_cannot_draw_is_refused(drawn: dict[str, Drawn]) -> None:
    """By the replica, before its engine sees it, and in the model's own words."""
    cases = [
        (dict(num_frames=4), "num_frames=4 is not 1 . a multiple of 4"),
        (dict(height=72), "height=72 is not a positive multiple"),
        (dict(num_frames=1025), "num_frames=1025 must be 1 to 1024"),
        (dict(num_frames=1021, height=4096, width=4096), "1021 frames of 4096x4096 are .* pixels"),
        (dict(guidance_scale_2=0.5), "guidance_scale_2=0.5"),
        (dict(true_cfg_scale=2.0), "true_cfg_scale=2.0"),
        (
            dict(images=((64, 96),)),
            "the request has 0 images, its sampling 1",
        ),
    ]
    for one in drawn.values():
        for changes, text in cases:
            with pytest.raises(ReplicaError, match=text) as error:
                one.client.generate(
                    dataclasses.replace(REQUESTS[0], sampling=dataclasses.replace(PLAIN, **changes))
                )
            assert error.value.status == 400
        too_long = dataclasses.replace(REQUESTS[0].prompt, text="x" * 600)
        with pytest.raises(
            ReplicaError, match="the prompt is too long, 602 tokens, the model takes 512"
        ):
            one.client.generate(dataclasses.replace(REQUESTS[0], prompt=too_long))
        one.client.generate(REQUESTS[0])


def _transformers(adapter: WanAdapter) -> dict[str, WanTransformer3DModel]:
    return {
        name: WanTransformer3DModel.from_pretrained(adapter.model_folder / name)
        for name in adapter.components
    }


@torch.no_grad()
def _log_probs(
    one: Drawn, transformers: Mapping[str, WanTransformer3DModel], name: str
) -> tuple[Tensor, set[str]]:
    """([N, W] of the recorded steps, the experts in charge of them)."""
    adapter, sampling = one.adapter, sampling_of(name, one.adapter)
    schedule, latents_NSLC = one.groups[name][0].schedule, one.column(name, "latents_GSLC")
    assert torch.equal(schedule, adapter.schedule(sampling))
    conditioning = {key: value[GROUP_OF_ROW] for key, value in one.conditioning(name).items()}
    columns, used, num_rows = [], set(), len(GROUP_OF_ROW)
    for offset in range(
        sampling.sde_window_size
    ):  # the window is all of its range: one start for every group
        step = sampling.sde_window_range[0] + offset
        sigma, sigma_next = schedule[step], schedule[step + 1]
        component = adapter.component_of(float(sigma))
        used.add(component)
        latents_NLC, prev_sample_NLC = latents_NSLC[:, offset], latents_NSLC[:, offset + 1]
        sigma_N, sigma_next_N = sigma.expand(num_rows), sigma_next.expand(num_rows)
        velocity_NLC = adapter.velocity(
            transformers[component],
            latents_NLC,
            sigma_N,
            conditioning,
            sampling,
            component=component,
        )
        sde_step = sde.SdeStep(sampling, schedule, sigma_N, sigma_next_N)
        mean_NLC = sde.step_mean(sde_step, latents_NLC, velocity_NLC)
        columns.append(sde.log_prob(sde_step, prev_sample_NLC, mean_NLC))
    return torch.stack(columns, dim=1), used
