"""What a replica is said to take is what its folder holds."""

from pathlib import Path

from safetensors import safe_open

from megadiff.rollout.footprint import replica_weights


def test_every_network_counts_the_second_expert_too(tiny_wan: dict[str, Path]) -> None:
    for model in tiny_wan.values():
        elements = 0
        for path in model.glob("*/*.safetensors"):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    count = 1
                    for length in file.get_slice(name).get_shape():
                        count *= length
                    elements += count
        assert replica_weights(model, dtype="bfloat16") == (2 * elements, ())
