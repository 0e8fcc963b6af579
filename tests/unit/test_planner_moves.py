"""Moves carried out round by round: they lead to the plan, keep to the limits and never starve the work."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.catalog import Role
from controlplane.domain.ids import EngineId, NodeId
from controlplane.scheduler.planner.fleet import solve
from controlplane.scheduler.planner.inventory import take_stock
from controlplane.scheduler.planner.loads import options_of
from controlplane.scheduler.planner.moves import inverse, lay_out
from controlplane.scheduler.planner.places import price, tidy
from controlplane.scheduler.planner.problem import (
    EngineCondition,
    EngineState,
    Limits,
    Move,
    MoveKind,
    NodeState,
    Problem,
)
from controlplane.scheduler.planner.programme import GroupTarget, Question, Target
from tests.planner_builders import demand, engine, node, pool, shape

ROUNDS_MAX = 60


def carry_out(nodes: tuple[NodeState, ...], move: Move) -> tuple[NodeState, ...]:
    """The nodes after a move. Fails where it can not be done."""
    by_id = {one.node_id: one for one in nodes}
    one = by_id[move.node_id]
    engines = {part.engine_id: part for part in one.engines}
    assert one.is_known
    assert not one.is_cordoned
    if move.kind is MoveKind.DRAIN:
        assert not engines, "a node that is given away holds nothing"
        return tuple(part for part in nodes if part.node_id != move.node_id)
    assert move.engine_id is not None
    if move.kind is MoveKind.LOAD:
        assert move.engine_id not in engines
        assert move.model is not None
        assert move.role is not None
        engines[move.engine_id] = EngineState(
            engine_id=move.engine_id,
            model=move.model,
            role=move.role,
            gpus=move.gpus,
            condition=EngineCondition.SERVING,
        )
    elif move.kind is MoveKind.UNLOAD:
        del engines[move.engine_id]
    elif move.kind is MoveKind.ROLE:
        assert engines[move.engine_id].role is move.role_before
        assert move.role is not None
        engines[move.engine_id] = replace(engines[move.engine_id], role=move.role)
    else:
        is_up = move.kind is MoveKind.WAKE
        condition = EngineCondition.SERVING if is_up else EngineCondition.ASLEEP
        assert engines[move.engine_id].condition is not condition
        engines[move.engine_id] = replace(
            engines[move.engine_id], condition=condition, sleep_level=0 if is_up else 1
        )
    after = replace(one, engines=tuple(engines.values()))
    awake = sum(part.gpus for part in after.engines if part.condition is not EngineCondition.ASLEEP)
    assert awake <= one.gpus, "more engines than GPUs"
    return tuple(after if part.node_id == move.node_id else part for part in nodes)


def able(problem: Problem, nodes: tuple[NodeState, ...], model: str) -> float:
    """Workflows a second that the engines of a model can do, added up by hand."""
    total = 0.0
    for one in nodes:
        for part in one.engines:
            if part.model == model and part.condition is EngineCondition.SERVING:
                total += next(
                    1_000.0 / kind.prefill_base_ms
                    for kind in problem.pools
                    if (kind.model, kind.gpu_type, kind.gpus) == (model, one.gpu_type, part.gpus)
                )
    return total


def removals(problem: Problem, moves: tuple[Move, ...], model: str | None = None) -> int:
    """Engines that are taken out of service; one that sleeps is not in service."""
    serving = {
        part.engine_id
        for one in problem.nodes
        for part in one.engines
        if part.condition is EngineCondition.SERVING
    }
    kinds = (MoveKind.UNLOAD, MoveKind.SLEEP, MoveKind.ROLE)
    return sum(
        move.kind in kinds and move.engine_id in serving and model in (None, move.model)
        for move in moves
    )


@st.composite
def fleets_to_change(draw: st.DrawFn) -> Problem:
    """A fleet of two models on two types of nodes, planned for other work than it has now."""
    can_sleep = draw(st.booleans())
    pools = tuple(
        pool(
            gpu, rate * gpus, model=model, gpus=gpus, load_s=60.0,
            wake_s=5.0 if can_sleep else None,
        )
        for gpu, rate in (("a", 2.0), ("b", 1.0))
        for model in ("m", "n")
        for gpus in (1, 2)
    )  # fmt: skip
    nodes = []
    for number in range(draw(st.integers(2, 7))):
        gpu = draw(st.sampled_from(["a", "b"]))
        left, engines = 2, []
        while left and draw(st.integers(0, 3)):
            gpus = draw(st.integers(1, left))
            left -= gpus
            engines.append(
                engine(f"n{number}e{left}", model=draw(st.sampled_from(["m", "n"])), gpus=gpus)
            )
        nodes.append(
            node(f"n{number}", gpu, *engines, gpus=2, is_known=draw(st.integers(0, 5)) > 0)
        )
    limits = Limits(
        removals_per_round_max=draw(st.integers(1, 3)),
        removals_per_model_ratio_max=draw(st.sampled_from([0.25, 1.0])),
        change_micro_usd=1_000,
    )
    works = tuple(demand(draw(st.integers(0, 8)) + 0.5, model=model) for model in ("m", "n"))
    return Problem(
        now_s=0.0, demands=works, pools=pools, nodes=tuple(nodes), limits=limits,
        shapes=(shape("a", 5, gpus=2), shape("b", 2, gpus=2)),
    )  # fmt: skip


@given(fleets_to_change())
def test_rounds_lead_to_the_plan_without_starving_anyone(problem: Problem) -> None:
    for _ in range(ROUNDS_MAX):
        plan = solve(problem)
        target = Counter[str]()
        for one in plan.desired:
            rate = next(
                1_000.0 / kind.prefill_base_ms
                for kind in problem.pools
                if (kind.model, kind.gpu_type, kind.gpus) == (one.model, one.gpu_type, one.gpus)
            )
            target[one.model] += one.desired * rate
        if not plan.moves:
            break
        assert removals(problem, plan.moves) <= problem.limits.removals_per_round_max
        for model in ("m", "n"):
            serving = sum(
                part.model == model and part.condition is EngineCondition.SERVING
                for one in problem.nodes
                for part in one.engines
            )
            most = max(1, int(problem.limits.removals_per_model_ratio_max * serving))
            assert removals(problem, plan.moves, model) <= most
        nodes = problem.nodes
        for move in plan.moves:
            # In the order of the numbers, so everything that it waits for is done.
            assert all(number < move.number for number in move.after)
            nodes = carry_out(nodes, move)
            for work in problem.demands:
                need = min(
                    work.arrivals_per_s_now,
                    able(problem, problem.nodes, work.model),
                    target[work.model],
                )
                assert able(problem, nodes, work.model) >= need - 1e-6
        problem = replace(problem, nodes=nodes, held=plan.held, now_s=problem.now_s + 10.0)
    assert not plan.moves, "it never comes to rest"
    needs = {work.model: work.arrivals_per_s_now for work in problem.demands}
    for one in plan.desired:
        # What is still to leave is needed until its room is free for another: nobody may starve.
        if one.desired < one.actual:
            kind = next(
                kind
                for kind in problem.pools
                if (kind.model, kind.gpu_type, kind.gpus) == (one.model, one.gpu_type, one.gpus)
            )
            rest = able(problem, problem.nodes, one.model) - 1_000.0 / kind.prefill_base_ms
            assert rest < min(needs[one.model], target[one.model])


def test_a_full_fleet_makes_room_before_it_loads_and_says_so() -> None:
    problem = Problem(
        now_s=0.0,
        demands=(demand(1.5, model="m"), demand(1.5, model="n")),
        pools=(pool("a", 1.0, model="m"), pool("a", 1.0, model="n")),
        shapes=(shape("a", 1),),
        nodes=tuple(node(f"n{i}", "a", engine(f"e{i}", model="m")) for i in range(4)),
        limits=Limits(removals_per_model_ratio_max=1.0),
    )
    plan = solve(problem)
    first, second, third, fourth = plan.moves
    assert [move.kind for move in (first, second)] == [MoveKind.UNLOAD] * 2
    assert [move.kind for move in (third, fourth)] == [MoveKind.LOAD] * 2
    assert {third.after, fourth.after} == {(1,), (2,)}
    assert first.reason == "m/ax1/both in here has 4 engines and needs 2"
    # One a round: the other load waits for its room, and the plan says how many wait.
    slower = replace(problem, limits=Limits(removals_per_round_max=1))
    plan = solve(slower)
    assert [move.kind for move in plan.moves] == [MoveKind.UNLOAD, MoveKind.LOAD]
    assert plan.moves_waiting == 2
    assert any("2 moves wait" in words for words in plan.binding)


def test_the_last_engine_leaves_only_after_its_successor_serves() -> None:
    problem = Problem(
        now_s=0.0,
        demands=(demand(0.9),),
        pools=(pool("dear", 1.0), pool("cheap", 1.0, load_s=60.0)),
        shapes=(shape("dear", 9), shape("cheap", 1)),
        nodes=(node("n1", "dear", engine("e1")), node("n2", "cheap")),
    )
    load, unload, drain = solve(problem).moves
    assert (load.kind, load.node_id, load.duration_s) == (MoveKind.LOAD, "n2", 60.0)
    assert (unload.kind, unload.engine_id, unload.after) == (MoveKind.UNLOAD, "e1", (1,))
    assert (drain.kind, drain.node_id, drain.after) == (MoveKind.DRAIN, "n1", (2,))
    assert load.gain_micro_usd_per_hour + unload.gain_micro_usd_per_hour == pytest.approx(
        9e6, rel=0.02
    )
    # Asleep it keeps its weights where the node stays.
    awake = replace(
        problem,
        pools=(pool("dear", 1.0, wake_s=1.0), pool("cheap", 1.0)),
        nodes=(
            node("n1", "dear", engine("e1"), engine("e2", model="x"), gpus=2),
            node("n2", "cheap"),
        ),
        shapes=(shape("dear", 9, gpus=2), shape("cheap", 1)),
        demands=(demand(0.1, model="y"),),
    )
    assert {move.kind for move in solve(awake).moves} <= {MoveKind.SLEEP, MoveKind.DRAIN}


def test_a_role_changes_in_place() -> None:
    pools = tuple(
        replace(pool("a", 10.0, role=role), decode_ms_base=10.0, decode_ms_per_seq=10.0)
        for role in (Role.PREFILL, Role.DECODE)
    )
    problem = Problem(
        now_s=0.0,
        # A prompt takes 100 ms and decoding 300 of an engine.
        demands=(demand(5.0, completion_tokens=20.0),),
        pools=tuple(replace(one, load_s=600.0) for one in pools),
        shapes=(shape("a", 1),),
        nodes=(
            node("n1", "a", engine("e1", role=Role.DECODE), is_releasable=False),
            node("n2", "a", engine("e2", role=Role.DECODE), is_releasable=False),
            node("n3", "a", engine("e3", role=Role.DECODE), is_releasable=False),
        ),
    )
    (move,) = solve(problem).moves
    assert (move.kind, move.role, move.role_before) == (
        MoveKind.ROLE,
        Role.PREFILL,
        Role.DECODE,
    )


def test_what_a_solver_left_behind_is_tidied_up() -> None:
    """Near the best a fleet may load on one node what it takes down on the next."""
    problem = Problem(
        now_s=0.0,
        demands=(demand(1.0),),
        pools=(pool("a", 1.0, load_s=36.0), pool("a", 2.0, gpus=2, load_s=36.0)),
        shapes=(shape("a", 1, gpus=2),),
        nodes=(
            node("n1", "a", engine("e1"), engine("e2"), gpus=2),
            node("n2", "a", engine("e3", gpus=2), gpus=2),
        ),
        limits=Limits(change_micro_usd=1_000),
    )
    question = Question(
        problem=problem,
        options=tuple(options_of(problem, one) for one in problem.demands),
        planned=(1.0,),
        stock=take_stock(problem),
        gpus_less={},
    )
    small, large = (
        GroupTarget(group=group, released=0, emptied=emptied, kept=kept, woken={}, changed={})
        for group, emptied, kept in zip(
            question.stock.groups, (0, 1), ({0: 1}, {1: 0}), strict=True
        )
    )
    untidy = Target(
        groups=(small, large), loaded={(0, 0): 1, (0, 1): 1}, bought={}, engines={},
        left_ratio=(0.0,), flows={}, objective=0.0,
    )  # fmt: skip
    untidy = replace(untidy, objective=price(question, untidy))
    # Two nodes at a dollar; two stops and two starts, of a hundredth of half a node and of a whole one.
    assert untidy.objective == 2e6 + 4 * 1_000 + 5_000 + 10_000
    done = tidy(question, untidy)
    assert done.objective == 2e6
    assert (done.loaded, [one.kept for one in done.groups]) == ({}, [{0: 2}, {1: 1}])
    assert lay_out(question, done).changes == ()


MOVE = Move(
    number=3,
    kind=MoveKind.LOAD,
    node_id=NodeId("n1"),
    engine_id=EngineId("e1"),
    model="m",  # type: ignore[arg-type]
    role=Role.BOTH,
    gpus=1,
    reason="",
    gain_micro_usd_per_hour=5.0,
)


@pytest.mark.parametrize("kind", [MoveKind.LOAD, MoveKind.WAKE])
def test_what_is_taken_back_leaves_the_fleet_as_it_was(kind: MoveKind) -> None:
    asleep = engine("e1", condition=EngineCondition.ASLEEP, sleep_level=1)
    before = (node("n1", "a", *((asleep,) if kind is MoveKind.WAKE else ())),)
    move = replace(MOVE, kind=kind)
    after = carry_out(before, move)
    assert after != before
    back = inverse(move)
    assert back is not None
    assert carry_out(after, back) == before
    again = inverse(back)
    assert again is not None
    assert carry_out(before, again) == after


def test_a_role_is_taken_back_and_a_node_given_away_is_not() -> None:
    move = replace(MOVE, kind=MoveKind.ROLE, role=Role.DECODE, role_before=Role.BOTH)
    back = inverse(move)
    assert back is not None
    assert (back.role, back.role_before) == (Role.BOTH, Role.DECODE)
    assert inverse(replace(MOVE, kind=MoveKind.DRAIN, engine_id=None)) is None
