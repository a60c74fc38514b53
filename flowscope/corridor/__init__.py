"""A corridor of good runs: whether, when and where a run parts from the others of its recipe, at a rate that is known.

    opened(reference)       the corridor of a folder of runs, or of a golden profile
    Corridor                the group: `judge(records)` for a finished run, `follow()` for one under way
    Departure               the first step and place at which a run parted, and in which metrics after that
    add, listed             golden profiles, of at most 50 kB

**What is compared.** Of each metric that is a number per row, at each step that the good runs share, the deviation of
a run from the median of a group, over a scale pooled over depth and steps (`spread.usual`), over the farthest that
the members of that group themselves lie off anywhere in that metric (`tournament`). So the noise of a metric is
learned: one that does not repeat across seeds, or has a long tail, is divided by what it does among good runs, and
drops out by itself. The score of a run is the largest such deviation over all metrics, rows and steps.

**The rate that needs no assumption.** Let the N good runs and the new one be exchangeable (other seeds of one
recipe). For each good run j let G_j be the group without j, and let new and j be scored by G_j: a_j is the score of
the new run, b_j that of run j, both whole. The new run *parts* when a_j > b_j for all j. Think of all N + 1 runs in a
tournament in which i beats k when its score, by the group without i and k, is the larger one. G_j is the group
without the new run and j, so the new run parts exactly when it beats everyone. Two runs cannot both beat everyone,
for one of them beats the other; by exchangeability each is as likely as any other to be the one. So it happens to a
good run with a chance of 1/(N + 1) at most, over all metrics, rows and steps together, however their numbers are
distributed or depend on each other. The scale and the farthest member are functions of G_j, which is the same for
both players: whatever rule is used for them, the proof holds.

**At every step.** b_j is known before the new run starts: it takes good runs only, and their whole length. a_j grows
while the new run goes on. What is beaten at a step stays beaten, so to look after every record costs nothing. A run
that sees fewer steps or metrics than the good ones (another cadence, a shorter run) has scores that are smaller or
equal: the rate holds. (An alert asks for a little more than the proof: one number must lie beyond all b_j.)

**Below 1/(N + 1).** Five runs certify 1 in 6, nineteen 1 in 20, and no more without an assumption. The model assumed
is that logarithms of whole-run scores are normal (`Bounds.chance_of`): the new run's, less the good runs' mean, over
their standard deviation, follows Student's t. Few runs know their own spread badly, so their variance counts together
with a usual one of .5 squared, worth four runs, and t has N + 3 degrees of freedom. It is a model; how often it is
wrong was measured on programs that had no part in choosing it (docs/corridor.md). A run that parts is a warning where
the chance it states is `RATE` or less, by N alone or by the model as well; else it is a note.
"""

from flowscope.corridor.departure import Departure
from flowscope.corridor.detector import PartedFromGroup, is_group, live, opened
from flowscope.corridor.golden import add, listed
from flowscope.corridor.group import Corridor

__all__ = ["Corridor", "Departure", "PartedFromGroup", "add", "is_group", "listed", "live", "opened"]
