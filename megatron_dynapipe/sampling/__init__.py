"""Which samples an iteration holds: lengths on disk, maximum lengths, mixture, sampler. No text, no torch."""

from megatron_dynapipe.core.batch import GlobalBatch
from megatron_dynapipe.sampling.batches import Batches, LastBatch
from megatron_dynapipe.sampling.cutting import Cutter, TruncationSide
from megatron_dynapipe.sampling.lengths import LengthTable, read_task_ids
from megatron_dynapipe.sampling.long_samples import LongSampleReport, LongSamples
from megatron_dynapipe.sampling.sampler import Sampler, SamplerSettings
from megatron_dynapipe.sampling.spans import SpanTable, spans_path
