"""The decoder's arithmetic on an NVIDIA GPU: Triton kernels, cuBLAS products, CUDA graphs.

``device.py`` says whether this machine can do it. ``ops.py`` is the implementation of
``ops/interface.py``; ``layout.py`` packs what a step's kernels read into one buffer, ``ring.py``
brings it to the device, ``attention.py`` and ``rows.py`` launch the kernels, ``graphs.py`` records
and replays decode steps, ``pool.py`` holds KV on the device, ``streams.py`` orders whoever touches
it, and ``flashinfer.py`` is another attention to choose. Only ``attention_kernels.py`` and
``row_kernels.py`` import triton, and only this package imports those, so nothing of it is loaded
where a CPU computes.

Kernels are compiled with products and sums fused, whatever Triton's own default is: the bits of KV
must not change with its version. Every kernel also runs in Triton's interpreter
(``TRITON_INTERPRET=1``) over CPU tensors.
"""
