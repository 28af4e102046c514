"""What the server imports that ranks and commands are forked from. See ranks.py."""

from tests.frozen import import_frozen

import_frozen(
    [
        "torch._dynamo",  # imported by the first optimizer
        "diffusers.models.transformers.transformer_qwenimage",
        "diffusers.models.transformers.transformer_wan",
        "veomni.models.diffusers.qwen_image.qwen_image_transformer.modeling_qwen_image_transformer",
        "veomni.distributed.torch_parallelize",
        "megadiff.engines.veomni",
        "megadiff.parallel.tensor_parallel",
        "megadiff.cli.train",
        # imported by those who use them
        "diffusers.models.autoencoders.vae",
        "diffusers.models.embeddings",
        "megadiff.models.qwen_image_edit.text",
        "megadiff.engines.megatron",
        "megadiff.report.report",
        # by the tests whose functions ranks call
        "pytest",
        "tests.distributed.engines",
        "tests.distributed.families",
        "tests.distributed.sharded_model",
        "tests.e2e.conftest",
    ]
)
