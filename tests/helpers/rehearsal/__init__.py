"""A rehearsal of CUDA: PyTorch with GPUs whose memory is the host's and whose kernels are the CPU's.

    subprocess.run(command, env=launch.environment(8))      # eight H100s, for every process that imports torch

Faked is PyTorch's border alone, and all of it beneath Python's `torch`: what stands at operators' CUDA entries, the
devices that autograd and allocators ask, groups of the backend `nccl`, the driver's libraries (`csrc/`); and the few
functions through which Python reaches the driver (`devices`). Megatron, our package and PyTorch's Python run as they
do on GPUs. `launch.environment` starts any command so; `tests/rehearsal` says what is rehearsed.
"""
