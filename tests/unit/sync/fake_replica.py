"""A source of weights and a replica that holds what it was sent, both in this process."""

import json

import torch
from safetensors.torch import load

from megadiff.tensors.fingerprint import commit_answer, fingerprint
from megadiff.tensors.lora_names import lora_modules, used_tensor
from megadiff.types import LoraSpec

WEIGHTS = {
    f"transformer.layer{i}.weight": torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
    for i in range(5)
}
MANIFEST = {name: {"dtype": "float32", "shape": [4, 8]} for name in WEIGHTS}
LORA = LoraSpec(rank=2, alpha=4.0, modules=("layer1", "layer3"))
NAME = "transformer.layer0.weight"


def lora_tensors(factor):
    shapes = {
        f"transformer.{module}.lora_{side}.weight": shape
        for module in LORA.modules
        for side, shape in SIDES.items()
    }
    return {name: torch.full(shape, factor) for name, shape in shapes.items()}


SIDES = {"A": (2, 8), "B": (4, 2)}


class Source:
    """Gives the weights in buckets of two."""

    def __init__(self, weights, lora=None):
        self.weights, self.lora, self.finished, self.factor = weights, lora, False, 1.0
        self.changed = {name.partition(".")[0] for name in weights}

    def mark_pushed(self):
        self.changed = set()

    def named_weights(self, bucket_bytes, components):
        items = [item for item in self.weights.items() if item[0].partition(".")[0] in components]
        for start in range(0, len(items), 2):
            yield items[start : start + 2]
        self.finished = True

    def named_lora(self, bucket_bytes, components):
        yield [
            item
            for item in lora_tensors(self.factor).items()
            if item[0].partition(".")[0] in components
        ]


class Target:
    """A replica of len(boxes) workers that holds its part of what it was sent, after `fault` had
    its way with it.
    """

    url = "http://127.0.0.1:1"

    def __init__(self, name="replica_0", fault=lambda bucket: bucket, boxes=({},)):
        self.name, self.fault, self.boxes = name, fault, boxes
        self.held, self.version, self.begun, self.bound = {}, None, [], None

    def weights_begin(self, version, manifest, *, lora, transport):
        assert transport == {"name": "http"}
        self.begun.append(set(json.loads(manifest)))
        self.lora = lora

    def weights_bucket(self, bucket):
        self.held |= dict(self.fault(sorted(load(bytes(bucket)).items(), key=lambda item: item[0])))

    def weights_commit(self, version, digests):
        self.version = version
        bound = self.bound if self.bound is not None else sorted(lora_modules(self.held))
        used = {name: used_tensor(name, tensor, self.lora) for name, tensor in self.held.items()}
        workers = [
            {
                "fingerprints": {
                    name: fingerprint(_cut(tensor, boxes.get(name)))
                    for name, tensor in used.items()
                },
                "bound_modules": bound,
            }
            for boxes in self.boxes
        ]
        self.answer = commit_answer(workers, digests)
        return self.answer


def _cut(tensor, box):
    return tensor if box is None else tensor[tuple(slice(*one) for one in box)].contiguous()


PAIR = WEIGHTS | {
    name.replace("transformer", "transformer_2"): tensor + 1 for name, tensor in WEIGHTS.items()
}
PAIR_MANIFEST = {name: {"dtype": "float32", "shape": [4, 8]} for name in PAIR}
