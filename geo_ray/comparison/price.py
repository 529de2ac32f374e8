"""What a run of a comparison costs at the prices of a plan.

Apart from the outcome's file, so that a comparison can be resumed with other prices.
"""

from __future__ import annotations

from geo_ray.comparison.outcome import Outcome
from geo_ray.planning.model.bill import Bill


def priced(outcome: Outcome, bill: Bill | None) -> Outcome:
    """The outcome with its dollars: until the target where it was reached, else of the whole run.

    They stay unknown without prices, for a run that failed, and where regions without a price have
    spoken to each other.
    """
    sent = outcome.sent_bytes
    if bill is None or sent is None or outcome.failed is not None:
        return outcome
    by_pair = {(src, dst): count for src, to in sent.items() for dst, count in to.items()}
    if bill.unpriced(by_pair):
        return outcome
    until_s = outcome.seconds if outcome.time_to_target_s is None else outcome.time_to_target_s
    return outcome.model_copy(update={"usd": sum(bill.usd(until_s, by_pair).values())})
