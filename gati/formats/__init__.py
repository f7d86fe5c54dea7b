"""The whole early-exit network as one file that runs without Gati: ONNX, torch.export, Triton."""
