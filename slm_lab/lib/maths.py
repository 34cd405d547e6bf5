"""Formulas that need no object."""


def dueling_q(v, adv):
    """Q = V + A − mean over actions of A. v (B, 1), adv (B, A) -> (B, A). Wang et al. 2016, equation 9."""
    return v + adv - adv.mean(dim=-1, keepdim=True)
