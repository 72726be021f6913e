"""Every sample of a dataset is trained as often as it should be, after resumes and on any number of replicas."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.sampling import LastBatch, LengthTable, LongSamples, Sampler, SamplerSettings
from tests.helpers.examples import examples

mixtures = st.lists(st.tuples(st.integers(1, 12), st.floats(0.1, 5)), min_size=1, max_size=5)


def table(tasks: list[tuple[int, float]], seed: int) -> tuple[LengthTable, np.ndarray]:
    random = np.random.default_rng(seed)
    count = sum(size for size, _ in tasks)
    inputs, targets = random.integers(1, 60, count, dtype=np.int32), random.integers(1, 20, count, dtype=np.int32)
    ids = np.repeat(np.arange(len(tasks)), [size for size, _ in tasks]).astype(np.int16)
    return LengthTable(input=inputs, target=targets), random.permutation(ids) if seed % 2 else ids


@settings(max_examples=examples(60))
@given(
    tasks=mixtures,
    seed=st.integers(0, 1000),
    samples=st.sampled_from([1, 7, 90]),
    has_rates=st.booleans(),
    tokens=st.none() | st.integers(30, 300),
    last=st.sampled_from([LastBatch.CONTINUE, LastBatch.KEEP]),
    epochs=st.integers(1, 3),
    resumes=st.lists(st.integers(0, 40), max_size=4),
    policy=st.sampled_from([LongSamples.SKIP, LongSamples.TRUNCATE]),
)
def test_resumed_runs_see_what_an_uninterrupted_one_sees(
    tasks, seed, samples, has_rates, tokens, last, epochs, resumes, policy
):
    lengths, ids = table(tasks, seed)
    usable = np.flatnonzero(lengths.input <= 40) if policy is LongSamples.SKIP else np.arange(len(lengths))
    run = SamplerSettings(
        family=ModelFamily.T5,
        seed=seed,
        samples_per_iteration=samples,
        max_input_length=40,
        max_target_length=20,
        long_samples=policy,
        task_rates=tuple(rate for _, rate in tasks) if has_rates else (),
        tokens_per_iteration=tokens,
        last_batch=last,
        epochs=epochs,
    )
    if not len(usable):
        return
    whole = Sampler(lengths, run, ids)
    count = whole.batches.count
    assert count is not None
    batches = [whole.batch(iteration).sample_ids.tolist() for iteration in range(count)]
    drawn = Counter(sample for batch in batches for sample in batch)
    assert set(drawn) <= set(usable.tolist())
    if has_rates:
        for task in set(ids[usable].tolist()):
            times = [drawn[sample] for sample in usable.tolist() if ids[sample] == task]
            assert max(times) - min(times) <= 1
    else:
        stream = np.concatenate(batches).reshape(epochs, len(usable))
        assert (np.sort(stream) == usable).all()
    for iteration in resumes:
        if iteration < count:
            batch = Sampler(lengths, run, ids).batch(iteration)
            assert batch.sample_ids.tolist() == batches[iteration]
            assert (batch.input_lengths == np.minimum(lengths.input[batch.sample_ids], 40)).all()
