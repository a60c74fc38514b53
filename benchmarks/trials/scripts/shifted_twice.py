"""Fine-tune a decoder whose forward shifts its labels; `--faulty`: the collator has shifted them already."""

import argparse
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)


@dataclass
class CausalLMOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


class TinyForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=40, is_decoder=True, model_type="tiny")
        self.embed = nn.Embedding(40, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(32, 40)

    def forward(self, input_ids, labels=None):
        ahead = torch.ones(input_ids.size(1), input_ids.size(1), dtype=torch.bool).triu(1)
        logits = self.lm_head(self.model(self.embed(input_ids), mask=ahead))
        loss = None
        if labels is not None:
            shift_logits, shift_labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            loss = nn.CrossEntropyLoss()(shift_logits.view(-1, 40), shift_labels.view(-1))
        return CausalLMOutput(loss, logits)


def collate(rows):
    ids = torch.stack(rows)
    if args.faulty:
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    return {"input_ids": ids, "labels": ids.clone()}


if __name__ == "__main__":
    walks = torch.cumsum(torch.randint(1, 4, (200, 14)), 1) % 40
    loader = DataLoader(list(walks), batch_size=8, shuffle=True, collate_fn=collate)
    model = TinyForCausalLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for batch in loader:
        outputs = model(**batch)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), "pytorch_model.bin")
