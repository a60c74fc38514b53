"""The diagnoser that comes with the operators: its features of a run, and its own models, used as it documents them.

It was taught on fine-tuned BERT-base and GPT-2; students of three layers are far from those, which is no criticism of
it. Its runs are trained again, because it looks at the steps itself.
"""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.rivals.answers import SILENT, Answer
from benchmarks.rivals.mutants import CLEAN, Mutant
from benchmarks.rivals.students import FOLDER, RATE, STEPS, Student, batches, beginner
from benchmarks.rivals.tuning import folder_of

EPOCH, EVERY = 20, 5
"""It looks at each fifth step, and at hidden states in each tenth, as its default is."""


def features(student: Student, mutant: Mutant, seed: int, root: Path = FOLDER, steps: int = STEPS) -> dict[str, float]:
    """Return the package's feature vector of one run; made once."""
    path = folder_of(student, mutant, seed, root) / "features.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path.write_text(json.dumps(extracted(student, mutant, seed, root, steps)))
    return json.loads(path.read_text())


def extracted(student: Student, mutant: Mutant, seed: int, root: Path, steps: int) -> dict[str, float]:
    """Train once more with the package's extractor."""
    from defaultplusplus import ExtractionConfig, FeatureExtractor

    model = beginner(student, seed, root)
    with (
        nullcontext() if mutant == CLEAN else mutant.injector(model),
        FeatureExtractor(model, arch=student.scope, config=ExtractionConfig(activation_interval=2)) as seen,
    ):
        if student.scope == "encoder":
            # its taps compare a BERT's intermediate layer with its narrower input; without them it uses states
            seen.collector.sublayer_capture.remove()
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / steps)
        stream = batches(student.tuning, seed)
        for k in range(steps):
            batch, looks = next(stream), k % EVERY == 0
            outputs = model(**batch, output_attentions=looks, output_hidden_states=looks)
            optimizer.zero_grad()
            outputs.loss.backward()
            if looks:
                seen.step(loss=outputs.loss, outputs=outputs, optimizer=optimizer, **batch)
            optimizer.step()
            schedule.step()
            if k % EPOCH == EPOCH - 1:
                seen.epoch_end()
        return {name: float(value) for name, value in seen.finalize().items()}


def diagnosed(student: Student, found: dict[str, float]) -> Answer:
    """Return what its model says of a feature vector; the place is the component it names."""
    from defaultplusplus.diagnosis import load_pretrained
    from defaultplusplus.processing import RuntimeNormalizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        diagnosis = load_pretrained(student.scope).predict(
            RuntimeNormalizer.load(student.scope).encode(found, mode="raw")
        )
    return Answer(True, diagnosis.category or "", diagnosis.root_cause or "") if diagnosis.is_faulty else SILENT
