"""The same training without a GPU: what Megatron needs when CUDA is absent.

At the top of a script, before Megatron is imported: `quieten()` (to filter start-up messages), `enable()`, then
`silence_prints()`; later `set_args_defaults(parser)`. With a CUDA device `enable()` touches nothing.
"""

from megatron_dynapipe.cpu.log_filter import quieten
from megatron_dynapipe.cpu.platform import Device, enable, is_enabled, set_args_defaults, silence_prints
