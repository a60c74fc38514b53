"""Public training scripts, re-created small in `benchmarks/scripts`, unmodified under `flowscope run`.

    python benchmarks/public_scripts.py [NAME...] [--write docs/public-scripts.md]

Each prints its losses, one a step, behind the name of the net they belong to. Asked of each: the script ends well, no
warning and no error is raised, each net's records hold the losses the script printed for it, and the flows are the
ones that reading the script shows.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flowscope.records import SERIOUS, Run
from flowscope.sinks import read_run

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).resolve().parent / "scripts"

Flows = tuple[str, ...]
NET: dict[str, dict[str, Flows]] = {
    "actor_critic": {"net": ("affine1 > action_head x2",)},
    "dcgan": {"generator": ("main.2 > main.7 x3",), "discriminator": ("main.1 > main.6 x3",)},
    "diffusion": {"net": ("blocks.0:input > blocks.2 x4",)},
    "dqn": {"net": ("network.1 > network.4 x3",)},
    "gcn": {"net": ("gc1 > gc2 x2",)},
    "imagenet": {
        "net": ("layer1.0:input > layer2.1 x5", "layer1.0:input > layer1.1 x3", "layer2.0:input > layer2.1 x3")
    },
    "mnist": {"net": ("conv1 > fc2 x4",)},
    "nanogpt": {"net": ("transformer.h.0:input > transformer.h.3 x5",)},
    "ppo": {"net": ("critic.1 > critic.4 x3", "actor.1 > actor.4 x3")},
    "regression": {"net": ()},
    "reinforce": {"net": ("affine1 > affine2 x2",)},
    "siamese": {"net": ("encoder.1 > encoder.5 x3", "fc.1 > fc.2 x2")},
    "super_resolution": {"net": ("conv1 > conv4 x4",)},
    "time_sequence_prediction": {"net": ("lstm1#0 > lstm1#11 x12", "lstm2#0 > lstm2#11 x12")},
    "vae": {"net": ("fc1 > fc4 x4",)},
    "vision_transformer": {"net": ("encoders.0:input > encoders.3 x5",)},
    "wgan_gp": {"critic": ("1 > 4 x3",), "generator": ("1 > 4 x3",)},
    "word_language_model": {"net": ("rnn#0 > rnn#9 x10", "rnn#0 > rnn#9 x10")},
}
"""Script -> net -> its flows, each as "FIRST > LAST xPOINTS"."""


@dataclass
class Outcome:
    """What became of one script.

    Attributes:
        name: the script's file without its ending.
        steps: how many optimizer steps its nets made in all.
        figure: the script's own final figure.
        wrong: what was not as it should be.
        flows: net -> flows, as they were found.
        seconds: wall time.
    """

    name: str
    steps: int = 0
    figure: float = float("nan")
    wrong: list[str] = field(default_factory=list)
    flows: dict[str, Flows] = field(default_factory=dict)
    seconds: float = 0.0


def run(name: str, folder: Path) -> Outcome:
    """Run a script under `flowscope run`, every step sampled as it is by default, and judge what was recorded."""
    start = time.monotonic()
    command = [sys.executable, "-m", "flowscope", "run", "--log-dir", str(folder), str(SCRIPTS / f"{name}.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    outcome = Outcome(name, seconds=time.monotonic() - start)
    if done.returncode:
        outcome.wrong.append(f"status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
        return outcome
    printed: dict[str, list[float]] = defaultdict(list)
    for line in done.stdout.splitlines():
        net, _, value = line.partition(" ")
        printed[net].append(float(value))
    (outcome.figure,) = printed.pop("figure")
    outcome.steps = sum(map(len, printed.values()))
    runs = [read_run(file.parent) for file in sorted(folder.rglob("flowscope.jsonl"))]
    for found in runs:
        _judge(outcome, found, printed)
    if printed:
        outcome.wrong.append(f"no run has the losses of {', '.join(printed)}")
    if NET.get(name) != outcome.flows:
        outcome.wrong.append(f"flows {outcome.flows}, expected {NET.get(name)}")
    return outcome


def _judge(outcome: Outcome, found: Run, printed: dict[str, list[float]]) -> None:
    """Give a run to the net whose losses it holds, and take down what is wrong with it."""
    raised = [alert for alert in found.alerts if alert.state == "raised" and alert.severity in SERIOUS]
    outcome.wrong += [f"{alert.kind} at {alert.where or 'the model'}, step {alert.step}" for alert in raised]
    for net, losses in printed.items():
        steps = [record.step for record in found.records]
        told = [record.loss for record in found.records]
        known = steps and max(steps) < len(losses) and None not in told
        if known and np.allclose(np.array(told, dtype=float), np.array(losses)[steps], rtol=1e-5, atol=1e-7):
            del printed[net]
            flows = found.header.flows if found.header is not None else ()
            outcome.flows[net] = tuple(f"{f.points[0]} > {f.points[-1]} x{len(f.points)}" for f in flows)
            return
    outcome.wrong.append(f"a run of {len(found.records)} records holds no printed losses: {[*map(str, told)][:3]}")


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a table."""
    rows = ["| script | steps | its own figure | flows | wrong |", "|---|---|---|---|---|"]
    for o in outcomes:
        flows = "; ".join(f"{net}: {', '.join(flows) or 'none'}" for net, flows in o.flows.items())
        rows.append(f"| {o.name} | {o.steps} | {o.figure:.3g} | {flows} | {'; '.join(o.wrong) or 'nothing'} |")
    return "\n".join(rows)


def main() -> int:
    """Run the named scripts, or all; returns how many were not as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    outcomes = []
    for name in arguments.names or sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "data"):
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(run(name, Path(folder) / "run"))
        print(table(outcomes[-1:]).splitlines()[-1], f"({outcomes[-1].seconds:.0f} s)", flush=True)
    if arguments.write:
        arguments.write.write_text(HEAD + table(outcomes) + "\n", encoding="utf-8")
    return sum(bool(outcome.wrong) for outcome in outcomes)


HEAD = """# Public training scripts

Training scripts as they stand in public repositories, re-created small and in our own words (`benchmarks/scripts`), on
made-up data, run unmodified under `flowscope run`. "Wrong" lists warnings and errors raised, losses that are not those
the script printed, and flows that are not the script's. Made by `make scripts`.

"""


if __name__ == "__main__":
    sys.exit(main())
