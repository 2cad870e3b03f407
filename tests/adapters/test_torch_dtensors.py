"""DTensors: each rank stores its box, replicas share theirs, and a part becomes a DTensor again.

Every rank of a world runs here one after the other, on torch's fake process group, which makes no communication.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from pccheck_torch import kind  # noqa: E402
from pccheck_torch.leaves import sharded  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import pccheck  # noqa: E402
from pccheck.errors import UnsupportedLeafError  # noqa: E402
from pccheck.state import boxes  # noqa: E402
from pccheck.state.boxes import Box  # noqa: E402

Parameter = torch.nn.Parameter


@contextlib.contextmanager
def rank_of(rank, *mesh_shape):
    """Be one rank of a mesh."""
    world = 1
    for n in mesh_shape:
        world *= n
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple(f"d{i}" for i in range(len(mesh_shape))))
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds meshes that are equal but know another rank


def ranks(*mesh_shape):
    for rank in range(torch.Size(mesh_shape).numel()):
        with rank_of(rank, *mesh_shape) as mesh:
            yield mesh


def made(mesh, full, placements):
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def stored(value):
    """Give spec and bytes, as a checkpoint would hold them."""
    spec, host = kind.describe(value), kind.host_bytes(value)
    assert host.nbytes == spec.nbytes
    return spec, ctypes.string_at(host.address, host.nbytes) if host.nbytes else b""


def part(full, box):
    return full[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


R, S = Replicate(), Shard
CASES = [
    ((1,), (S(0),), (4, 3)),
    ((4,), (S(0),), (8, 3)),
    ((4,), (S(0),), (6, 3)),  # uneven
    ((4,), (S(0),), (5, 2)),  # the last rank has nothing
    ((4,), (S(0),), (2,)),  # two ranks have nothing
    ((3,), (S(1),), (4, 7)),
    ((4,), (R,), (8, 3)),  # each replica another quarter
    ((4,), (R,), (3, 5)),
    ((4,), (R,), (1, 5)),  # one row: one replica has it
    ((2, 2), (R, S(0)), (8, 3)),  # HSDP
    ((2, 2), (R, S(0)), (5, 3)),
    ((2, 2), (R, S(1)), (5, 3)),
    ((2, 3), (S(0), R), (7, 2)),
    ((2, 2), (S(0), S(1)), (5, 5)),
    ((2, 2), (S(0), S(0)), (8, 2)),
    ((2, 2), (S(0), S(0)), (7, 2)),
    ((2, 2), (R, R), (7, 2)),
    ((2, 2), (_StridedShard(0, split_factor=2), S(0)), (8, 2)),  # FSDP2 over tensor parallelism
    ((2, 3), (_StridedShard(0, split_factor=3), S(0)), (12, 2)),
    ((2, 2, 2), (R, S(0), S(1)), (4, 4)),
    ((2,), (S(0),), (0, 3)),
]


@pytest.mark.parametrize(("mesh_shape", "placements", "shape"), CASES, ids=str)
def test_every_element_is_stored_once_and_where_it_belongs(mesh_shape, placements, shape):
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    found = []
    for mesh in ranks(*mesh_shape):
        d = made(mesh, full, placements)
        spec, data = stored(d)
        assert (spec.shape, spec.dtype, "stride" in spec.extra) == (shape, "float32", False)
        assert spec.box.fits(shape)
        assert data == raw(part(full, spec.box))
        found.append(spec.box)
    assert boxes.holes_and_overlaps(shape, found) == (False, False)


@pytest.mark.parametrize(("mesh_shape", "placements", "shape"), CASES, ids=str)
def test_like_asks_for_the_whole_local_part_and_gets_it_as_a_dtensor(mesh_shape, placements, shape):
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    for mesh in ranks(*mesh_shape):
        for want in (made(mesh, full, placements), Parameter(made(mesh, full, placements))):
            spec = kind.like(want)
            local = want.to_local().detach()
            assert spec.box.elements == local.numel()
            assert spec.nbytes == 4 * local.numel()
            data = bytearray(raw(part(full, spec.box)))
            back = kind.convert(kind.build(replace(spec, nbytes=len(data)), memoryview(data)), want)
            assert type(back) is DTensor
            assert (back.placements, back.device_mesh, back.shape) == (want.placements, mesh, want.shape)
            assert back.stride() == want.stride()
            assert isinstance(back, Parameter) == isinstance(want, Parameter)
            assert back.requires_grad == want.requires_grad
            assert torch.equal(back.to_local(), local)


def test_shares_of_replicas_are_read_in_place():
    full = torch.arange(24.0).reshape(8, 3)
    for rank in range(4):
        with rank_of(rank, 4) as mesh:
            d = made(mesh, full, [R])
            host = kind.host_bytes(d)
            assert host.keep is d
            assert not host.stable
            assert host.address == d.to_local().data_ptr() + rank * 24
            assert list(kind.addresses([d])) == [host.address]
            assert kind.sources([d])[0].data_ptr() == host.address


def test_a_local_part_in_another_order_is_copied_to_c_order():
    with rank_of(1, 2) as mesh:
        local = torch.arange(12.0).reshape(3, 4).t()
        d = DTensor.from_local(local, mesh, [S(0)], run_check=False)
        spec, data = stored(d)
        host = kind.host_bytes(d)
        assert host.stable
        assert host.keep is not d
        assert spec.box == Box((4, 0), (4, 3))
        assert data == raw(local.contiguous())
        assert list(kind.addresses([d])) == [local.data_ptr()]
        back = kind.convert(kind.build(spec, memoryview(bytearray(data))), d)
        assert torch.equal(back.to_local(), local)
        assert back.to_local().stride() == local.stride()
        z = DTensor.from_local(torch.tensor([1 + 2j, 3 - 1j]).conj(), mesh, [S(0)], run_check=False)
        assert stored(z)[1] == raw(torch.view_as_real(torch.tensor([1 - 2j, 3 + 1j])))


def test_without_axes_it_belongs_to_each_rank():
    with rank_of(1, 2) as mesh:
        d = DTensor.from_local(torch.tensor(5.0), mesh, [R], run_check=False)
        spec, data = stored(d)
        assert (spec.box, spec.shape, len(data)) == (None, (), 4)
        assert kind.like(d).box is None
        back = kind.convert(kind.build(spec, memoryview(bytearray(data))), d)
        assert type(back) is DTensor
        assert back.to_local() == 5


REFUSED = {
    "Partial": lambda mesh: DTensor.from_local(torch.ones(2, 3), mesh, [Partial()], run_check=False),
    "no box": lambda mesh: made(mesh, torch.ones(8, 3), [_StridedShard(0, split_factor=2)]),
    "local part": lambda mesh: DTensor.from_local(torch.ones(2, 3, device="meta"), mesh, [S(0)], run_check=False),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_box_with_values_is_refused(reason):
    with rank_of(0, 2) as mesh:
        d = REFUSED[reason](mesh)
        with pytest.raises(UnsupportedLeafError, match=reason):
            kind.describe(d)


def test_a_rank_outside_of_the_mesh_stores_nothing():
    with rank_of(3, 4):
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh("cpu", [0, 1])
        d = DTensor.from_local(torch.ones(0, 3), mesh, [S(0)], run_check=False, shape=(4, 3), stride=(3, 1))
        spec, data = stored(d)
        assert (spec.box.elements, data) == (0, b"")
        assert kind.like(d).box.elements == 0


def same_again(values):
    fingerprint = kind.fingerprint(values)
    assert kind.unchanged(values, fingerprint)
    return lambda others: kind.unchanged(others, fingerprint)


def test_a_change_of_anything_is_seen_and_new_values_are_not():
    full = torch.arange(24.0).reshape(8, 3)
    with rank_of(1, 2, 2) as mesh:
        flat = mesh["d0"]
        base = made(mesh, full, [R, S(0)])
        plain = torch.ones(2)
        same = same_again([base, plain])
        assert same([made(mesh, full + 1, [R, S(0)]), torch.zeros(2)])
        assert same([base.detach(), plain])
        changed = {
            "placements": made(mesh, full, [S(0), R]),
            "strided": made(mesh, full, [R, S(1)]),
            "mesh": made(flat, full, [S(0)]),
            "shape": made(mesh, full[:6], [R, S(0)]),
            "dtype": made(mesh, full.double(), [R, S(0)]),
            "bits": made(mesh, full.view(torch.int32), [R, S(0)]),
            "gradient": made(mesh, full, [R, S(0)]).requires_grad_(),
            "parameter": Parameter(made(mesh, full, [R, S(0)])),
            "frozen parameter": Parameter(made(mesh, full, [R, S(0)]), requires_grad=False),
            "no leaf": made(mesh, full, [R, S(0)]).requires_grad_() * 1,
        }
        for what, d in changed.items():
            assert not same([d, plain]), what
        for what, pair in itertools.pairwise(changed.items()):
            assert not same_again([pair[1]])([base]), what


def test_a_plan_keeps_no_dtensor_alive():
    import gc
    import weakref

    with rank_of(0, 2) as mesh:
        d = made(mesh, torch.ones(8, 3), [S(0)])
        gone = [weakref.ref(d), weakref.ref(d._local_tensor)]
        fingerprint = kind.fingerprint([d])
        kind.describe(d), kind.unchanged([d], fingerprint), kind.addresses([d]), kind.like(d)
        del d
        gc.collect()
        assert [r() for r in gone] == [None, None]


def test_live_dtensors_are_filled_in_place():
    full = torch.arange(24.0).reshape(8, 3)
    for rank in range(4):
        with rank_of(rank, 2, 2) as mesh:
            for placements in ([R, S(0)], [S(1), S(0)]):
                target = Parameter(made(mesh, torch.zeros(8, 3), placements))
                where = target._local_tensor.data_ptr()
                kind.assign(target, made(mesh, full, placements))
                assert torch.equal(target.to_local().detach(), made(mesh, full, placements).to_local())
                kind.assign(target, torch.zeros(8, 3))
                assert not target.to_local().any()
                kind.assign(target, full)
                assert torch.equal(target.to_local().detach(), made(mesh, full, placements).to_local())
                assert target._local_tensor.data_ptr() == where
            if rank in (1, 2):
                with pytest.raises(UnsupportedLeafError, match="another part"):
                    kind.assign(made(mesh, full, [S(0), R]), made(mesh, full, [R, S(0)]))
            with pytest.raises(UnsupportedLeafError, match="restored"):
                kind.assign(made(mesh, full, [S(0), R]), full.double())


def test_a_dtensor_on_meta_is_restored_to_its_meshs_device():
    with rank_of(1, 2) as mesh:
        like = DTensor.from_local(torch.empty(4, 3, device="meta"), mesh, [S(0)], run_check=False)
        spec = kind.like(like)
        assert spec.box == Box((4, 0), (4, 3))
        back = kind.convert(torch.ones(4, 3), like)
        assert back.to_local().device.type == "cpu"


def test_a_torch_that_keeps_its_parts_elsewhere_is_named(monkeypatch):
    def gone(value):
        raise AttributeError

    with rank_of(0, 2) as mesh:
        d = made(mesh, torch.ones(8, 3), [S(0)])
        monkeypatch.setattr(sharded, "_local", gone)
        with pytest.raises(UnsupportedLeafError, match="elsewhere"):
            kind.describe(d)


def test_a_model_of_dtensors_goes_through_a_checkpointer(tmp_path):
    """With one rank: its box is the whole array, which comes back as a tensor, or as what `like` is."""
    with rank_of(0, 1) as mesh:
        full = torch.arange(24.0).reshape(8, 3)
        state = {
            "w": Parameter(made(mesh, full, [S(0)])), "r": made(mesh, full + 1, [R]), "s": made(mesh, full[:0], [S(0)]),
            "step": DTensor.from_local(torch.tensor(3.0), mesh, [R], run_check=False), "plain": torch.ones(2),
        }  # fmt: skip
        state["tied"] = state["r"]
        with pccheck.Checkpointer(tmp_path, chunk_bytes=1 << 16) as ck:
            for _ in range(2):
                ck.save(1, state)
                ck.wait()
            plain, back = ck.restore().state, ck.restore(like=state).state
            with torch.no_grad():
                for value in state.values():
                    value.zero_()
            ck.restore(like=state).load_into(state)
        assert torch.equal(plain["w"].detach(), full)
        assert torch.equal(plain["r"], full + 1)
        assert float(plain["step"]) == 3
        for key in ("w", "r", "s", "step"):
            assert type(back[key]) is DTensor
            assert torch.equal(back[key].to_local().detach(), plain[key].detach())
            assert torch.equal(state[key].to_local().detach(), plain[key].detach())
        assert back["tied"] is back["r"]
        assert isinstance(back["w"], Parameter)


@pytest.mark.filterwarnings("ignore:.*(deprecated|ShardedTensor).*")
def test_a_sharded_tensor_is_refused_and_the_way_out_is_named():
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    with rank_of(0, 1):
        old = sharded_tensor.zeros(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), 4, 3)
        with pytest.raises(UnsupportedLeafError, match=r"pccheck_torch\.dcp.*Shard"):
            kind.describe(old)
