"""The base model: loading it and its data safely, finding blocks, collecting hidden outputs, cutting."""
