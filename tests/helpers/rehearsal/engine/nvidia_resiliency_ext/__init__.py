"""What Megatron-Bridge imports of nvidia-resiliency-ext whether it is used or not; wheels of 0.6 need a newer glibc."""

__version__ = "0.0.0"
