"""Hugging Face transformers: `generate` on torch.

    python transformers_engine.py --checkpoint=DIR --dtype=float32

Settings that matter: no end-of-sequence id, so exactly the tokens asked for;
log-probs from the logits that `generate` keeps anyway.
"""
# pyright: reportMissingImports=false

import argparse
import importlib.metadata
import time

import engine
import numpy as np
import torch
import transformers
import workloads

ATTENTION = "sdpa"


def load(checkpoint: str, dtype: torch.dtype):
  """The checkpoint as transformers' own Qwen3."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
    checkpoint, dtype=dtype, attn_implementation=ATTENTION
  )
  return model.eval()


def chosen_logps(logits: tuple[torch.Tensor, ...], tokens: torch.Tensor):
  """Log-probs `[B, T]` of drawn tokens `[B, T]`, a step's logits at a time."""
  found = [
    torch.log_softmax(step, -1).gather(-1, tokens[:, position, None])
    for position, step in enumerate(logits)
  ]
  return torch.cat(found, -1)


def sample(model, requests: workloads.Requests) -> None:
  """Samples a batch to its longest length, with log-probs."""
  tokens = torch.from_numpy(workloads.left_padded(requests.prompts)).long()
  most = int(requests.lengths.max())
  with torch.inference_mode():
    found = model.generate(
      tokens,
      attention_mask=(tokens != workloads.PAD).long(),
      max_new_tokens=most,
      do_sample=True,
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      eos_token_id=None,
      pad_token_id=workloads.PAD,
      return_dict_in_generate=True,
      output_logits=True,
    )
    drawn = found.sequences[:, tokens.shape[1] :]
    logps = chosen_logps(found.logits, drawn)
  assert drawn.shape == logps.shape == (len(requests.prompts), most)


def sampled(model, requests: workloads.Requests):
  """A workload of the protocol: batches of 256, one after the other."""
  ready = workloads.batches(requests, workloads.SEQUENCES)

  def run(repeat: int) -> engine.Answer:
    if repeat == 0:  # nothing is compiled: a few tokens warm the threads
      few = np.minimum(requests.lengths, 16)
      sample(model, workloads.batches(requests._replace(lengths=few), 256)[0])
      return {"seconds": 0.0, "tokens": 0, "extra": {}}
    torch.manual_seed(repeat)
    start = time.perf_counter()
    for batch in ready:
      sample(model, batch)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": requests.tokens, "extra": {}}

  return run


def main() -> None:
  """Serves the workloads that were asked for."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--checkpoint", required=True)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--workloads", default="sampling,long_tail")
  options = parser.parse_args()
  model = load(options.checkpoint, getattr(torch, options.dtype))
  engine.serve(
    {
      name: sampled(model, getattr(workloads, name)())
      for name in options.workloads.split(",")
    },
    {
      name: importlib.metadata.version(name)
      for name in ("transformers", "torch")
    },
  )


if __name__ == "__main__":
  main()
