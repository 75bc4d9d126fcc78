"""Import this before any kernel: without a GPU, Triton's kernels run under its interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
