"""Group-relative policy optimisation by TRL's GRPOTrainer: the reward counts different letters."""

import tempfile

from datasets import Dataset
from tiny import decoder, sentences, tokenizer
from trl import GRPOConfig, GRPOTrainer


def variety(completions, **kwargs):
    return [len(set(text)) / 20 for text in completions]


options = GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=12,
    max_steps=5,
    learning_rate=1e-3,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    use_cpu=True,
)
prompts = Dataset.from_dict({"prompt": sentences(64)})
trainer = GRPOTrainer(
    model=decoder(), reward_funcs=variety, args=options, train_dataset=prompts, processing_class=tokenizer()
)
trainer.train()
