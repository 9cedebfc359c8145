"""TRL: a step of its GRPO trainer on torch.

    python trl_engine.py --checkpoint=DIR --dtype=float32

One `trainer.train()` is under way; a step is the time between two of its
`on_step_end`, the rollouts, rewards and update in it. Nothing is logged,
saved or evaluated. The loss and beta (0: no reference policy) are defaults.
`bfloat16`: float32 weights under the trainer's own mixed precision.
"""
# pyright: reportMissingImports=false

import argparse
import importlib.metadata
import tempfile

import datasets
import engine
import numpy as np
import tokenizers
import transformers
import trl
import workloads

# Completions a micro-batch of the update; of 16, 32, 64 and 128.
TRAIN_MICRO_BATCH = 32


def tokenizer() -> transformers.PreTrainedTokenizerFast:
  """Texts such as "17 4 1001" are the ids themselves."""
  words = {str(number): number for number in range(workloads.VOCAB + 1)}
  base = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(words, unk_token=str(workloads.PAD))
  )
  base.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=base,
    pad_token=str(workloads.PAD),
    eos_token=str(workloads.END),
    padding_side="left",
  )


def reward(completion_ids: list[list[int]], **_) -> list[float]:
  """The workloads' reward, of ids."""
  return [workloads.reward(np.array(ids)) for ids in completion_ids]


class BetweenSteps(transformers.TrainerCallback):
  """Blocks the trainer's loop until a step is asked for.

  Args:
    wait: ends the step that ran and blocks.
  """

  def __init__(self, wait):
    self._wait = wait

  def on_train_begin(self, args, state, control, **_) -> None:
    """Before the first step."""
    self._wait()

  def on_step_end(self, args, state, control, **_) -> None:
    """After each update."""
    self._wait()


def stepped(checkpoint: str, dtype: str):
  """A workload of the protocol: rollouts, rewards and one GRPO update."""
  requests = workloads.step()
  prompts = [" ".join(map(str, prompt)) for prompt in requests.prompts]
  folder = tempfile.mkdtemp()

  def loop(wait) -> None:
    trainer = trl.GRPOTrainer(
      model=checkpoint,
      reward_funcs=reward,
      args=trl.GRPOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": "float32"},
        bf16=dtype == "bfloat16",
        learning_rate=workloads.LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=1_000_000,
        per_device_train_batch_size=TRAIN_MICRO_BATCH,
        gradient_accumulation_steps=workloads.SEQUENCES // TRAIN_MICRO_BATCH,
        num_generations=workloads.GROUP,
        max_completion_length=workloads.COMPLETION,
        use_vllm=False,
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
      ),
      train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
      processing_class=tokenizer(),
      callbacks=[BetweenSteps(wait)],
    )
    trainer.train()

  turns = engine.Turns(loop)
  tokens = workloads.GROUP * requests.tokens

  def run(_: int) -> engine.Answer:
    return {"seconds": turns.step(), "tokens": tokens, "extra": {}}

  return run


def main() -> None:
  """Serves the workload that was asked for."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--checkpoint", required=True)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--workloads", default="step")
  options = parser.parse_args()
  engine.serve(
    {
      name: stepped(options.checkpoint, options.dtype)
      for name in options.workloads.split(",")
    },
    {
      name: importlib.metadata.version(name)
      for name in ("trl", "transformers", "torch")
    },
  )


if __name__ == "__main__":
  main()
