"""Settings of this room's tests."""

import logging

# PyTorch writes a record for every step of a trace, for tools that are not there; pytest would keep them all.
logging.getLogger("torch.__trace").propagate = False
