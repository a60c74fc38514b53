"""What it means that two runs part at a place, in a sentence."""

from __future__ import annotations

from flowscope.parting.looks import RANDOM, Look, Phase, Sides

EQUAL_SO_FAR = {
    "input": "",
    "forward": "the inputs are equal",
    "loss": "the forward is equal",
    "backward": "the forward is equal",
    "update": "the gradients are equal",
}


def explained(look: Look, phase: Phase, sides: Sides, limit: float, since: int | None) -> str:
    """The sentence.

    Args:
        look: the place.
        phase: that is told.
        sides: the step.
        limit: what the difference is beyond; 0 where every bit counts.
        since: the step at which bits first differed within rounding.
    """
    step = sides.records[0].step
    words = f"step {step}: {_before(phase, since)}{_what(look, phase, sides)}"
    if look.phase != "input":
        words += f"; relative difference {look.distance:.2g}"
        words += (
            f", rounding makes up to {limit:.2g}" if limit else ", and nothing in the set-ups changes the order of sums"
        )
    return words


def _before(phase: Phase, since: int | None) -> str:
    equal = EQUAL_SO_FAR[phase]
    if not equal:
        return ""
    return f"{equal} {'to the last bit' if since is None else 'up to rounding'}, "


def _what(look: Look, phase: Phase, sides: Sides) -> str:
    place = look.where or "the model"
    if phase == "input":
        if look.where == RANDOM:
            return (
                "the random numbers are in another state as the forward begins: something drew more, or less, before it"
            )
        return _samples(sides)
    if phase == "forward":
        return f"the output of {place} is not, first of all: {_forward(look, sides)}"
    if phase == "loss":
        return "the loss is not: another loss, other targets, or other entries that count"
    if phase == "backward":
        return _backward(look, place, sides)
    return _update(look, place, sides)


def _samples(sides: Sides) -> str:
    found = sides.both("exact_inputs")
    if found is not None and found[0][0] == found[1][0] and found[0][2] == found[1][2]:
        return "the model got the same samples in another order"
    return "the model got another batch"


def _forward(look: Look, sides: Sides) -> str:
    if look.kind == "shared":
        return "what its parts were given is equal, and several of them compute something else" + _random(sides)
    if look.kind == "modules":
        rows = sides.rows("exact_modules")
        if rows is not None and look.where in rows[0] and rows[0][look.where][0] == rows[1][look.where][0]:
            return "what it was given is equal, so it computes something else" + _random(sides)
        return "its modules agree up to there, so its own code does something else"
    return "the point before it is equal"


def _random(sides: Sides) -> str:
    states = sides.both("random_state")
    if states is not None and states[0][0] == states[1][0] and states[0][1] != states[1][1]:
        return " (and the forward draws other random numbers)"
    return ""


def _backward(look: Look, place: str, sides: Sides) -> str:
    if look.kind == "gone":
        return f"{place} got a gradient in one of the runs only"
    if look.kind == "parameters":
        return f"the gradients of the hidden states too, that of {place} is not"
    if not look.where:
        return "the backward is not, from the last point on: what follows it, or the loss, sends back another gradient"
    replay = f": {_replay(look, sides)}" if _replay(look, sides) else ""
    return f"the backward is not, first at {place}{replay}"


def _replay(look: Look, sides: Sides) -> str:
    for record in sides.records:
        drew = dict(
            zip(record.metric_labels.get("replay_drew", ()), record.metrics.get("replay_drew", ()), strict=False)
        )
        if drew.get(look.where, 0) == 1:
            return "its replayed forward drew other random numbers (dropout) than the first"
    return ""


def _update(look: Look, place: str, sides: Sides) -> str:
    if look.phase == "backward":
        return (
            f"the gradient of {place} was changed between backward and the optimizer, in one run otherwise (clipping)"
        )
    same = sides.headers[0].setup.get("optimizers") == sides.headers[1].setup.get("optimizers")
    why = "" if same else " (the optimizers' options differ, see what differs)"
    return f"what the optimizer makes of {place} is not{why}"
