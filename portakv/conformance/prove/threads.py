"""One lane of one program of a kernel, any of them, as conditions over its inputs: what it accesses, and when.

Values are worked out from the accesses backwards, so data that no address and no mask derives from costs nothing. A
number comes with the condition under which no step on its way overflowed, `ok`; only there is it what the GPU computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import z3

from portakv.conformance.prove.program import (
    DATA,
    Access,
    Branch,
    Data,
    Lane,
    Loop,
    Number,
    Path,
    Pointer,
    Program,
    Read,
    Total,
    Touch,
    Truth,
    UnknownOp,
    Value,
    adds,
    turn_of,
)
from portakv.conformance.prove.terms import Condition, Range, Sum, Terms, both, implies, negate, number
from portakv.conformance.prove.ttir import Op, Type


@dataclass
class Thread:
    """One lane of one program of a launch. Two threads of one launch share its terms and differ in `name`."""

    program: Program
    terms: Terms
    name: str
    scalars: Mapping[str, Sum]
    programs: Sequence[Sum]  # the grid
    reads: dict[str, list[Read]] = field(default_factory=dict)
    totals: list[Total] = field(default_factory=list)
    owed: list[Condition] = field(default_factory=list)  # what must hold of every thread, beside its touches
    variables: dict[str, Sum] = field(default_factory=dict)  # what makes it this thread: program, lanes, iterations
    known: dict[str, Sum] = field(default_factory=dict)  # totals that are the same in another thread
    _loaded: dict[object, Sum] = field(default_factory=dict)
    _memo: dict[object, Value] = field(default_factory=dict)
    _ranges: dict[tuple[int, int], Range] = field(default_factory=dict)  # of what loops carry

    def variable(self, what: str, most: int) -> Sum:
        """A number in [0, most] that tells this thread from others."""
        if what not in self.variables:
            self.variables[what] = self.terms.name(f"{self.name}.{what}", 0, most)
        return self.variables[what]

    def program_id(self, axis: int) -> Sum:
        new = f"program{axis}" not in self.variables
        most = self.terms.range(self.programs[axis])[1] - 1
        index = self.variable(f"program{axis}", min(most, (1 << 31) - 1))
        if new:
            self.terms.define(index, self.terms.less(index, self.programs[axis]))
        return index

    @staticmethod
    def _asked(condition: Condition) -> Condition:
        return z3.BoolVal(True) if condition is True else condition

    def lane(self, shape: tuple[int, ...]) -> Lane:
        """This thread's element of a tensor of `shape`."""
        return tuple(self.variable(f"lane{axis}of{n}", n - 1) for axis, n in enumerate(shape))

    def read(self, tensor: str, index: int = 0) -> Sum:
        """What the lane reads from a tensor with its `index`-th load there; where it is masked, any number."""
        loads = [x for x in self.program.accesses if x.kind == "load"]
        mine = []
        for load in loads:
            lane = self.lane(load.op.types[0].shape)
            pointer = self.value(load.op.operands[0], lane)
            if isinstance(pointer, Pointer) and pointer.tensor == tensor:
                mine.append((load, lane))
        load, lane = mine[index]
        self.value(load.op.results[0], lane)
        return self._loaded[self._key(load.op.results[0], lane)]

    def touch(self, access: Access) -> Touch:
        pointer_name = access.op.operands[0]
        shape = access.op.types[0].shape
        lane = self.lane(shape)
        when, sound = self.reached(access.path)
        if access.mask is not None:
            mask = self.truth(access.mask, lane)
            sound = both(sound, implies(when, mask.ok))
            when = both(when, mask.holds)
        pointer = self.value(pointer_name, lane)
        assert isinstance(pointer, Pointer)
        programs = [self.program_id(axis) for axis in range(3)]
        turns = [self.bounds(step.op)[3] for step in access.path if isinstance(step, Loop)]
        return Touch(access, pointer, when, sound, (*programs, *lane, *turns))

    def reached(self, path: Path) -> tuple[Condition, Condition]:
        """When the thread comes to an op on `path`, and what must hold for that to be sure."""
        when: Condition = True
        sound: Condition = True
        for step in path:
            if isinstance(step, Branch):
                asked = self.truth(step.condition, ())
                holds = asked.holds if step.taken else negate(asked.holds)
                sound = both(sound, implies(when, asked.ok))
            else:
                first, last, by, low = self.bounds(step.op)
                holds = self.terms.less(low, last.sum)
                room = self.terms.fits(last.sum + by, 64)
                sound = both(sound, implies(when, both(first.ok, last.ok, room)))
            when = both(when, holds)
        return when, sound

    def bounds(self, loop: Op) -> tuple[Number, Number, int, Sum]:
        """Where a loop begins, ends, its step, and where this thread's iteration is."""
        first, last, step = (self.integer(name, ()) for name in loop.operands[:3])
        by = step.sum.const
        if step.sum.factors or by < 1:
            raise UnknownOp(f"scf.for: expected a constant step, got {loop.text!r}")
        most = max(0, (self.terms.range(last.sum)[1] - self.terms.range(first.sum)[0]) // by)
        turn = self.variable(turn_of(loop), most)
        return first, last, by, first.sum + by * turn

    # Values by kind.

    def integer(self, name: str, at: Lane) -> Number:
        value = self.value(name, at)
        if isinstance(value, Truth):
            one = self.terms.choose(value.holds, number(1), number(0))
            return Number(one, value.ok)
        if not isinstance(value, Number):
            raise UnknownOp(f"{name}: expected an integer, got {value}")
        return value

    def truth(self, name: str, at: Lane) -> Truth:
        value = self.value(name, at)
        if not isinstance(value, Truth):
            raise UnknownOp(f"{name}: expected a condition, got {value}")
        return value

    def value(self, name: str, at: Lane) -> Value:
        key = self._key(name, at)
        if key not in self._memo:
            self._memo[key] = self._evaluate(name, at)
        return self._memo[key]

    @staticmethod
    def _key(name: str, at: Lane) -> object:
        return name, tuple(x.key for x in at)

    def _evaluate(self, name: str, at: Lane) -> Value:
        if (parameter := self.program.parameter(name)) is not None:
            argument, kind = parameter
            if kind.pointer:
                return Pointer(argument, number(0), kind.bits // 8)
            return Number(self.scalars[argument])
        if name in self.program.carried:
            return self._carried(*self.program.carried[name])
        op, i = self.program.defined[name]
        if op.name in DATA:
            return Data()
        if op.name in ("scf.for", "scf.if"):
            return self._of_region(op, i, at)
        result: Value = getattr(self, f"do_{op.name.replace('.', '_')}")(op, at)
        return result

    def unknown(self, kind: Type, what: str = "any") -> Value:
        """A value of which only the type is known."""
        if kind.floating:
            return Data()
        if kind.bits == 1:
            return Truth(self.terms.symbol(self.terms.fresh(what, 0, 1)) == 1)
        half = 1 << kind.bits - 1
        return Number(self.terms.fresh(what, -half, half - 1))

    def _sized(self, op: Op, x: Sum, *parts: Number) -> Number:
        """The result of integer arithmetic: ok if its parts are and its type holds it."""
        return Number(x, both(*(part.ok for part in parts), self.terms.fits(x, op.types[-1].bits)))

    def _pair(self, op: Op, at: Lane) -> tuple[Number, Number]:
        a, b = (self.integer(name, at) for name in op.operands)
        return a, b

    # Control flow.

    def _of_region(self, op: Op, i: int, at: Lane) -> Value:
        if op.name == "scf.if":
            asked = self.truth(op.operands[0], ())
            names = [block.ops[-1].operands[i] for block in op.blocks]
            return self._merge(asked, names, at)
        return self._after_loop(op, i)

    def _merge(self, asked: Truth, names: Sequence[str], at: Lane) -> Value:
        """One of two values, whichever `asked` says; the other's faults do not matter."""
        if asked.holds is True or z3.is_false(asked.holds):
            return self.value(names[asked.holds is not True], at)
        a, b = (self.value(name, at) for name in names)
        if isinstance(a, Data) or isinstance(b, Data):
            return Data()
        ok = both(asked.ok, implies(asked.holds, a.ok), implies(negate(asked.holds), b.ok))
        if isinstance(a, Number) and isinstance(b, Number):
            return Number(self.terms.choose(asked.holds, a.sum, b.sum), ok)
        if isinstance(a, Truth) and isinstance(b, Truth):
            return Truth(z3.If(asked.holds, self._asked(a.holds), self._asked(b.holds)), ok)
        if isinstance(a, Pointer) and isinstance(b, Pointer) and (a.tensor, a.size) == (b.tensor, b.size):
            return Pointer(a.tensor, self.terms.choose(asked.holds, a.offset, b.offset), a.size, ok)
        raise UnknownOp(f"{names}: expected values of one kind, got {a} and {b}")

    def _carried(self, loop: Op, at: int) -> Value:
        if at == 0:
            first, _, _, turn = self.bounds(loop)
            return Number(turn, first.ok)
        low, high = self._carried_range(loop, at - 1)
        return Number(self.terms.fresh("carried", low, high))

    def _after_loop(self, loop: Op, i: int) -> Value:
        low, high = self._carried_range(loop, i)
        name = loop.results[i]
        result = self.known[name] if name in self.known else self.terms.fresh("total", low, high)
        op, _ = self.program.defined[loop.blocks[0].ops[-1].operands[i]]
        summed, _ = self.program.defined.get(op.operands[-1], (None, 0))
        nothing = self.integer(loop.operands[3 + i], ()).sum.key == (0,)
        if nothing and summed is not None and adds(summed) and op.operands[0] == loop.blocks[0].arguments[1 + i]:
            lanes = summed.types[0].shape[summed.axis]
            self.totals.append(Total(loop, name, summed.operands[0], lanes, result))
        return Number(result)

    def beside(self, name: str, turn: Sum, loop: Op) -> Thread:
        """Another lane of this thread's program, in iteration `turn` of a loop."""
        programs = {what: x for what, x in self.variables.items() if what.startswith("program")}
        other = Thread(self.program, self.terms, name, self.scalars, self.programs, known=self.known)
        other.variables |= programs | {turn_of(loop): turn}
        return other

    def _carried_range(self, loop: Op, i: int) -> Range:
        """The range of a value that a loop carries and adds to; of its type, if it does not only add.

        A probe works out what is added while nothing is known of the carried values. If what is added lies in [a, b] in
        each of at most n iterations, the sum grows by [n·a, n·b]; in 64 bits it cannot have wrapped on its way there.
        """
        key = (id(loop), i)
        if key not in self._ranges:
            body, half = loop.blocks[0], 1 << loop.types[i].bits - 1
            self._ranges[key] = -half, half - 1
            op, _ = self.program.defined[body.ops[-1].operands[i]]
            if op.name == "arith.addi" and op.operands[0] == body.arguments[1 + i]:
                memo = dict(self._memo)
                added = self.terms.range(self.integer(op.operands[1], ()).sum)
                first, last, by, _ = self.bounds(loop)
                most = max(0, -(-(self.terms.range(last.sum)[1] - self.terms.range(first.sum)[0]) // by))
                start = self.terms.range(self.integer(loop.operands[3 + i], ()).sum)
                low, high = start[0] + most * min(0, added[0]), start[1] + most * max(0, added[1])
                if -half <= low and high < half:
                    self._ranges[key] = low, high
                self._memo = memo  # what was worked out while nothing was known
        return self._ranges[key]

    # Shapes.

    def do_tt_splat(self, op: Op, at: Lane) -> Value:
        return self.value(op.operands[0], ())

    def do_tt_broadcast(self, op: Op, at: Lane) -> Value:
        shape = op.types[0].shape
        return self.value(op.operands[0], tuple(number(0) if n == 1 else x for n, x in zip(shape, at, strict=True)))

    def do_tt_expand_dims(self, op: Op, at: Lane) -> Value:
        return self.value(op.operands[0], (*at[: op.axis], *at[op.axis + 1 :]))

    def do_tt_make_range(self, op: Op, at: Lane) -> Value:
        return Number(at[0] + int(op.attribute("start")))

    def do_tt_bitcast(self, op: Op, at: Lane) -> Value:
        kind = op.types[-1]
        if not kind.pointer:
            return self.unknown(kind)
        pointer = self.value(op.operands[0], at)
        assert isinstance(pointer, Pointer)
        return Pointer(pointer.tensor, pointer.offset, kind.bits // 8, pointer.ok)

    # Where a program is.

    def do_tt_get_program_id(self, op: Op, at: Lane) -> Value:
        return Number(self.program_id("xyz".index(op.text.split()[1])))

    def do_tt_get_num_programs(self, op: Op, at: Lane) -> Value:
        return Number(self.programs["xyz".index(op.text.split()[1])])

    # Integers.

    def do_arith_constant(self, op: Op, at: Lane) -> Value:
        kind = op.types[-1]
        if kind.floating:
            return Data()
        match = re.match(r"arith\.constant (?:dense<)?(-?\d+|true|false)\b", op.text)
        if match is None:
            raise UnknownOp(f"arith.constant: expected one number, got {op.text!r}")
        if match[1] in ("true", "false"):
            return Truth(True if match[1] == "true" else z3.BoolVal(False))
        return Number(number(int(match[1])))

    def do_arith_addi(self, op: Op, at: Lane) -> Value:
        a, b = self._pair(op, at)
        return self._sized(op, a.sum + b.sum, a, b)

    def do_arith_subi(self, op: Op, at: Lane) -> Value:
        a, b = self._pair(op, at)
        return self._sized(op, a.sum - b.sum, a, b)

    def do_arith_muli(self, op: Op, at: Lane) -> Value:
        a, b = self._pair(op, at)
        return self._sized(op, self.terms.times(a.sum, b.sum), a, b)

    def do_arith_divsi(self, op: Op, at: Lane) -> Value:
        a, b = self._pair(op, at)
        quotient, _ = self.terms.divide(a.sum, b.sum)
        return Number(quotient, both(a.ok, b.ok, self.terms.at_least(b.sum, 1)))

    def do_arith_remsi(self, op: Op, at: Lane) -> Value:
        a, b = self._pair(op, at)
        _, rest = self.terms.divide(a.sum, b.sum)
        return Number(rest, both(a.ok, b.ok, self.terms.at_least(b.sum, 1)))

    def do_arith_shrsi(self, op: Op, at: Lane) -> Value:
        a, b = self._pair(op, at)
        if b.sum.factors:
            return self.unknown(op.types[-1])
        quotient, _ = self.terms.divide(a.sum, number(1 << b.sum.const), floor=True)
        return Number(quotient, both(a.ok, b.ok))

    def do_arith_shli(self, op: Op, at: Lane) -> Value:
        a, b = self._pair(op, at)
        if b.sum.factors:
            return self.unknown(op.types[-1])
        return self._sized(op, a.sum * (1 << b.sum.const), a, b)

    def do_arith_minsi(self, op: Op, at: Lane) -> Value:
        a, b = self._pair(op, at)
        return Number(self.terms.minimum(a.sum, b.sum), both(a.ok, b.ok))

    def do_arith_maxsi(self, op: Op, at: Lane) -> Value:
        a, b = self._pair(op, at)
        return Number(self.terms.maximum(a.sum, b.sum), both(a.ok, b.ok))

    def do_arith_extsi(self, op: Op, at: Lane) -> Value:
        if op.types[0].bits == 1:
            raise UnknownOp(f"arith.extsi of a condition: {op.text!r}")
        return self.value(op.operands[0], at)

    def do_arith_extui(self, op: Op, at: Lane) -> Value:
        if op.types[0].bits != 1:
            return self.unknown(op.types[-1])
        return self.integer(op.operands[0], at)

    def do_arith_trunci(self, op: Op, at: Lane) -> Value:
        value = self.integer(op.operands[0], at)
        return Number(self.terms.wrap(value.sum, op.types[-1].bits), value.ok)

    def do_arith_cmpi(self, op: Op, at: Lane) -> Value:
        a, b = (self.value(name, at) for name in op.operands)
        if isinstance(a, Truth) or isinstance(b, Truth):
            raise UnknownOp(f"arith.cmpi of conditions: {op.text!r}")
        assert isinstance(a, Number)
        assert isinstance(b, Number)
        terms, x, y = self.terms, a.sum, b.sum
        holds: dict[str, Callable[[], Condition]] = {
            "slt": lambda: terms.less(x, y),
            "sle": lambda: terms.at_least(y, x),
            "sgt": lambda: terms.less(y, x),
            "sge": lambda: terms.at_least(x, y),
            "eq": lambda: terms.equal(x, y),
            "ne": lambda: negate(terms.equal(x, y)),
            # Of mutants: each holds in one case more.
            "sle1": lambda: terms.at_least(y + 1, x),
            "sge1": lambda: terms.at_least(x + 1, y),
            "eq1": lambda: z3.Or(self._asked(terms.equal(x, y)), self._asked(terms.equal(x, y + 1))),
            "true": lambda: True,
        }
        asked = holds.get(op.predicate.rstrip(","))
        if asked is None:
            raise UnknownOp(f"arith.cmpi: expected a signed comparison, got {op.text!r}")
        return Truth(asked(), both(a.ok, b.ok))

    # Conditions; on integers these are bits of data.

    def _logic(self, op: Op, at: Lane) -> tuple[Truth, Truth] | None:
        if op.types[-1].bits != 1:
            return None
        a, b = (self.truth(name, at) for name in op.operands)
        return a, b

    def do_arith_andi(self, op: Op, at: Lane) -> Value:
        pair = self._logic(op, at)
        if pair is None:
            return self.unknown(op.types[-1])
        a, b = pair
        # A condition that surely fails decides, whatever the other is.
        sure = [both(x.ok, negate(x.holds)) for x in pair]
        ok = True if a.ok is True and b.ok is True else z3.Or(*sure, self._asked(both(a.ok, b.ok)))
        return Truth(both(a.holds, b.holds), ok)

    def do_arith_ori(self, op: Op, at: Lane) -> Value:
        pair = self._logic(op, at)
        if pair is None:
            return self.unknown(op.types[-1])
        a, b = pair
        holds = True if a.holds is True or b.holds is True else z3.Or(a.holds, b.holds)
        sure = [self._asked(both(x.ok, x.holds)) for x in pair]
        ok = True if a.ok is True and b.ok is True else z3.Or(*sure, self._asked(both(a.ok, b.ok)))
        return Truth(holds, ok)

    def do_arith_xori(self, op: Op, at: Lane) -> Value:
        pair = self._logic(op, at)
        if pair is None:
            return self.unknown(op.types[-1])
        a, b = pair
        return Truth(z3.Xor(self._asked(a.holds), self._asked(b.holds)), both(a.ok, b.ok))

    def do_arith_select(self, op: Op, at: Lane) -> Value:
        # The condition of a select of tensors may be one for all lanes.
        scalar = not op.types[0].shape and op.types[0].bits == 1
        return self._merge(self.truth(op.operands[0], () if scalar else at), op.operands[1:], at)

    # Memory.

    def do_tt_addptr(self, op: Op, at: Lane) -> Value:
        pointer, offset = self.value(op.operands[0], at), self.integer(op.operands[1], at)
        assert isinstance(pointer, Pointer)
        step = pointer.size * offset.sum
        there = pointer.offset + step
        ok = both(pointer.ok, offset.ok, self.terms.fits(step, 64), self.terms.fits(there, 64))
        return Pointer(pointer.tensor, there, pointer.size, ok)

    def do_tt_load(self, op: Op, at: Lane) -> Value:
        kind = op.types[0]
        pointer = self.value(op.operands[0], at)
        assert isinstance(pointer, Pointer)
        value = self.unknown(self.result_type(op), f"{self.name}.{pointer.tensor}")
        if not isinstance(value, Number):
            return value
        memory = z3.Function(f"{pointer.tensor}.{kind.bits}", z3.IntSort(), z3.IntSort())
        self.terms.define(value.sum, self.terms.symbol(value.sum) == memory(self.terms.symbol(pointer.offset)))
        self._loaded[self._key(op.results[0], at)] = value.sum
        if len(op.operands) == 1:
            self._note(pointer.tensor, Read(pointer.offset, value.sum, True))
            return value
        mask = self.truth(op.operands[1], at)
        self._note(pointer.tensor, Read(pointer.offset, value.sum, mask.holds))
        if len(op.operands) == 2:  # anything where it is masked
            return Number(value.sum)
        other = self.integer(op.operands[2], at)
        return Number(self.terms.choose(mask.holds, value.sum, other.sum), other.ok)

    def _note(self, tensor: str, read: Read) -> None:
        self.reads.setdefault(tensor, []).append(read)

    def result_type(self, op: Op) -> Type:
        """What a load gives: the element of what it points at; floats are told by their name."""
        text = op.text.rpartition(" : ")[2]
        return Type((), op.types[0].bits, False, re.search(r"ptr<b?f\d", text) is not None)

    def do_tt_store(self, op: Op, at: Lane) -> Value:
        raise UnknownOp(f"tt.store: expected no use of its result: {op.text!r}")

    def do_tt_atomic_rmw(self, op: Op, at: Lane) -> Value:
        if not op.text.startswith("tt.atomic_rmw add,"):
            raise UnknownOp(f"tt.atomic_rmw: expected an add, got {op.text!r}")
        return self.unknown(op.types[-1])

    def do_tt_reduce(self, op: Op, at: Lane) -> Value:
        return self._combined(op, at, op.types[0].shape[op.axis])

    def do_tt_scan(self, op: Op, at: Lane) -> Value:
        return self._combined(op, (*at[: op.axis], *at[op.axis + 1 :]), op.types[0].shape[op.axis])

    def _combined(self, op: Op, rest: Lane, lanes: int) -> Value:
        """A sum of `lanes` numbers, known by the range of one; what another combiner makes is not known."""
        kind = op.types[-1]
        if not adds(op):
            return self.unknown(kind)
        lane = self.variable(f"{op.name}{op.results[0]}", lanes - 1)
        term = self.integer(op.operands[0], (*rest[: op.axis], lane, *rest[op.axis :]))
        when, _ = self.reached(self.program.paths[id(op)])
        self.owed.append(implies(when, term.ok))
        low, high = (lanes * end for end in self.terms.range(term.sum))
        x = self.terms.fresh("summed", min(low, 0), max(high, 0))
        return Number(x, self.terms.fits(x, kind.bits))

    def do_scf_for(self, op: Op, at: Lane) -> Value:
        raise AssertionError("values of a region are made by `_of_region`")

    do_scf_if = do_scf_for
