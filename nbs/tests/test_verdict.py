"""The judge of proofs: its symmetries, its repetition, and its rule written out a second time."""
import json
from itertools import combinations_with_replacement

import numpy as np
import pytest

from medlab.verdict.judge import Judge
from medlab.verdict.noise import early_rule, noise_floor
from medlab.verdict.signed_rank import limits, spending
from medlab.verdict.verdict import KINDS

OPPOSITE = dict(helps="harms", harms="helps")


def cases(count=40):
    "Pairs and A/A differences: effects, coarse metrics with ties, arms that die, arms that are identical."
    rng = np.random.default_rng(5)
    for _ in range(count):
        effect, digits = rng.choice([0, 0.5, 1.5, 5]), rng.choice([1, 8])
        off = rng.normal(1, 1, 14).round(digits)
        on = (off + rng.normal(effect, 1, 14)).round(digits)
        dead = rng.random((14, 2)) < (rng.choice([0, 0.3]), rng.choice([0, 0.3]))
        pairs = [(None if a else float(x), None if b else float(y), bool(a), bool(b), False) for x, y, (a, b) in zip(off, on, dead)]
        yield pairs, rng.normal(0, 1, 8)


def judged(pairs, ask=False, **kw):
    judge = Judge(horizon=14, **kw)
    for p in pairs:
        if ask: judge.verdict()
        if judge.add(*p): break
    return judge


def swapped(pairs): return [(on, off, on_died, off_died, same) for off, on, off_died, on_died, same in pairs]


def test_arms_that_change_places_change_the_verdict():
    for pairs, aa in cases():
        one, other = judged(pairs, aa=aa).verdict(ahead=False), judged(swapped(pairs), aa=aa).verdict(ahead=False)
        assert other.kind == OPPOSITE.get(one.kind, one.kind) and one.pairs == other.pairs and one.basis == other.basis
        assert np.allclose(other.interval, [-v for v in one.interval[::-1]])


def test_the_unit_of_the_metric_is_no_matter():
    times = lambda v: None if v is None else 1024 * v
    for pairs, aa in cases(30):
        small = judged(pairs, aa=aa).verdict(ahead=False)
        large = judged([(times(a), times(b), *rest) for a, b, *rest in pairs], aa=1024 * aa).verdict(ahead=False)
        assert (large.kind, large.pairs) == (small.kind, small.pairs) and np.allclose(large.interval, 1024 * np.array(small.interval))


def test_a_metric_that_should_rise_is_one_that_should_fall_with_the_other_sign():
    negative = lambda v: None if v is None else -v
    for pairs, aa in cases(30):
        down = judged(pairs, aa=aa).verdict(ahead=False)
        up = judged([(negative(a), negative(b), *rest) for a, b, *rest in pairs], aa=aa, lower_is_better=False).verdict(ahead=False)
        assert (up.kind, up.basis, up.pairs) == (down.kind, down.basis, down.pairs)


def test_asking_changes_nothing_and_records_are_json():
    kinds = set()
    for pairs, aa in cases(30):
        quiet, asked = judged(pairs, aa=aa), judged(pairs, ask=True, aa=aa)
        assert quiet.verdict() == asked.verdict()
        record = quiet.verdict().record()
        assert json.loads(json.dumps(record, allow_nan=False)) == record
        assert bool(record["exceeded"]) == (record["basis"] == "A/A noise"), "a rule that did not speak is not named"
        kinds.add(record["kind"])
    assert {"helps", "harms", "no effect", "undecided"} & kinds and kinds <= set(KINDS)


def by_hand(d, aa, margin, alpha=0.05, horizon=14):
    "Kind and pairs of differences without divergence, the rule written out."
    main, one = (limits(tuple(spending(a, n, horizon) for n in range(1, horizon + 1)), s) for a, s in ((alpha * 0.8, 2), (alpha, 1)))
    sizes = sorted(map(abs, aa))
    for n in range(1, len(d) + 1):
        x, rule = d[:n], early_rule(len(aa), alpha * 0.2)
        averages = [(a + b) / 2 for a, b in combinations_with_replacement(x, 2)]
        for sign, kind in ((-1, "helps"), (1, "harms")):
            if sum(sign * a <= 0 for a in averages) <= main[n - 1][0]: return kind, n
            if n in rule and all(sign * v > sizes[-1 - rule[n]] for v in x) and min(map(abs, x)) >= max(map(abs, x)) / 2: return kind, n
        c = one[n - 1][0]
        if sum(a >= margin for a in averages) <= c and sum(a <= -margin for a in averages) <= c: return "no effect", n
    return "undecided", len(d)


@pytest.mark.parametrize("digits", [1, 8])
def test_the_rule_written_out(digits):
    rng, seen = np.random.default_rng(digits), set()
    for _ in range(60):
        aa, d = rng.normal(0, 1, 8), rng.normal(rng.choice([0, 0.7, 1.5, 6]) * rng.choice([-1, 1]), 1, 14).round(digits)
        got = judged([(0.0, float(v)) for v in d], aa=aa).verdict(ahead=False)
        assert (got.kind, got.pairs) == by_hand(d.tolist(), aa, 1.25 * noise_floor(aa))
        seen.add((got.kind, got.basis))
    assert len(seen) >= 4
