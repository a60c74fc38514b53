"""`train_eval_gap`: normalisation layers whose running statistics are not those of the batches they see."""

from __future__ import annotations

from flowscope.detectors.limit import Limit


class TrainEvalGap(Limit):
    """What evaluation will compute with is far from what training computes with."""

    kind, metric, above, row = "train_eval_gap", "norm_gap", "norm_gap", "module"
    # until then the running statistics are still those of the start
    from_step = "gap_steps"
    # they follow by a tenth a step: after a jump of the weights they need some records
    records = 3
    message = (
        "the running statistics of {where} are {value:.3g} batch standard deviations off what its batches have "
        "(limit {limit:.3g}; {count} of {size} such modules): model.eval() will compute something else"
    )
    advice = (
        "give the module a momentum of about 0.1 (0 never updates its running statistics), or renew them by a pass "
        "over the training data in train mode before evaluating"
    )
