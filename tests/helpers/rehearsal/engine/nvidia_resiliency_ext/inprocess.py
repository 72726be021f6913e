"""Names of Megatron-Bridge's annotations."""


class CallWrapper:
    """A restarted call, of which there is none."""
