"""Integers as z3 can decide them: sums of named numbers, whose products are named too and known by their monotony.

z3 answers at once for linear arithmetic and rarely for products of unknowns. A product `x * y` is therefore a number of
its own, about which is said only that it grows with x where y is not negative. All that is said is true, so what z3
refutes is refuted for the integers too; a counterexample may be one of a number that is no product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import z3

z3.z3.Z3_DEBUG = False  # its wrapper looks at each argument again, an eighth of a proof's time

Condition = Any
"""A z3 expression of truth; z3's own have no types. Python's True stands for one that needs no asking."""

INFINITY = 1 << 200
"""Further than any 64-bit product reaches."""

SMALL = 1 << 16
"""A number that never leaves [-SMALL, SMALL], as a head's, bounds its products by multiples of the other factor."""

Range = tuple[int, int]


class Sum:
    """`const` plus names times factors; immutable. Sums are compared by z3 conditions, made by `Terms`."""

    __slots__ = ("const", "factors", "key")

    def __init__(self, factors: Mapping[str, int], const: int = 0) -> None:
        self.factors = {name: n for name, n in factors.items() if n}
        self.const = const
        self.key = (const, *sorted(self.factors.items()))

    def __add__(self, other: Sum | int) -> Sum:
        if isinstance(other, int):
            return Sum(self.factors, self.const + other)
        factors = dict(self.factors)
        for name, n in other.factors.items():
            factors[name] = factors.get(name, 0) + n
        return Sum(factors, self.const + other.const)

    def __radd__(self, other: int) -> Sum:
        return self + other

    def __neg__(self) -> Sum:
        return self * -1

    def __sub__(self, other: Sum | int) -> Sum:
        return self + -other

    def __rsub__(self, other: int) -> Sum:
        return -self + other

    def __mul__(self, n: int) -> Sum:
        return Sum({name: n * m for name, m in self.factors.items()}, n * self.const)

    def __rmul__(self, n: int) -> Sum:
        return self * n


def number(n: int) -> Sum:
    return Sum({}, n)


def both(*conditions: Condition) -> Condition:
    asked = [c for c in conditions if c is not True]
    if not asked:
        return True
    return asked[0] if len(asked) == 1 else z3.And(*asked)


def implies(a: Condition, b: Condition) -> Condition:
    if b is True:
        return True
    return b if a is True else z3.Implies(a, b)


def negate(a: Condition) -> Condition:
    return z3.BoolVal(False) if a is True else z3.Not(a)


@dataclass
class Terms:
    """The named numbers of one launch, their ranges, and the facts that define them."""

    ranges: dict[str, Range] = field(default_factory=dict)
    facts: dict[str, list[Condition]] = field(default_factory=dict)  # by the number that they define
    products: dict[tuple[str, str], str] = field(default_factory=dict)
    _named: dict[object, Sum] = field(default_factory=dict)
    _symbols: dict[str, Any] = field(default_factory=dict)
    _asked: dict[int, tuple[Condition, frozenset[str]]] = field(default_factory=dict)
    _made: dict[object, list[Condition]] = field(default_factory=dict)
    _count: int = 0

    def name(self, name: str, low: int, high: int) -> Sum:
        """A number of [low, high] that is not known otherwise."""
        if name in self.ranges:
            raise ValueError(f"name: expected a new one, got {name!r}")
        self.ranges[name] = low, high
        symbol = self._symbols[name] = z3.Int(name)
        self.facts[name] = [symbol >= low] if low > -INFINITY else []
        if high < INFINITY:
            self.facts[name].append(symbol <= high)
        return Sum({name: 1})

    def define(self, x: Sum, fact: Condition) -> None:
        """Say what a named number is. A definition must leave a value for it, whatever the others are."""
        (name,) = x.factors
        if fact is not True:
            self.facts[name].append(fact)

    def fresh(self, what: str, low: int = -INFINITY, high: int = INFINITY) -> Sum:
        self._count += 1
        return self.name(f"{what}.{self._count}", low, high)

    def symbol(self, x: Sum) -> Any:
        """`x` as z3 has it."""
        parts = [self._symbols[name] if n == 1 else n * self._symbols[name] for name, n in x.factors.items()]
        if x.const or not parts:
            parts.append(z3.IntVal(x.const))
        return parts[0] if len(parts) == 1 else z3.Sum(parts)

    def range(self, x: Sum) -> Range:
        low = high = x.const
        for name, n in x.factors.items():
            a, b = (n * end for end in self.ranges[name])
            low, high = low + min(a, b), high + max(a, b)
        return max(low, -INFINITY), min(high, INFINITY)

    # Comparisons, decided by the ranges where they can be.

    def at_least(self, x: Sum, y: Sum | int) -> Condition:
        """x >= y"""
        difference = x - y
        low, high = self.range(difference)
        if low >= 0:
            return True
        return z3.BoolVal(False) if high < 0 else self.symbol(difference) >= 0

    def less(self, x: Sum, y: Sum | int) -> Condition:
        return self.at_least(y - x, 1)

    def equal(self, x: Sum, y: Sum | int) -> Condition:
        difference = x - y
        low, high = self.range(difference)
        if low == high == 0:
            return True
        return z3.BoolVal(False) if low > 0 or high < 0 else self.symbol(difference) == 0

    def fits(self, x: Sum, bits: int) -> Condition:
        """Whether a signed integer of `bits` holds x."""
        return both(self.at_least(x, -(1 << bits - 1)), self.less(x, 1 << bits - 1))

    # Numbers defined by others.

    def choose(self, condition: Condition, x: Sum, y: Sum) -> Sum:
        if condition is True or x.key == y.key:
            return x
        if z3.is_false(condition):
            return y
        key = ("choose", condition.get_id(), x.key, y.key)
        found = self._named.get(key)
        if found is None:
            (a, b), (c, d) = self.range(x), self.range(y)
            found = self._named[key] = self.fresh("choice", min(a, c), max(b, d))
            self.define(found, z3.If(condition, self.equal_(found, x), self.equal_(found, y)))
            self._named[key, "condition"] = condition  # z3 reuses the id of what nobody holds
        return found

    def minimum(self, x: Sum, y: Sum) -> Sum:
        least = self.choose(self.at_least(y, x), x, y)
        self._narrow(least, high=min(self.range(x)[1], self.range(y)[1]))
        return least

    def maximum(self, x: Sum, y: Sum) -> Sum:
        most = self.choose(self.at_least(x, y), x, y)
        self._narrow(most, low=max(self.range(x)[0], self.range(y)[0]))
        return most

    def _narrow(self, x: Sum, low: int = -INFINITY, high: int = INFINITY) -> None:
        """Make known what follows from the definition of `x`."""
        if len(x.factors) == 1 and x.const == 0 and (name := next(iter(x.factors))).startswith("choice."):
            a, b = self.ranges[name]
            self.ranges[name] = max(a, low), min(b, high)

    def equal_(self, x: Sum, y: Sum) -> Condition:
        return self.symbol(x) == self.symbol(y)

    def times(self, x: Sum, y: Sum) -> Sum:
        """x * y, as numbers of one name times others of one name."""
        if not x.factors:
            return y * x.const
        if not y.factors:
            return x * y.const
        (m, a, c), (n, b, d) = self._as_one(x), self._as_one(y)
        product = m * n * self._product(a, b)
        return product + m * d * Sum({a: 1}) + n * c * Sum({b: 1}) + c * d

    def _as_one(self, x: Sum) -> tuple[int, str, int]:
        """n, name and c with x = n * name + c; a longer sum is named."""
        if len(x.factors) == 1:
            name, n = next(iter(x.factors.items()))
            return n, name, x.const
        n = math.gcd(*x.factors.values(), x.const)
        part = Sum({name: m // n for name, m in x.factors.items()}, x.const // n)
        found = self._named.get(("sum", part.key))
        if found is None:
            found = self._named["sum", part.key] = self.fresh("sum", *self.range(part))
            self.define(found, self.equal_(found, part))
        return n, next(iter(found.factors)), 0

    def _product(self, a: str, b: str) -> Sum:
        key = (min(a, b), max(a, b))
        if key not in self.products:
            ends = [x * y for x in self.ranges[a] for y in self.ranges[b]]
            product = self.fresh("product", max(min(ends), -INFINITY), min(max(ends), INFINITY))
            self.products[key] = next(iter(product.factors))
            for flag, other in ((a, b), (b, a)):
                if self.ranges[flag] == (0, 1):
                    asked = self._symbols[flag] == 0
                    self.define(
                        product, z3.If(asked, self.equal_(product, number(0)), self.equal_(product, Sum({other: 1})))
                    )
        return Sum({self.products[key]: 1})

    def divide(self, x: Sum, y: Sum, floor: bool = False) -> tuple[Sum, Sum]:
        """Quotient and remainder for y >= 1: to zero as the processor does, or to the next smaller integer."""
        if not y.factors and all(n % y.const == 0 for n in (*x.factors.values(), x.const)):
            return Sum({name: n // y.const for name, n in x.factors.items()}, x.const // y.const), number(0)
        key = ("divide", x.key, y.key, floor)
        if key not in self._named:
            low, high = self.range(x)
            floor = floor or low >= 0
            least, most = max(self.range(y)[0], 1), self.range(y)[1]
            ends = [n // d if n >= 0 else -(-n // d) - 1 for n in (low, high) for d in (least, most)]
            quotient = self.fresh("quotient", min(ends), max(ends))
            rest = self.fresh("rest", 0 if floor else 1 - most, most - 1)
            inside = both(self.at_least(rest, 0), self.less(rest, y))
            if not floor:
                negative = both(self.at_least(0 - rest, 0), self.less(0 - rest, y))
                inside = z3.If(self.symbol(x) >= 0, z3.BoolVal(True) if inside is True else inside, negative)
            fact = both(self.equal_(self.times(quotient, y) + rest, x), inside)
            for part in (quotient, rest):
                self.define(part, implies(self.at_least(y, 1), fact))
            self._named[key], self._named["rest", key] = quotient, rest
        return self._named[key], self._named["rest", key]

    def wrap(self, x: Sum, bits: int) -> Sum:
        """The lowest `bits` of x as a signed integer."""
        if self.fits(x, bits) is True:
            return x
        key = ("wrap", x.key, bits)
        if key not in self._named:
            self._named[key] = self.fresh("wrapped", -(1 << bits - 1), (1 << bits - 1) - 1)
            self.define(self._named[key], self.equal_(self._named[key] + (1 << bits) * self.fresh("turns"), x))
        return self._named[key]

    def known(self, asked: Iterable[Condition], twins: Mapping[str, str] | None = None) -> list[Condition]:
        """What bears on what is asked: the definitions of its numbers, of theirs, and so on, and the products' laws.

        `twins` are names of one and the same number, each by the name that stands for both.
        """
        out: list[Condition] = []
        seen: set[str] = set()
        of_product = {product: factors for factors, product in self.products.items()}
        waiting = [name for condition in asked for name in self._names(condition)]
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            waiting += of_product.get(name, ())
            for fact in self.facts[name]:
                out.append(fact)
                waiting += self._names(fact)
        return out + self._laws({p: f for p, f in of_product.items() if p in seen}, twins or {})

    def _names(self, condition: Condition) -> frozenset[str]:
        """The named numbers of a condition. z3 gives its id to no other while `_asked` holds it."""
        if condition is True:
            return frozenset()
        key = condition.get_id()
        if key not in self._asked:
            found: set[str] = set()
            stack, met = [condition], set()
            while stack:
                x = stack.pop()
                if x.get_id() in met:
                    continue
                met.add(x.get_id())
                if x.num_args() == 0 and x.decl().kind() == z3.Z3_OP_UNINTERPRETED:
                    found.add(x.decl().name())
                stack += x.children()
            self._asked[key] = condition, frozenset(found)
        return self._asked[key][1]

    def _laws(self, products: Mapping[str, tuple[str, str]], twins: Mapping[str, str]) -> list[Condition]:
        """Each product is known for factors 0 and 1, and grows with one factor where the other is not negative."""
        by_factor: dict[str, list[tuple[str, str]]] = {}
        for product, (a, b) in products.items():
            for x, y in ((a, b), (b, a)) if a != b else ((a, b),):
                by_factor.setdefault(twins.get(y, y), []).append((x, product))
        out: list[Condition] = []
        for factor, found in by_factor.items():
            for one in found:
                out += self._law(factor, one)
            for one, two in itertools.combinations(found, 2):
                out += self._law(factor, one, two)
        return out

    def _law(self, factor: str, one: tuple[str, str], two: tuple[str, str] | None = None) -> list[Condition]:
        """What is known of a product `(x, x * factor)`, or of two of them."""
        key = (factor, one, two)
        if key not in self._made:
            y, x1, p1 = (self._symbols[name] for name in (factor, *one))
            if two is None:
                always = [z3.Implies(x1 == 0, p1 == 0), z3.Implies(x1 == 1, p1 == y)]
                laws = [z3.Implies(x1 <= 0, p1 <= 0), z3.Implies(x1 >= 1, p1 >= y), z3.Implies(x1 <= -1, p1 <= -y)]
                low, high = self.ranges[one[0]]
                if low >= -SMALL and high <= SMALL:
                    laws += [p1 >= low * y, p1 <= high * y]
            else:
                x2, p2 = (self._symbols[name] for name in two)
                always = [z3.Implies(x1 == x2, p1 == p2)]
                laws = [z3.Implies(x1 < x2, p1 + y <= p2), z3.Implies(x2 < x1, p2 + y <= p1)]
            grows = [z3.Implies(y >= 0, z3.And(*laws))] if self.ranges[factor][0] < 0 else laws
            self._made[key] = always + grows
        return self._made[key]
