"""Repair of sharded and replicated embeddings: the same rows, report and errors as in one process, on every rank."""

import dataclasses
import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from automodel.training.embedding_row_repair import repair_input_embedding_rows

LOGGER = "automodel.training.embedding_row_repair"
LAYOUTS = {
    "rows": ((-1,), [Shard(0)]),
    "columns": ((-1,), [Shard(1)]),
    "copies": ((-1,), [Replicate()]),
    "rows and columns": ((2, -1), [Shard(0), Shard(1)]),
    "columns and rows": ((2, -1), [Shard(1), Shard(0)]),
    "rows twice": ((2, -1), [Shard(0), Shard(0)]),
    "copies of rows": ((2, -1), [Replicate(), Shard(0)]),
    "copies of columns": ((2, -1), [Replicate(), Shard(1)]),
    "rows, copied": ((2, -1), [Shard(0), Replicate()]),
}
# Where a row lies on several ranks: in parts, whole, or neither.
COUNTED = ["rows", "columns", "rows and columns", "copies of rows"]
DAMAGE = {1: 0.0, 3: 1e-9, 4: math.nan}


class Model(nn.Module):
    """Two embeddings whose values depend on a seed only."""

    def __init__(self, *, vocab=37, hidden=11, dtype=torch.float32, seed=0, padding_idx=None, damage=DAMAGE):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden, dtype=dtype, padding_idx=padding_idx)
        self.lm_head = nn.Linear(hidden, vocab, bias=False, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in (self.embed_tokens.weight, self.lm_head.weight):
                weight.copy_(torch.randn(weight.shape, generator=generator))
            for row, value in damage.items():
                self.embed_tokens.weight[row] = value

    def get_input_embeddings(self):
        return self.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head


def make_meshes(world_size, layouts):
    """Yields each layout with its mesh and placements; a mesh takes longer to make than a repair takes."""
    meshes = {}
    for layout in layouts:
        shape, placements = LAYOUTS[layout]
        sizes = tuple(world_size // max(math.prod(n for n in shape if n > 0), 1) if n < 0 else n for n in shape)
        if sizes not in meshes:
            meshes[sizes] = init_device_mesh("cpu", sizes)
        yield layout, meshes[sizes], placements


def distribute(model, mesh, placements, *, names=("embed_tokens", "lm_head")):
    for module in map(model.get_submodule, names):
        weight = distribute_tensor(module.weight.detach(), mesh, placements)
        module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    return model


def whole(weight):
    weight = weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.clone()


def local(weight):
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


class Traffic(TorchDispatchMode):
    """Counts the bytes of the tensors that collectives take and fill."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **kwargs or {})


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.kept = []

    def emit(self, record):
        self.kept.append((record.levelname, record.getMessage()))


def attempt(model, **arguments):
    """Repairs; returns the report as a dict or the error as (class, text), and what was logged."""
    logger, records = logging.getLogger(LOGGER), Records()
    logger.addHandler(records)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        outcome = dataclasses.asdict(repair_input_embedding_rows(model, **arguments))
    except Exception as error:  # noqa: BLE001 - whatever is raised is compared
        outcome = (type(error).__name__, str(error))
    finally:
        logger.setLevel(level)
        logger.removeHandler(records)
    return outcome, records.kept


def agree(outcomes):
    """What every rank's outcome is."""
    first, *others = outcomes
    assert all(other == first for other in others), outcomes
    return first


def repair_layouts(rank, world_size, layouts, settings, arguments):
    """For each layout the outcome, what was logged, and both weights whole."""
    results = []
    for _, mesh, placements in make_meshes(world_size, layouts):
        model = distribute(Model(**settings), mesh, placements)
        outcome, logged = attempt(model, **arguments)
        results.append((outcome, logged, whole(model.embed_tokens.weight), whole(model.lm_head.weight)))
    return results


def run_layouts(ranks, world_size, layouts, settings=None, arguments=None):
    """Yields each layout with the results of all ranks."""
    results = ranks.run(world_size, repair_layouts, list(layouts), settings or {}, arguments or {})
    yield from zip(layouts, zip(*results, strict=True), strict=True)


def check_against_one_process(results, settings, arguments):
    model = Model(**settings)
    before, head = whole(model.embed_tokens.weight), whole(model.lm_head.weight)
    expected = dataclasses.asdict(repair_input_embedding_rows(model, **arguments))
    after = whole(model.embed_tokens.weight)
    report = agree([outcome for outcome, *_ in results])
    assert isinstance(report, dict), report
    assert report["min_norm_before"] == pytest.approx(expected.pop("min_norm_before"), rel=1e-6)
    assert report["target_norm"] == pytest.approx(expected.pop("target_norm"), rel=1e-6)
    assert {name: report[name] for name in expected} == expected
    ids = list(report["repaired_row_ids"])
    untouched = [row for row in range(len(before)) if row not in ids]
    for _, _, weight, output in results:
        assert torch.equal(bits(weight[untouched]), bits(before[untouched]))
        torch.testing.assert_close(weight[ids], after[ids], rtol=2 * torch.finfo(weight.dtype).eps, atol=0)
        assert torch.equal(output, head)
        # Every rank holds the same bits.
        assert torch.equal(bits(weight), bits(results[0][2]))
    for rank, (_, logged, *_) in enumerate(results):
        assert [level for level, _ in logged] == (["WARNING"] if rank == 0 else [])
    assert f"ids={ids}" in results[0][1][0][1]
    return report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layout_repairs_as_one_process_does(ranks, dtype):
    settings = {"dtype": dtype}
    for layout, results in run_layouts(ranks, 4, LAYOUTS, settings):
        report = check_against_one_process(results, settings, {})
        assert report["repaired_row_ids"] == (1, 3, 4), layout


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_and_two_ranks(ranks, world_size):
    for _, results in run_layouts(ranks, world_size, ["rows", "columns", "copies"]):
        check_against_one_process(results, {}, {})


def test_a_rank_with_an_empty_shard(ranks):
    # Five rows or columns in parts of two, and one rank without any.
    settings = {"vocab": 5, "hidden": 5, "damage": {0: 0.0, 4: math.inf}}
    for layout, results in run_layouts(ranks, 4, LAYOUTS, settings):
        assert check_against_one_process(results, settings, {})["repaired_row_ids"] == (0, 4), layout


def test_padded_vocabularies(ranks):
    damage = {2: 0.0, 5: 0.0, **dict.fromkeys(range(30, 37), 0.0), 33: 1e-10}
    settings = {"damage": damage, "padding_idx": 2}
    arguments = {"vocab_size": 30, "max_rows": 2, "target": "median"}
    for layout, results in run_layouts(ranks, 4, COUNTED, settings, arguments):
        report = check_against_one_process(results, settings, arguments)
        assert report["repaired_row_ids"] == (5, 33), layout
        assert report["num_zero_rows_kept"] == 7


def test_healthy_rows_are_said_once(ranks):
    for layout, results in run_layouts(ranks, 4, COUNTED, {"damage": {}}):
        assert agree([outcome for outcome, *_ in results])["repaired_row_ids"] == (), layout
        assert [[level for level, _ in logged] for _, logged, *_ in results] == [["INFO"], [], [], []]


def test_too_many_damaged_rows_are_counted_once(ranks):
    for layout, results in run_layouts(ranks, 4, COUNTED, arguments={"max_rows": 2}):
        kind, text = agree([outcome for outcome, *_ in results])
        assert kind == "ValueError", layout
        assert "3 damaged rows, more than max_rows=2" in text


def repair_copies(rank, world_size, only_rank):
    """Plain tensors; where `only_rank` is given, that rank's copy alone is damaged."""
    model = Model(damage=DAMAGE if only_rank in (None, rank) else {})
    outcome, logged = attempt(model, group=dist.group.WORLD)
    return outcome, logged, whole(model.embed_tokens.weight), whole(model.lm_head.weight)


def test_copies_in_a_group_of_plain_tensors(ranks):
    check_against_one_process(ranks.run(2, repair_copies, None), {}, {})


def test_copies_of_which_one_is_damaged_become_the_same(ranks):
    results = ranks.run(4, repair_copies, 2)
    report = agree([outcome for outcome, *_ in results])
    assert report["repaired_row_ids"] == (1, 3, 4)
    assert report["num_non_finite_rows"] == 1
    for _, _, weight, _ in results:
        assert torch.equal(bits(weight), bits(results[0][2]))
        assert weight.isfinite().all()
        assert (weight.norm(dim=1) > 1).all()


def repair_different_copies(rank, world_size):
    """Each rank's copy has a damaged row of its own, and the second also a worse form of the first one's."""
    outcomes = []
    for max_rows in (2, 3):
        model = Model(damage={rank: 1e-9} if rank != 1 else {0: math.nan, 1: 1e-9})
        outcomes.append(
            (attempt(model, group=dist.group.WORLD, max_rows=max_rows)[0], whole(model.embed_tokens.weight))
        )
    return outcomes


def test_a_row_is_as_damaged_as_the_worst_of_its_copies(ranks):
    refused, repaired = zip(*ranks.run(3, repair_different_copies), strict=True)
    assert "3 damaged rows, more than max_rows=2" in agree([outcome for outcome, _ in refused])[1]
    report = agree([outcome for outcome, _ in repaired])
    assert (report["repaired_row_ids"], report["num_non_finite_rows"]) == ((0, 1, 2), 1)
    assert all(torch.equal(bits(weight), bits(repaired[0][1])) for _, weight in repaired)


def repair_local(rank, world_size):
    """Plain tensors without a group: each rank has a model of its own, and rank zero does not take part."""
    if rank == 0:
        return None
    model = Model(damage={rank: 0.0})
    return attempt(model)[0]["repaired_row_ids"], whole(model.embed_tokens.weight).norm(dim=1).min().item() > 1


def test_a_plain_tensor_is_local_unless_a_group_is_passed(ranks):
    assert ranks.run(3, repair_local) == [None, ((1,), True), ((2,), True)]


def repair_disjoint(rank, world_size):
    """Two meshes of two ranks, each with a model of its own; the first is healthy and takes fewer exchanges."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))["shard"]
    is_second = rank >= 2
    settings = {"vocab": 50, "seed": 1, "damage": {7: 0.0, 49: math.nan}} if is_second else {"damage": {}}
    model = distribute(Model(**settings), mesh, [Shard(0)])
    outcome, logged = attempt(model)
    return outcome, logged, settings, whole(model.embed_tokens.weight), whole(model.lm_head.weight)


def test_disjoint_meshes_do_not_touch_each_other(ranks):
    results = ranks.run(4, repair_disjoint)
    healthy, repaired = (agree([result[0] for result in part]) for part in (results[:2], results[2:]))
    assert healthy["repaired_row_ids"] == ()
    assert repaired["repaired_row_ids"] == (7, 49)
    check_against_one_process([(o, log, w, h) for o, log, _, w, h in results[2:]], results[2][2], {})
    assert torch.equal(results[0][3], Model(damage={}).embed_tokens.weight)
    assert [len(logged) for _, logged, *_ in results] == [1, 0, 1, 0]


def repair_fsdp(rank, world_size, kind):
    model = Model()
    match kind:
        case "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        case "hsdp":
            mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
            fully_shard(model, mesh=mesh)
        case _:
            mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
            styles = {"embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": ColwiseParallel()}
            parallelize_module(model, mesh["tp"], styles)
            fully_shard(model, mesh=mesh["dp"])
    parameters = list(model.parameters())
    outcome, logged = attempt(model)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(isinstance(one, DTensor) and one.requires_grad for one in parameters)
    return outcome, logged, whole(model.embed_tokens.weight), whole(model.lm_head.weight)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "fsdp of tensor parallel"])
def test_models_that_fsdp2_sharded(ranks, kind):
    check_against_one_process(ranks.run(4, repair_fsdp, kind), {}, {})


def measure_traffic(rank, world_size):
    """For each layout the repaired rows, and the bytes that went through collectives."""
    measured = {}
    for layout, mesh, placements in make_meshes(world_size, LAYOUTS):
        model = distribute(Model(vocab=256, hidden=2048), mesh, placements)
        with Traffic() as traffic:
            report = repair_input_embedding_rows(model)
        measured[layout] = report.repaired_row_ids, traffic.num_bytes
    return measured


def test_the_table_is_never_gathered(ranks):
    size_of_table = 256 * 2048 * 4
    for measured in ranks.run(4, measure_traffic):
        for layout, (ids, num_bytes) in measured.items():
            assert ids == (1, 3, 4), layout
            assert 0 < num_bytes < size_of_table / 16, layout


# What rank 1 alone is asked for.
ARGUMENTS = {
    "settings": {"max_rows": 0},
    "another bound": {"max_rows": 1},
    "another target": {"target": "median"},
    "another threshold": {"min_norm": 1e-12},
    "another vocabulary": {"vocab_size": 36},
}


def see_faults(rank, world_size, faults):
    mesh = init_device_mesh("cpu", (world_size,))
    return [see_a_fault(rank, mesh, fault) for fault in faults]


def see_a_fault(rank, mesh, fault):
    """A fault that rank 1 alone sees; returns the outcome, and whether this rank's shards are as before."""
    arguments = ARGUMENTS.get(fault, {}) if rank == 1 else {}
    placements = [Shard(1)] if fault == "damaged output in some columns" else [Shard(0)]
    settings = {}
    match fault:
        case "another padding row":
            settings = {"padding_idx": 1} if rank == 1 else {}
        case "copies with another shape":
            settings = {"vocab": 38} if rank == 1 else {}
        case "overflow":
            # Of both damaged rows, the one on rank 1 would have its whole norm in one element.
            settings = {"dtype": torch.float16, "damage": {**dict.fromkeys(range(37), 6e4), 1: 0.0, 20: 0.0}}
    model = Model(**settings)
    with torch.no_grad():
        if fault == "overflow":
            model.lm_head.weight[1] = 1.0
            model.lm_head.weight[20] = torch.eye(37, 11)[0]
        if fault == "damaged output in some columns":
            model.lm_head.weight[3, 10] = math.nan
    if fault in ("not distributed", "copies with another shape", "copies whose getter fails"):
        arguments = {"group": dist.group.WORLD}
        if rank == 1 and fault == "not distributed":
            model.embed_tokens.weight = nn.Parameter(torch.empty(37, 11, device="meta"))
    else:
        distribute(model, mesh, placements)
    if fault == "no head" and rank == 1:
        model.lm_head = nn.Identity()
    if fault == "no embedding" and rank == 1:
        model.embed_tokens = nn.Identity()
    if fault == "an error of another class" and rank == 1:
        model.get_output_embeddings = lambda: {}["nothing"]
    if fault in ("the getter fails", "copies whose getter fails") and rank == 1:
        model.get_input_embeddings = lambda: {}["nothing"]
    if fault == "another head" and rank == 1:
        model.head, model.lm_head = model.lm_head, None
        model.get_output_embeddings = lambda: model.head
    before = [local(weight).clone() for weight in model.parameters() if not weight.is_meta]
    outcome, _ = attempt(model, **arguments)
    after = [local(weight) for weight in model.parameters() if not weight.is_meta]
    unchanged = all(torch.equal(bits(one), bits(other)) for one, other in zip(before, after, strict=True))
    dist.barrier()
    return outcome, unchanged


FAULTS = {
    "settings": ("ValueError", "max_rows must be positive, got 0"),
    "overflow": ("UnhealthyRepairError", "ids=[20]"),
    "damaged output in some columns": ("ValueError", "damaged too; nothing was changed: ids=[3]"),
    "not distributed": ("ValueError", "embed_tokens.weight is on the meta device"),
    "another bound": ("ValueError", "max_rows must be the same on every rank, got 256 on rank 0 and 1 on rank 1"),
    "another target": ("ValueError", "target must be the same on every rank, got 'rms' on rank 0 and 'median' on"),
    "another threshold": ("ValueError", "min_norm must be the same on every rank, got 1e-06 on rank 0 and 1e-12 on"),
    "another vocabulary": ("ValueError", "vocab_size must be the same on every rank, got None on rank 0 and 36 on"),
    "another padding row": ("ValueError", "padding_idx of embed_tokens.weight must be the same on every rank"),
    "copies with another shape": ("ValueError", "the shape of embed_tokens.weight must be the same on every rank"),
    "another head": ("ValueError", "got 'lm_head.weight' on rank 0 and 'head.weight' on rank 1"),
    "no head": ("ValueError", "the output embedding must be the same on every rank, got 'lm_head.weight' on rank 0"),
    "the getter fails": ("RuntimeError", "KeyError: 'nothing'"),
    "copies whose getter fails": ("RuntimeError", "KeyError: 'nothing'"),
    "no embedding": ("ValueError", "no input embedding"),
    "an error of another class": ("RuntimeError", "KeyError: 'nothing'"),
}


def test_a_fault_that_one_rank_sees_is_every_ranks_error(ranks):
    found = ranks.run(2, see_faults, list(FAULTS), timeout=30)
    for (fault, (kind, text)), results in zip(FAULTS.items(), zip(*found, strict=True), strict=True):
        raised, message = agree([outcome for outcome, _ in results])
        assert (raised, text in message) == (kind, True), (fault, raised, message)
        assert all(unchanged for _, unchanged in results), fault


def refuse_layouts(rank, world_size, kinds):
    mesh = init_device_mesh("cpu", (world_size,))
    return [refuse_layout(rank, mesh, kind) for kind in kinds]


def refuse_layout(rank, mesh, what):
    model = Model()
    if what == "partial":
        weight = DTensor.from_local(model.embed_tokens.weight.detach(), mesh, [Partial()])
        model.embed_tokens.weight = nn.Parameter(weight)
    if what == "other placements":
        distribute(model, mesh, [Shard(0)], names=["embed_tokens"])
        distribute(model, mesh, [Shard(1)], names=["lm_head"])
    if what == "a plain output":
        distribute(model, mesh, [Shard(0)], names=["embed_tokens"])
    if what == "other shapes":
        model.lm_head = nn.Linear(11, 38, bias=False)
        distribute(model, mesh, [Shard(0)])
    if what in ("tied", "tied, with an empty shard"):
        model = Model(vocab=5 if "empty" in what else 37)
        distribute(model, mesh, [Shard(0)])
        model.lm_head.weight = model.embed_tokens.weight
    if what == "uneven parts of its own":
        part = model.embed_tokens.weight.detach().split([20, 10, 5, 2])[rank]
        weight = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=(37, 11), stride=(11, 1))
        model.embed_tokens.weight = nn.Parameter(weight)
    return attempt(model)[0]


REFUSED = {
    "partial": "got placement P",
    "other placements": "differ in how they are sharded",
    "a plain output": "differ in how they are sharded",
    "other shapes": "differ in shape: (37, 11) and (38, 11)",
    "tied": "are tied",
    "tied, with an empty shard": "are tied",
    "uneven parts of its own": "has a local shape of (20, 11)",
}


def test_a_layout_that_cannot_be_repaired(ranks):
    found = ranks.run(4, refuse_layouts, list(REFUSED))
    for (what, text), outcomes in zip(REFUSED.items(), zip(*found, strict=True), strict=True):
        kind, message = agree(outcomes)
        assert (kind, text in message) == ("ValueError", True), (what, message)


def repair_interleaved(rank, world_size):
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2))
    model, placements = Model(vocab=8), [Shard(0), _StridedShard(0, split_factor=2)]
    for module in (model.embed_tokens, model.lm_head):
        start = 4 * (rank // 2) + rank % 2
        part = module.weight.detach()[start : start + 3 : 2].clone()
        weight = DTensor.from_local(part, mesh, placements, run_check=False, shape=(8, 11), stride=(11, 1))
        module.weight = nn.Parameter(weight)
    return attempt(model)[0]


def test_rows_that_are_interleaved_are_refused(ranks):
    kind, message = agree(ranks.run(4, repair_interleaved))
    assert kind == "ValueError"
    assert "interleaved" in message


def repair_outside_the_mesh(rank, world_size):
    mesh = DeviceMesh("cpu", [0, 1])
    return attempt(distribute(Model(), mesh, [Shard(0)]))[0]


def test_a_rank_outside_the_mesh_is_told_and_not_waited_for(ranks):
    *inside, outside = ranks.run(3, repair_outside_the_mesh)
    assert agree(inside)["repaired_row_ids"] == (1, 3, 4)
    assert outside[0] == "ValueError"
    assert "not part of" in outside[1]
