"""The claims of docs/claims.md, repeated one by one: `python examples/depth_study.py --claim NAME`.

Each claim is a function that returns lines of text: what was measured, nothing more. The verdicts are in the document.
Trained stacks are cells of the study (`depth_cells.py`) and are kept below --out like the study's own; what needs other
measurements is in `depth_measures.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import depth_measures as measures
import numpy as np
from depth_cells import DEPTHS, STEPS, Cell, cached, last_gain, profile, variant, verdict


class Claim(NamedTuple):
    """What is claimed, and the function that measures it."""

    words: str
    lines: Callable[[Path], Iterable[str]]


def run(name: str, folder: Path) -> int:
    """Print one claim, or the list of them."""
    if name not in CLAIMS:
        if name != "list":
            print(f"no claim {name!r}; there are:")
        for known, claim in CLAIMS.items():
            print(f"{known:<16} {claim.words}")
        return 0 if name == "list" else 2
    print(CLAIMS[name].words)
    for line in CLAIMS[name].lines(folder):
        print(line, flush=True)
    return 0


def trained(folder: Path, name: str, depth: int, steps: int | None = None, **options: Any) -> dict[str, Any]:
    """A trained cell of the study."""
    return cached(Cell(name, depth, steps or STEPS[depth], **options), folder)


def seeds(folder: Path, name: str, depth: int, steps: int, count: int, **options: Any) -> list[float]:
    """Gain over byte frequencies for some seeds."""
    return [last_gain(trained(folder, name, depth, steps, seed=seed, **options)) for seed in range(count)]


def spread(values: list[float]) -> str:
    """Mean and range."""
    return f"{np.mean(values):+.3f} ({min(values):+.3f} to {max(values):+.3f}, {len(values)} seeds)"


# -- gradient


def shortcut(folder: Path) -> Iterator[str]:
    yield f"{'':<22}{'blocks':>7}{'total at x_0':>14}{'shortcut':>12}{'closed form':>13}"
    for name in ("post-ln", "pre-ln", "deepnorm", "keel-postln", "post-keel", "post-highway", "dhc"):
        for depth in (8, 32, 64, 128, 256, 512, 1024):
            result = cached(Cell(name, depth, 1), folder)
            total, carry = profile(result, "gradient_product")[0], profile(result, "shortcut_product")[0]
            sites = 2 * depth
            forms = {"post-ln": 2.0 ** (-sites / 2), "keel-postln": (1 + sites**-2) ** (-sites / 2)}
            forms["post-highway"] = (1 - 1 / (1 + np.exp(2.0))) ** sites
            yield f"{variant(name).label:<22}{depth:>7}{total:>14.3g}{carry:>12.3g}{forms.get(name, 1.0):>13.3g}"
    yield "with branch and carry of exactly unit size (shortcut_product of watch, closed form):"
    for mode, depth, measured, form in measures.unit_stacks():
        yield f"{mode:<22}{depth:>7}{'':>14}{measured:>12.6g}{form:>13.6g}"
    yield "while it trains (24 blocks, record by record), total at x_0:"
    result = trained(folder, "post-ln", 24, 120)
    for record in result["records"]:
        total, carry = (record["metrics"][name][0] for name in ("gradient_product", "shortcut_product"))
        yield f"  step {record['step']:>4}  {total:>10.3g}  shortcut {carry:>10.3g}"


def calibration(folder: Path) -> Iterator[str]:
    yield from measures.calibration_lines()


def alignment(folder: Path) -> Iterator[str]:
    yield from measures.alignment_lines()


def chain(folder: Path) -> Iterator[str]:
    yield from measures.chain_lines()


# -- representation


def similarity(folder: Path) -> Iterator[str]:
    yield "after training; plain modes compare neighbouring blocks, streams neighbouring sub-layers (closer pairs)"
    yield f"{'':<22}{'blocks':>7}{'first third':>12}{'last third':>12}{'p05 last':>10}{'token cos':>11}{'to input':>10}"
    for depth in (8, 32):
        for name in ("pre-ln", "post-ln", "post-keel", "keel-postln", "deepnorm", "shc", "dhc", "mhc"):
            result = trained(folder, name, depth)
            cosine, low = profile(result, "cosine"), profile(result, "cosine_p05")
            third = max(1, len(cosine) // 3)
            token, first = profile(result, "token_cosine")[-1], profile(result, "cosine_to_input")[-1]
            yield (
                f"{variant(name).label:<22}{depth:>7}{np.nanmedian(cosine[:third]):>12.4f}"
                f"{np.nanmedian(cosine[-third:]):>12.4f}{np.nanmedian(low[-third:]):>10.4f}{token:>11.3f}{first:>10.3f}"
            )


def seesaw(folder: Path) -> Iterator[str]:
    yield f"{'':<22}{'blocks':>7}{'product':>11}{'cosine':>9}{'token cos':>11}{'gain, nats':>12}"
    for depth in (8, 32):
        for name in ("post-ln", "pre-ln", "shc", "dhc", "mhc"):
            result = trained(folder, name, depth)
            product, token = profile(result, "gradient_product")[0], profile(result, "token_cosine")[-1]
            cosine = np.nanmedian(profile(result, "cosine"))
            seen = f"{product:>11.3g}{cosine:>9.4f}{token:>11.3f}{last_gain(result):>+12.3f}"
            yield f"{variant(name).label:<22}{depth:>7}{seen}"


# -- gates


def bias(folder: Path) -> Iterator[str]:
    yield "24 blocks, 120 steps, nats gained over byte frequencies"
    for name in (
        *("post-ln", "post-keel+2", "post-keel", "post-highway+2", "post-highway"),
        *("pre-ln", "pre-keel", "pre-keel-2", "pre-highway+2", "pre-highway"),
    ):
        yield f"{variant(name).label:<24}{spread(seeds(folder, name, 24, 120, 2))}"
    yield "at the start, by depth: token cosine and effective rank (of 32) at x_L"
    for name in ("post-keel", "post-keel-4"):
        for depth in (64, 256, 1024):
            result = cached(Cell(name, depth, 1), folder)
            token, rank = (profile(result, metric)[-1] for metric in ("token_cosine", "effective_rank"))
            yield f"{variant(name).label:<24}{depth:>6} blocks  {token:.3f}  {rank:.1f}"


def bias_by_depth(folder: Path) -> Iterator[str]:
    yield "nats gained over byte frequencies"
    for depth in (128, 256):
        for lr in (1e-3, 3e-3):
            for name in ("post-keel", "post-keel-auto"):
                which = f"{depth:>5} blocks, {STEPS[depth]} steps, rate {lr:g}  {variant(name).label:<22}"
                yield f"{which}{spread(seeds(folder, name, depth, STEPS[depth], 3, lr=lr))}"


def gates(folder: Path) -> Iterator[str]:
    yield "mean gate by sixth of the depth, input first; start: sigmoid(2) = .881, sigmoid(-2) = .119"
    for name in ("pre-keel", "post-keel", "post-highway"):
        for depth in (8, 32):
            values = profile(trained(folder, name, depth), "gate_mean")
            parts = "".join(f"{part.mean():>8.3f}" for part in np.array_split(values, 6))
            yield f"{variant(name).label:<22}{depth:>6}{parts}"


# -- hyper-connections


def expansion(folder: Path) -> Iterator[str]:
    yield from measures.expansion_lines()
    yield "nats gained over byte frequencies, 150 steps:"
    for depth, count in ((12, 2), (48, 1)):
        for name in (
            ("pre-ln", "dhc-1", "dhc-2", "dhc", "dhc-6", "dhc-8") if depth == 12 else ("pre-ln", "dhc", "dhc-8")
        ):
            yield f"{depth:>4} blocks  {variant(name).label:<18}{spread(seeds(folder, name, depth, 150, count))}"


def initialisations(folder: Path) -> Iterator[str]:
    yield "12 blocks, 150 steps"
    for name in ("pre-ln", "dhc", "dhc-ramp", "dhc-alternate", "dhc-mixed", "dhc-sparse"):
        start = trained(folder, name, 12, 150)
        product = profile(start, "gradient_product", 0)[0]
        gained = spread(seeds(folder, name, 12, 150, 2))
        yield f"{variant(name).label:<22} product at the start {product:>9.3g}  {gained}"


def static_dynamic(folder: Path) -> Iterator[str]:
    for depth, count in ((12, 2), (48, 1)):
        for name in ("pre-ln", "shc", "dhc"):
            gained = spread(seeds(folder, name, depth, 150, count))
            yield f"{depth:>4} blocks, 150 steps  {variant(name).label:<18}{gained}"


def streams_init(folder: Path) -> Iterator[str]:
    yield f"12 blocks, 150 steps; the largest stream's share at the end{'':<9}{'signal':>10}{'gradient':>10}"
    for name in ("shc", "shc-distinct", "dhc", "dhc-distinct", "mhc", "mhc-distinct"):
        gained = spread(seeds(folder, name, 12, 150, 3))
        kept = [trained(folder, name, 12, 150, seed=seed) for seed in range(3)]
        shares = (
            np.mean([np.nanmean(profile(result, metric)) for result in kept])
            for metric in ("dominant_stream", "dominant_stream_grad")
        )
        yield f"{variant(name).label:<24}{gained:<44}" + "".join(f"{share:>10.3f}" for share in shares)


def mixing(folder: Path) -> Iterator[str]:
    yield f"largest composite gain over depth, trained{'':<10}{'forward':>12}{'backward':>10}{'least column sum':>18}"
    for depth, steps, lr in ((12, 150, 1e-3), (32, STEPS[32], 1e-3), (12, 150, 1e-2)):
        for name in ("shc", "dhc", "mhc"):
            result = trained(folder, name, depth, steps, lr=lr)
            worst = [np.nanmax(profile(result, f"mix_gain_{way}")) for way in ("forward", "backward")]
            least = np.nanmin(profile(result, "mix_colsum_min"))
            which = f"{variant(name).label:<18}{depth:>5} blocks, lr {lr:<6g} {verdict(result):<10}"
            yield f"{which}{worst[0]:>12.3f}{worst[1]:>10.3f}{least:>18.3f}"


def dynamic_scale(folder: Path) -> Iterator[str]:
    yield "12 blocks, 150 steps"
    for name in ("dhc", "dhc-s0.1", "dhc-s1.0"):
        yield f"{variant(name).label:<18}{spread(seeds(folder, name, 12, 150, 2))}"


def advice(folder: Path) -> Iterator[str]:
    yield from measures.advice_lines()


# -- training by depth


def ordering(folder: Path) -> Iterator[str]:
    yield f"{'blocks':>7}{'steps':>7}" + "".join(
        f"{name:>14}" for name in ("pre-ln", "pre-keel", "keel-postln", "post-keel")
    )
    for depth in DEPTHS:
        gains = [last_gain(trained(folder, name, depth)) for name in ("pre-ln", "pre-keel", "keel-postln", "post-keel")]
        yield f"{depth:>7}{STEPS[depth]:>7}" + "".join(f"{gain:>+14.3f}" for gain in gains)


def table(folder: Path) -> Iterator[str]:
    yield "nats gained over byte frequencies"
    for name in ("pre-ln", "post-ln", "pre-keel", "post-keel", "keel-postln"):
        early = []
        for depth in (4, 12, 24):
            result = trained(folder, name, depth, 120)
            held = np.array(result["references"]) - np.array(result["losses"], dtype=float)
            early += [f"{depth} blocks: step 20-40 {held[20:40].mean():+.3f}, last {last_gain(result):+.3f}"]
        yield f"{variant(name).label:<22}{'; '.join(early)}"


def rescue(folder: Path) -> Iterator[str]:
    yield "120 steps: nats gained over byte frequencies, and the gradient product at x_0 at the end"
    yield f"{'lr':>8}{'blocks':>8}{'Post-LN':>26}{'keel -2 on Post-LN':>26}"
    for lr, depths in ((1e-3, (6, 12, 24, 48, 96)), (3e-3, (6, 12, 24, 48)), (1e-4, (24, 48)), (3e-4, (24, 48))):
        for depth in depths:
            row = f"{lr:>8g}{depth:>8}"
            for name in ("post-ln", "post-keel"):
                result = trained(folder, name, depth, 120, lr=lr)
                product = profile(result, "gradient_product")[0]
                row += f"{f'{last_gain(result):+.3f} ({product:.1e})':>26}"
            yield row


def very_deep(folder: Path) -> Iterator[str]:
    yield "nats gained over byte frequencies; gradient product at x_0 and token cosine at x_L at the end"
    cells = [(256, 1e-3, name) for name in ("post-ln", "post-keel", "post-keel-4")]
    cells += [(1024, 1e-3, name) for name in ("post-ln", "post-keel-4", "keel-postln")]
    for depth, lr, name in (*cells, (1024, 1e-4, "post-ln"), (1024, 1e-4, "post-keel-4")):
        result = trained(folder, name, depth, lr=lr)
        product, token = profile(result, "gradient_product")[0], profile(result, "token_cosine")[-1]
        which = f"{depth:>5} blocks, {STEPS[depth]} steps, rate {lr:g}  {variant(name).label:<20}"
        yield f"{which}{last_gain(result):+.3f}  {product:.1e}  {token:.3f}  {verdict(result)}"


def skipping(folder: Path) -> Iterator[str]:
    yield from measures.skipping_lines()


CLAIMS: dict[str, Claim] = {
    "shortcut": Claim("Post-LN loses gradient with depth, Keel's shortcut does not: total and shortcut", shortcut),
    "calibration": Claim("Reference values of the initial state, 24 and 96 blocks of width 128", calibration),
    "alignment": Claim("The branch's Jacobian is about c I with c near -1 (branch_alignment)", alignment),
    "chain": Claim("A chain explodes or vanishes with the norm of its factors; DenseNet's width grows", chain),
    "similarity": Claim("Pre-LN's layers become alike with depth; hyper-connections' do less", similarity),
    "seesaw": Claim("Pre-LN and Post-LN trade gradient against similarity; hyper-connections escape", seesaw),
    "bias": Claim("A gate bias of +2 starts toward carry", bias),
    "bias-by-depth": Claim("A gate on Post-LN begins at 1 / sqrt(merges): -2 to 70 merges, less beyond", bias_by_depth),
    "gates": Claim("Gates: .7-.9 shallow, .5-.7 in the middle, .3-.5 deep", gates),
    "expansion": Claim("Expansion rate 2, 4, 6, 8: parameters, time, memory, loss", expansion),
    "initialisations": Claim("The initialisations of hyper-connections", initialisations),
    "static-dynamic": Claim("Static is like dynamic when shallow, far worse when deep", static_dynamic),
    "streams-init": Claim("Streams that begin distinct share the work, and help", streams_init),
    "mixing": Claim("Unconstrained mixing gains grow, the manifold's stay near 1", mixing),
    "dynamic-scale": Claim("The dynamic factor should start at .01 to .1", dynamic_scale),
    "advice": Claim("Lower base rate, longer warm-up, 1.3 x rate and 0.7 x clip for connections", advice),
    "ordering": Claim("Perplexity of Keel under Pre-LN's at every depth, the gap growing", ordering),
    "table": Claim("Stability, expressivity, speed of Pre-LN, Post-LN and Keel", table),
    "rescue": Claim("A deep stack that does not train, wrapped, trains: how far in depth and rate", rescue),
    "very-deep": Claim("Keel trains 1,024 layers (about fifteen minutes on one core)", very_deep),
    "skipping": Claim("Depth adapts to the input: branches with low gates can be skipped", skipping),
}
