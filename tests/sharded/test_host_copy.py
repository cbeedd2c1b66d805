"""Covers: _sharded/host_copy.py: code that reads memory finds a copy, and shared values shared."""

import ctypes
import gc
import io

import pytest
import torch
from _sharded_values import any_layout, functions, numbers
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


def read(x, count):
    """What lies at the address of a tensor."""
    return list((ctypes.c_float * count).from_address(x.data_ptr()))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@any_layout
def test_the_memory_of_a_value(put):
    x = put()
    here = x.cpu()
    storage = x.untyped_storage()
    assert storage.nbytes() == here.untyped_storage().nbytes()
    assert list(storage) == list(here.untyped_storage())
    assert x.storage().tolist() == here.flatten().tolist()
    assert read(x, 8) == here.flatten().tolist()


def test_views_and_aliases_have_addresses_in_one_copy():
    x = tp.replicate(numbers(4, 6))
    here = numbers(4, 6)
    views = "x; x.detach(); x.T; x[1:]; x[2, 3:]; x.view(-1)[-1]; x.detach()[1].view(torch.int32)"
    for take in functions("x", views).values():
        assert take(x).data_ptr() - x.data_ptr() == take(here).data_ptr() - here.data_ptr()
        assert take(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert take(x).untyped_storage().nbytes() == here.nbytes
    assert x.clone().data_ptr() != x.data_ptr()
    assert read(x.T, 24) == here.flatten().tolist()


def test_what_was_written_is_in_the_next_copy():
    x = tp.replicate(torch.zeros(3))
    first = x.data_ptr()
    alias = x.detach()
    assert alias.data_ptr() == first
    alias[1] = 5
    assert read(x, 3) == [0, 5, 0]
    assert x.data_ptr() == alias.data_ptr()
    z = tp.replicate(torch.tensor([1 + 2j]))
    assert read(z, 2) == [1, 2]
    assert read(z.conj(), 2) == [1, -2]


def test_a_write_by_address_is_reported():
    x = tp.replicate(torch.zeros(3))
    (ctypes.c_float * 3).from_address(x.data_ptr())[1] = 7
    x.itself = x  # so that it goes when garbage is collected
    del x
    with pytest.warns(UserWarning, match="That is the address of a copy, so the write is lost"):
        gc.collect()
    x = tp.replicate(torch.zeros(3))
    x.data_ptr()
    x[1] = 3  # the copy is of no use any more, and nothing was lost
    del x
    gc.collect()


def test_a_copy_may_go_while_a_function_is_traced():
    """There no memory can be read with functions of torch."""
    x = tp.replicate(torch.zeros(3))
    (ctypes.c_float * 3).from_address(x.data_ptr())[1] = 7
    x.itself = x

    def row(y):
        gc.collect()
        return y * y

    gc.disable()  # so that it does not go before
    try:
        del x
        with pytest.warns(UserWarning, match="of a copy, so the write is lost"):
            assert tp.pmap(row, compile=EAGER)(torch.ones(2)).sum() == 2
    finally:
        gc.enable()


def test_copies_are_listed_and_made_once():
    x = tp.shard_batch(numbers(4, 2))
    with tp.debug.report_gathers() as gathers:
        x.data_ptr()
        x.detach().untyped_storage()
    assert [(gather.name, gather.num_bytes) for gather in gathers] == [("memory", 32)]


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(3)


def saved_and_loaded(value, weights_only):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def test_torch_saves_and_loads_replicated_modules():
    plain, model = Tied(), tp.replicate(Tied())
    state = saved_and_loaded(model.state_dict(), weights_only=True)
    assert {type(x) for x in state.values()} == {torch.Tensor}
    plain.load_state_dict(state)
    other = tp.replicate(Tied())
    other.load_state_dict(state)
    for got in (plain.state_dict(), other.state_dict()):
        for name, value in model.state_dict().items():
            assert torch.equal(got[name].cpu(), value.cpu())
    assert {type(x) for x in other.state_dict().values()} == {tp.ShardedTensor}
    whole = saved_and_loaded(model, weights_only=False)
    assert whole.head.weight is whole.embed.weight
    assert type(whole.head.weight) is torch.nn.Parameter


def test_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = tp.replicate(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)))
    safetensors.save_file(model.state_dict(), tmp_path / "model")
    loaded = safetensors.load_file(tmp_path / "model")
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value.cpu())
    model.load_state_dict(loaded)
    rows = {"x": tp.shard_batch(numbers(4, 2)).T.contiguous()}
    safetensors.save_file(rows, tmp_path / "rows")
    assert torch.equal(safetensors.load_file(tmp_path / "rows")["x"], numbers(4, 2).T)
    tied = tp.replicate(Tied())
    with pytest.raises(RuntimeError, match="share memory"):  # as of a plain module
        safetensors.save_file(tied.state_dict(), tmp_path / "tied")
    safetensors.save_model(tied, str(tmp_path / "tied"))
    other = tp.replicate(Tied())
    safetensors.load_model(other, str(tmp_path / "tied"))
    assert torch.equal(other.head.weight.cpu(), tied.head.weight.cpu())
