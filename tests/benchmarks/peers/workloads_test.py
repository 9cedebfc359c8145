"""The work of the comparison: the same for all, of the sizes it says."""

import doctest
import json
import math

import numpy as np
from safetensors.numpy import load_file

from benchmarks.peers import table, workloads


def test_requests_are_the_same_every_time():
  for make in (workloads.sampling, workloads.long_tail, workloads.step):
    one, other = make(), make()
    np.testing.assert_array_equal(one.lengths, other.lengths)
    for a, b in zip(one.prompts, other.prompts, strict=True):
      np.testing.assert_array_equal(a, b)


def test_even_work_is_256_sequences_of_160_tokens():
  sampled, stepped = workloads.sampling(), workloads.step()
  assert {len(p) for p in sampled.prompts + stepped.prompts} == {32}
  assert len(sampled.prompts) == len(stepped.prompts) * workloads.GROUP == 256
  assert set(sampled.lengths) | set(stepped.lengths) == {128}


def test_no_prompt_holds_padding_or_an_end():
  for make in (workloads.sampling, workloads.long_tail, workloads.step):
    tokens = np.concatenate(make().prompts)
    assert tokens.min() >= workloads.FIRST_TOKEN
    assert tokens.max() < workloads.VOCAB <= workloads.END


def test_long_tail_has_the_mean_and_the_cut_of_its_law():
  requests = workloads.long_tail()
  prompts = np.array([len(prompt) for prompt in requests.prompts])
  assert len(prompts) == len(requests.lengths) == 1024
  assert prompts.min() == 8
  assert prompts.max() == 64
  assert requests.lengths.min() >= 1
  assert requests.lengths.max() == 512

  # E[min(X, c)] of a log-normal of mean m: m Φ(d - σ) + c (1 - Φ(d)).
  def normal(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))

  d = math.log(512 / 64) + 0.5
  mean = 64 * normal(d - 1) + 512 * (1 - normal(d))
  error = requests.lengths.std() / math.sqrt(1024)
  assert abs(requests.lengths.mean() - mean) < 2 * error
  logs = np.log(requests.lengths[requests.lengths < 512])
  assert abs(logs.std() - 1) < 0.1


def test_batches_keep_the_order_and_every_request():
  requests = workloads.long_tail()
  found = workloads.batches(requests, 300)
  assert [len(batch.prompts) for batch in found] == [300, 300, 300, 124]
  lengths = np.concatenate([batch.lengths for batch in found])
  np.testing.assert_array_equal(lengths, requests.lengths)
  assert sum(batch.tokens for batch in found) == requests.tokens


def test_checkpoint_is_read_back_and_has_its_size(tmp_path):
  workloads.write_checkpoint(tmp_path / "new")
  found = load_file(tmp_path / "new" / "model.safetensors")
  for name, value in workloads.weights().items():
    np.testing.assert_array_equal(found.pop(name), value)
  assert not found
  size = sum(value.size for value in workloads.weights().values())
  norms = 4 * (2 * 256 + 2 * 64) + 256
  layer = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 768 * 256
  assert size == 1024 * 256 + 4 * layer + norms
  told = json.loads((tmp_path / "new" / "config.json").read_text())
  assert told["num_hidden_layers"] == 4
  assert told["tie_word_embeddings"]


def test_examples_hold():
  for module in (workloads, table):
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed
