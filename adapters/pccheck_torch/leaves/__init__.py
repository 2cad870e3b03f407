"""What of PyTorch can be a leaf: dense tensors, what is made of parts, parts of global arrays, small things."""
