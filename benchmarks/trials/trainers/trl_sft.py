"""Supervised fine-tuning by TRL's SFTTrainer, two micro-batches a step."""

import tempfile

from datasets import Dataset
from tiny import decoder, sentences, tokenizer
from trl import SFTConfig, SFTTrainer

options = SFTConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=5,
    learning_rate=1e-3,
    max_length=64,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    use_cpu=True,
)
texts = Dataset.from_dict({"text": sentences()})
SFTTrainer(model=decoder(), args=options, train_dataset=texts, processing_class=tokenizer()).train()
