"""A LoRA's manifest has its modules of every component, and a module of none is refused."""

import pytest

from megadiff.tensors.lora_names import lora_manifest, lora_modules
from megadiff.types import LoraSpec
from tests.unit.sync.fake_replica import LORA, PAIR_MANIFEST


def test_a_lora_is_of_every_component_that_has_its_modules():
    lora = LoraSpec(rank=2, alpha=4.0, modules=("layer1",))
    fewer = {
        name: row for name, row in PAIR_MANIFEST.items() if name != "transformer_2.layer3.weight"
    }
    assert lora_modules(lora_manifest(lora, fewer)) == {
        "transformer.layer1",
        "transformer_2.layer1",
    }
    assert lora_modules(lora_manifest(LORA, fewer)) == {
        "transformer.layer1",
        "transformer_2.layer1",
        "transformer.layer3",
    }
    with pytest.raises(
        ValueError,
        match="'layer9' is a matrix of none of the components transformer, transformer_2",
    ):
        lora_manifest(LoraSpec(rank=2, alpha=4.0, modules=("layer9",)), fewer)
