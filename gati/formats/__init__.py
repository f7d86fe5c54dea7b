"""Export an early-exit network to a single file that runs without Gati: ONNX, torch.export or Triton."""
