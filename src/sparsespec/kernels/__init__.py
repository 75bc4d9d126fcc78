"""GPU kernels in Triton. They know tensors only; what a batch or a request is stays above.

Without a GPU they run under Triton's interpreter, if TRITON_INTERPRET=1 is set before they are imported.
"""
