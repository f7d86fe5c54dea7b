"""Classify images with an exported early-exit network: python run_exported.py model.onnx images.npz

Nothing but NumPy and ONNX Runtime. `gati export DIR --out model.onnx --raw-input` writes the model.
"""

import json
import sys

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
notes = session.get_modelmeta().custom_metadata_map
if notes["input"] != "image":
    sys.exit(f"{sys.argv[1]} takes preprocessed inputs: export it again with --raw-input")
names = json.loads(notes["class_names"])  # null if the library has none
blocks = [leaving["block"] for leaving in json.loads(notes["exits"])]
for image in np.load(sys.argv[2])["images"][:10]:  # uint8 [N, H, W, C]
    probabilities, (left_at,), _ = session.run(None, {"input": image[None]})
    where = f"after {blocks[left_at]}" if left_at < len(blocks) else "at the end"
    found = int(probabilities.argmax())
    print(f"class {names[found] if names else found} with {probabilities.max():.1%}, {where}")
