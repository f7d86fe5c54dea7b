"""The whole early-exit network as one file that runs without Gati: ONNX, torch.export, Triton."""

from gati.verb import make_verb

make_verb(__name__)
