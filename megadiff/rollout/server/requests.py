"""Check a request for samples. A refusal is a ValueError with both numbers, rule and fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megadiff.diffusion.schedule import check_window
from megadiff.diffusion.sde import NOISE_SCALES, ODE_SOLVERS
from megadiff.rollout.limits import LARGEST_SCALE, Limits
from megadiff.types import DTYPES, RolloutRequest, Sampling

ModelRule = Callable[[Sampling], None]  # ModelAdapter.validate, which raises ValueError


def check_requests(
    requests: Sequence[RolloutRequest], limits: Limits, model_rule: ModelRule
) -> None:
    """Raise ValueError unless all can be sampled in one batch.

    A fault of one request names its index and prompt.
    """
    if not requests:
        raise ValueError("the list of requests is empty; send at least one")

    first = requests[0].sampling
    for index, request in enumerate(requests):
        try:
            check_request(request, limits, model_rule)
        except ValueError as error:
            raise ValueError(
                f"requests[{index}] (prompt {request.prompt.id[:64]}): {error}"
            ) from None
        for name, value in vars(request.sampling).items():
            if value != getattr(first, name):
                raise ValueError(
                    f"requests[{index}] has {name}={value}, requests[0] has "
                    f"{name}={getattr(first, name)}; a batch shares one sampling: send the others "
                    "in a call of their own"
                )

    num_samples = sum(len(request.sample_indices) for request in requests)
    if num_samples > limits.batch_size:
        raise ValueError(
            f"{len(requests)} requests ask for {num_samples} samples, a call takes "
            f"{limits.batch_size}; send fewer requests at once (rollout.batch_size)"
        )


def check_request(request: RolloutRequest, limits: Limits, model_rule: ModelRule) -> None:
    """Raise ValueError for the first rule that the request breaks."""
    sampling = request.sampling
    check_text("prompt", request.prompt.text, limits.prompt_chars)
    check_text("negative prompt", request.prompt.negative_text, limits.prompt_chars)

    bounds = {
        "height": limits.side,
        "width": limits.side,
        "num_frames": limits.num_frames,
        "num_inference_steps": limits.num_inference_steps,
    }
    for name, most in bounds.items():
        check_count(name, getattr(sampling, name), most)

    num_pixels = sampling.height * sampling.width * sampling.num_frames
    if num_pixels > limits.pixels:
        raise ValueError(
            f"{sampling.num_frames} frames of {sampling.width}x{sampling.height} are {num_pixels} "
            f"pixels, a sample has at most {limits.pixels}; ask for fewer or smaller frames"
        )

    for name in (
        "true_cfg_scale",
        "guidance_scale",
        "guidance_scale_2",
        "eta",
        "think_temperature",
    ):
        value = getattr(sampling, name)
        if not 0 <= value <= LARGEST_SCALE:  # NaN fails every comparison
            raise ValueError(f"{name}={value} must be a number from 0 to {LARGEST_SCALE}")

    _check_images(request, limits)
    if sampling.think_tokens:
        check_count("think_tokens", sampling.think_tokens, limits.think_tokens)

    # After the bounds: a model's rule counts tokens of any size that it is given.
    model_rule(sampling)
    _check_sde(request)
    _check_samples(request.sample_indices, limits.group_size)


def check_count(name: str, value: int, most: int) -> None:
    """Raise ValueError unless the value is 1 to most."""
    if not 1 <= value <= most:
        # JSON's integers may have thousands of digits, more than a float can show.
        raise ValueError(f"{name}={value!s:.20} must be 1 to {most}")


def check_text(name: str, text: str, max_chars: int) -> None:
    """Raise ValueError for a text that is too long or that no tokenizer takes."""
    if len(text) > max_chars:
        raise ValueError(
            f"the {name} has {len(text)} characters, at most {max_chars} are taken; shorten it"
        )
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(f"the {name} holds a lone surrogate, which is no Unicode text; remove it")


def _check_images(request: RolloutRequest, limits: Limits) -> None:
    """Raise ValueError unless the pixels fit the sizes; the model's rule judges the sizes."""
    sizes = request.sampling.images
    if len(request.images) != len(sizes) or len(sizes) > limits.given_images:
        raise ValueError(
            f"the request has {len(request.images)} images, its sampling {len(sizes)}; send as "
            f"many, at most {limits.given_images}"
        )
    for index, (image, (height, width)) in enumerate(zip(request.images, sizes, strict=True)):
        check_count(f"images[{index}] height", height, limits.side)
        check_count(f"images[{index}] width", width, limits.side)
        if len(image) != 3 * height * width:
            raise ValueError(
                f"images[{index}] has {len(image)} bytes, the {width}x{height} that the sampling "
                f"says need {3 * height * width}; send RGB, 3 bytes a pixel"
            )


def _check_sde(request: RolloutRequest) -> None:
    sampling = request.sampling
    if sampling.sde_type not in NOISE_SCALES:
        raise ValueError(f"sde_type={sampling.sde_type!r} is not one of {', '.join(NOISE_SCALES)}")

    if sampling.ode_solver not in ODE_SOLVERS:
        raise ValueError(
            f"ode_solver={sampling.ode_solver!r} is not one of {', '.join(ODE_SOLVERS)}"
        )

    if sampling.latents_dtype not in DTYPES:
        raise ValueError(
            f"latents_dtype={sampling.latents_dtype!r} is not one of {', '.join(DTYPES)}"
        )

    # no step is stochastic: eta and the window mean nothing
    if sampling.sde_type == "ode" or not sampling.sde_window_size:
        if sampling.same_noise:
            raise ValueError(
                f"same_noise with sde_type={sampling.sde_type} and sde_window_size="
                f"{sampling.sde_window_size}: without stochastic steps a group's samples are one; "
                "set same_noise=false, or a window"
            )
        return
    if not sampling.eta:
        raise ValueError(
            f"eta=0 with sde_type={sampling.sde_type}: a stochastic step needs noise; set eta>0 or "
            "ode"
        )
    if sampling.sde_type == "flow_cps" and sampling.eta > 1:
        raise ValueError(f"eta={sampling.eta} with sde_type=flow_cps must be at most 1")

    check_window(sampling)


def _check_samples(sample_indices: tuple[int, ...], group_size: int) -> None:
    if not 1 <= len(sample_indices) <= group_size:
        raise ValueError(f"{len(sample_indices)} sample_indices; a group has 1 to {group_size}")
    if len(set(sample_indices)) != len(sample_indices):
        raise ValueError(
            f"sample_indices={list(sample_indices)} holds an index twice; each sample has its own "
            "noise"
        )
