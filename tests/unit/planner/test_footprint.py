"""What a replica is said to take is what its folder holds."""

from pathlib import Path

from safetensors import safe_open

from megadiff.planner.footprint import replica_weights


def test_every_network_counts_the_second_expert_too(tiny_wan: dict[str, Path]) -> None:
    for model in tiny_wan.values():
        elements = dict.fromkeys(("transformer", "text_encoder", "vae"), 0)
        for path in model.glob("*/*.safetensors"):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    count = 1
                    for length in file.get_slice(name).get_shape():
                        count *= length
                    elements[path.parent.name.removesuffix("_2")] += count
        found = replica_weights(model, dtype="bfloat16")
        assert found.transformers == 2 * elements["transformer"] and found.unknown == ()
        assert found.others == 2 * (elements["text_encoder"] + elements["vae"])
        assert found.encoder == 2 * elements["text_encoder"]
