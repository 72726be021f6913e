"""Making a dataset folder: text → tokens on all cores, splits, manifest."""

from megatron_dynapipe.tools.prepare.run import prepare_dataset, prepare_mixture
from megatron_dynapipe.tools.prepare.settings import BadRows, PrepareSettings, Skipped, TextSample
