"""SmolLM2-135M-Instruct learns reasoning-gym's arithmetic, on two CPU cores.

ScaleRL's recipe on a published model: sums and differences of two small
numbers, asked in the model's own chat template. The base policy gets one in
four right and mostly talks instead; the reward is the right number.

Command:  python -m scalerl_jax.main \
            --config=experiments/smollm2_arithmetic.py \
            --workdir=runs/smollm2_arithmetic
          with the checkpoint in a folder of its own:
            --set model.checkpoint=FOLDER
Hardware: two CPU cores, 8 GiB; for one GPU (not tried) add
            --set run.steps=400 --set batch.prompts=48 --set sampler.slots=384
          a float32 trainer with a bfloat16 generator (not tried) has
            --set model.dtype=float32 --set sampler.dtype=bfloat16
Time:     50 minutes beside other jobs; a step took 20 to 60 s
Reaches:  held-out pass rate .25 -> .77 (run.seed 0; .87 at step 32): paired
          over 64 prompts +.52, standard error .04; on training prompts .28
          (first five steps) -> .80 (last five). The base policy's weights
          were those of a 4-bit file. Sampler and learner differ by .06 nats a
          token on average, 3.3 at most: both bodies are bfloat16.
"""

from scalerl_jax.config import Config, override

CHECKPOINT = "HuggingFaceTB/SmolLM2-135M-Instruct"


def get_config() -> Config:
  """Tens of steps of 16 prompts x 8 completions."""
  return override(
    Config(),
    {
      "run.steps": 40,
      "model.checkpoint": CHECKPOINT,
      "model.dtype": "bfloat16",
      "model.remat": "block",
      "supervised.steps": 0,
      "task.name": "reasoning_gym",
      "task.dataset": "basic_arithmetic",
      "task.parameters": "min_terms=2, max_terms=2, min_digits=1, max_digits=1,"
      " operators=['+', '-'], allow_parentheses=False",
      "task.instruction": " Reply with the number only.",
      "task.train_prompts": 128,
      "task.heldout_prompts": 64,
      "sampler.slots": 128,
      "sampler.chunk": 8,
      "sampler.max_prompt_tokens": 48,
      "sampler.max_completion_tokens": 16,
      "sampler.temperature": 0.7,
      "batch.prompts": 16,
      "batch.group_size": 8,
      "batch.micro_batch": 16,
      "loss.logprob_chunk": 256,
      "optimizer.learning_rate": 2e-5,
      "pipeline.max_staleness": 2,
      "evaluation.every": 8,
      "evaluation.samples": 4,
      "checkpoint.every": 20,
    },
  )
