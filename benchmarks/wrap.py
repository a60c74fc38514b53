"""What wrapping costs, as ratios to the plain model and to the `hyper-connections` package, measured in the same run.

    python benchmarks/wrap.py                                 all sections
    python benchmarks/wrap.py --sections eager --pairs 200 --write docs/wrap.md

A step is forward and backward. Every variant has its own model with equal weights; in each round each variant takes one
step on the same batch, in rotating order, and a ratio is formed within the round. The plain variant runs twice: its
ratio to itself is the error of the method. Sections: eager (every mode and the package), wide (hyper-connections and
the package at d=512), interception (cost a site), memory (peak of a step), compiled.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from overhead import BATCH, DEPTH, LENGTH, WIDTH, ByteLM, batches, lm_loss, load_text, run_sections
from pairing import CLOCKS, RATIO_HEAD, Batch, Ratio, Runner, Times, interleave, ratio
from torch import Tensor, nn

import flowscope

STREAMS = 4
PEER = "hyper-connections 0.4.11"
MODES: dict[str, str] = {  # mode -> norm of the model it is put on
    "residual": "pre",
    "keel": "pre",
    "highway": "pre",
    "keel-postln": "pre",
    "deepnorm": "post",
    "shc": "pre",
    "dhc": "pre",
    "mhc": "pre",
}
PEER_LIMITS = {"dhc": 0.7, "mhc": 0.4}
SITE_LIMIT = 25.0  # us
WIDE = {"depth": 4, "width": 512}
WIDE_BATCH = 4


class PassRunner(Runner):
    """Times forward and backward alone: the optimizer's part is the same for every variant."""

    def step(self, batch: Batch) -> float:
        start = self.clock()
        self.forward_backward(self.model, batch)
        seconds = self.clock() - start
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seconds


class PeerLM(nn.Module):
    """The same decoder with the package's connections around its sub-layers, as its README says."""

    def __init__(self, model: ByteLM, manifold: bool) -> None:
        super().__init__()
        import hyper_connections as package

        prefix = "mc_" if manifold else ""
        functions = getattr(package, f"{prefix}get_init_and_expand_reduce_stream_functions")(STREAMS)
        init, self.expand, self.reduce = functions
        self.embed, self.position, self.final, self.head = model.embed, model.position, model.final, model.head
        branches = [
            branch
            for block in model.blocks
            for branch in (nn.Sequential(block.norm1, block.attention), nn.Sequential(block.norm2, block.mlp))
        ]
        width = model.embed.embedding_dim
        self.layers = nn.ModuleList(init(dim=width, branch=f, layer_index=k) for k, f in enumerate(branches))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.expand(self.embed(tokens) + self.position[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return self.head(self.final(self.reduce(x)))


def plain_lm(norm: str = "pre", depth: int = DEPTH, width: int = WIDTH) -> ByteLM:
    torch.manual_seed(0)
    return ByteLM(norm=norm, depth=depth, width=width, heads=4, length=LENGTH)


def wrapped_lm(mode: str, depth: int = DEPTH, width: int = WIDTH) -> nn.Module:
    model = plain_lm(MODES[mode], depth, width)
    options = {"streams": STREAMS} if mode in ("shc", "dhc", "mhc") else {}
    return flowscope.wrap(model, mode, example_inputs=torch.zeros(2, LENGTH, dtype=torch.long), **options)


def runner(name: str, model: nn.Module, *, compiled: bool = False) -> Runner:
    if compiled:
        model.compile(fullgraph=not name.startswith(PEER))
    return PassRunner(name, model, torch.optim.SGD(model.parameters(), lr=1e-3), lm_loss)


def peer_runners(depth: int = DEPTH, width: int = WIDTH, *, compiled: bool = False) -> list[Runner]:
    try:
        import hyper_connections  # noqa: F401
    except ImportError:
        print(f"{PEER} is not installed and was skipped")
        return []
    models = {mode: PeerLM(plain_lm(depth=depth, width=width), manifold=mode == "mhc") for mode in PEER_LIMITS}
    return [runner(f"{PEER}, {mode}", model, compiled=compiled) for mode, model in models.items()]


def data(batch: int = BATCH) -> Iterator[Batch]:
    return batches(load_text(), batch=batch, length=LENGTH)


def head(times: Times, depth: int = DEPTH, width: int = WIDTH, batch: int = BATCH) -> str:
    return (
        f"{depth} pre-norm blocks, d={width}, B={batch}, T={LENGTH}, {STREAMS} streams, forward and backward; "
        f"the plain pass takes {1e3 * np.median(times):.1f} ms."
    )


def tables(times: dict[str, Times], modes: list[str], limits: dict[str, float]) -> list[str]:
    """The ratios of each mode to the plain model, and those of hyper-connections to the package."""
    bare, post = times["plain"], times.get("plain, post-norm")
    rows = [ratio("plain again (A/A)", times["plain again"], bare, note="the method's own error")]
    for mode in modes:
        base = post if MODES[mode] == "post" and post is not None else bare
        rows.append(ratio(mode, times[mode], base, note="to a plain post-norm model" if base is post else ""))
    lines = [RATIO_HEAD, *(row.row() for row in rows)]
    peers: list[Ratio] = []
    for mode in PEER_LIMITS:
        name = f"{PEER}, {mode}"
        if name in times:
            lines.append(ratio(name, times[name], bare).row())
            if mode in times:
                peers.append(ratio(f"{mode} to {name}", times[mode], times[name], limit=limits.get(mode)))
                peers.append(ratio(f"plain to {name}", bare, times[name], note="no connection can be below"))
    return [*lines, *(["", RATIO_HEAD, *(row.row() for row in peers)] if peers else [])]


def eager_section(args: argparse.Namespace) -> list[str]:
    """Every mode and the package's connections."""
    modes = args.modes.split(",")
    runners = [runner("plain", plain_lm()), runner("plain again", plain_lm())]
    if any(MODES[mode] == "post" for mode in modes):
        runners.append(runner("plain, post-norm", plain_lm("post")))
    runners += [*(runner(mode, wrapped_lm(mode)) for mode in modes), *peer_runners()]
    times = interleave(runners, data(), args.pairs, warmup=args.warmup)
    return ["## Eager", "", head(times["plain"]), "", *tables(times, modes, PEER_LIMITS)]


def wide_section(args: argparse.Namespace) -> list[str]:
    """Hyper-connections and the package where a branch costs more than a merge."""
    runners = [runner(name, plain_lm(**WIDE)) for name in ("plain", "plain again")]
    runners += [*(runner(mode, wrapped_lm(mode, **WIDE)) for mode in PEER_LIMITS), *peer_runners(**WIDE)]
    times = interleave(runners, data(WIDE_BATCH), args.pairs, warmup=args.warmup)
    return ["## Wide", "", head(times["plain"], **WIDE, batch=WIDE_BATCH), "", *tables(times, [*PEER_LIMITS], {})]


def compiled_section(args: argparse.Namespace) -> list[str]:
    """The same under torch.compile (ours fullgraph), inductor; fewer blocks, as compiling takes minutes."""
    depth, modes = args.compiled_depth, [mode for mode in args.modes.split(",") if mode in ("keel", "dhc", "mhc")]
    runners = [runner(name, plain_lm(depth=depth), compiled=True) for name in ("plain", "plain again")]
    runners += [runner(mode, wrapped_lm(mode, depth), compiled=True) for mode in modes]
    runners += peer_runners(depth, compiled=True)
    times = interleave(runners, data(), args.pairs, warmup=args.warmup)
    text = f"{head(times['plain'], depth)} Ours with fullgraph=True."
    return ["## Compiled", "", text, "", *tables(times, modes, {})]


class NarrowBlock(nn.Module):
    """Two residual adds around the cheapest branches there are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.01 * self.first(x)
        return x + 0.01 * self.second(x)


class Narrow(nn.Module):
    """256 merge sites of width 32, where interception is most of the work."""

    def __init__(self, depth: int = 128, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NarrowBlock(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def narrow_data() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    while True:
        x = torch.randn(4, 6, 32, generator=generator)
        yield x, x


def interception_section(args: argparse.Namespace) -> list[str]:
    """The mode `residual` computes what the model did: what it takes longer is the interception."""

    def narrow(name: str) -> Runner:
        torch.manual_seed(0)
        model: nn.Module = Narrow()
        if name == "residual":
            flowscope.wrap(model, name, example_inputs=torch.zeros(2, 3, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return PassRunner(name, model, optimizer, lambda m, batch: m(batch[0]).square().mean())

    lines = [
        "## Interception",
        "",
        f"Mode `residual` less the plain model, microseconds a merge site (budget {SITE_LIMIT:.0f}).",
        "",
        "| model | sites | A/A | median | quartiles | n | met |",
        "|---|---|---|---|---|---|---|",
    ]
    names = ("plain", "plain again", "residual")
    byte_lm = [runner(n, wrapped_lm(n) if n == "residual" else plain_lm()) for n in names]
    models = {
        "256 adds of width 32": (256, [narrow(name) for name in names], narrow_data()),
        f"{DEPTH} blocks, d={WIDTH}": (2 * DEPTH, byte_lm, data()),
    }
    for label, (sites, runners, batch) in models.items():
        times = interleave(runners, batch, args.pairs, warmup=args.warmup)
        again, added = (1e6 * (times[name] - times["plain"]) / sites for name in names[1:])
        low, middle, high = np.percentile(added, [25, 50, 75])
        met = "yes" if middle <= SITE_LIMIT else "**no**"
        met = met if abs(np.median(again)) < SITE_LIMIT / 5 else "noise"  # the method's own error is too large
        cells = (label, sites, f"{np.median(again):+.1f}", f"{middle:.1f}", f"{low:.1f} - {high:.1f}", len(added), met)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def peak_bytes(one: Runner, batch: Batch) -> int:
    """The most that torch's CPU allocator held during one forward and backward, over what it held before."""
    one.step(batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        one.forward_backward(one.model, batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    held = [
        (event["ts"], event["args"]["Total Allocated"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    ]
    first = min(held)
    return max(total for _, total, _ in held) - (first[1] - first[2])


def memory_section(args: argparse.Namespace) -> list[str]:
    """Peak memory of one pass: activations, gradients, temporaries."""
    modes = args.modes.split(",")
    runners = [runner("plain", plain_lm()), *(runner(mode, wrapped_lm(mode)) for mode in modes), *peer_runners()]
    batch = next(data())
    peaks = {one.name: peak_bytes(one, batch) for one in runners}
    lines = [
        "## Memory",
        "",
        "Peak of one forward and backward over what was held before (activations, gradients, temporaries).",
        "",
        "| variant | MiB | to plain |",
        "|---|---|---|",
    ]
    for name, peak in peaks.items():
        lines.append(f"| {name} | {peak / 2**20:.1f} | {peak / peaks['plain']:.2f} |")
    return lines


SECTIONS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "eager": eager_section,
    "wide": wide_section,
    "interception": interception_section,
    "memory": memory_section,
    "compiled": compiled_section,
}


def main(arguments: Any = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated, of: %(default)s")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated, of: %(default)s")
    parser.add_argument("--pairs", type=int, default=200, help="rounds of each section")
    parser.add_argument("--compiled-depth", type=int, default=4, help="blocks in the compiled section")
    parser.add_argument("--warmup", type=int, default=10, help="unmeasured rounds before them")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a machine that others use as well")
    parser.add_argument("--write", type=Path, help="also write the tables to this Markdown file")
    args = parser.parse_args(arguments)
    run_sections("What wrapping costs", "wrap.py", SECTIONS, args)


if __name__ == "__main__":
    main()
