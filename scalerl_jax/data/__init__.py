"""Where prompts come from: tasks, tokenizers, supervised texts, prompt order.

Host-side numpy only; nothing here knows of the policy or the sampler.
"""
