"""A stand-in for a GPU on a machine without one: it computes on the CPU and notes where the host would wait for it.

    with FakeDevice() as device:
        model = device.place(model)
        y = model(device.put(x))
    device.waits    # of `Wait`: what was asked for, and the line that asked

Its tensors call themselves `cuda:0` wherever Python asks, so that the code takes the paths that it takes on a GPU. To torch
itself they are tensors of the CPU with true values, so autograd and autocast (the CPU's) work as ever.

Waits are what makes the host stop until the device has come to the end of its work: a value that is read (`item`, `tolist`,
`bool`, `int`), a shape that depends on values (`nonzero`, indexing by a mask), a copy to the host, and a copy from the
host that does not say `non_blocking`. Copies from memory that is not pinned are not counted, as CUDA's own
`set_sync_debug_mode` does not count them.
"""
import contextlib
import os
import time
import traceback
import warnings
import weakref
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from medlab.batches import loader
from medlab.batches.copies import DeviceCopy

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


class Wait(NamedTuple):
    "A place where the host waits."
    what: str  # the operation
    where: str  # file:line of the innermost code of the project

    def __str__(self): return f"{self.what} at {self.where}"


class DeviceTensor(torch.Tensor):
    "A tensor that says it lies on a GPU."
    current = None  # the `FakeDevice` in force

    @staticmethod
    def __new__(cls, held):
        kw = dict(strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=CPU)
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, **kw)

    def __init__(self, held):
        self.held = held
        if self.current is not None: self.current.keep(self)

    def __repr__(self): return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"
    def untyped_storage(self): return self.held.untyped_storage()
    def __reduce_ex__(self, protocol): return self.current.read("copy to the host", self).__reduce_ex__(protocol)
    def __deepcopy__(self, memo): return memo.setdefault(id(self), DeviceTensor(self.held.clone()))

    device, is_cuda, is_cpu = property(lambda self: CUDA), property(lambda self: True), property(lambda self: False)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.tolist: return cls.current.read("tolist", args[0]).tolist()
        if func is torch.Tensor.numpy: raise TypeError("a tensor of a GPU has no numpy array; .cpu() first")
        if func is torch.Tensor.cpu or func is torch.Tensor.to and _to_host(args[1:], kwargs):
            rest = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)]
            if func is torch.Tensor.to and kwargs.get("non_blocking"): return args[0].held.to(*rest, copy=True)  # into pinned memory: the host goes on
            return cls.current.read("copy to the host", args[0]).to(*rest)
        if func is torch.Tensor.new_tensor:
            return cls.current.send(torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs, "device": CPU}))
        with torch._C.DisableTorchFunctionSubclass(): return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None): raise RuntimeError(f"{func} outside of FakeDevice")


def _to_host(args, kwargs):
    "Whether the arguments of `Tensor.to` name the host."
    to = kwargs.get("device", kwargs.get("other", args[0] if args else None))
    if torch.is_tensor(to): to = to.device
    return isinstance(to, (str, torch.device)) and torch.device(to).type == "cpu"


def _place():
    "The innermost line of the project's; None within torch's optimizers, which sort tensors by where they really are."
    stack = traceback.extract_stack(limit=40)
    frames = [f.filename for f in stack]
    inner = max(i for i, f in enumerate(frames) if f != __file__)
    if os.path.join("torch", "optim") in frames[inner]: return None
    own = [i for i, f in enumerate(frames) if f.startswith(ROOT) and "site-packages" not in f and f != __file__]
    f = stack[max(own, default=inner)]
    return f"{os.path.relpath(f.filename, ROOT)}:{f.lineno}"


def _host(x): return x.held if isinstance(x, DeviceTensor) else x
def _masks(indices): return [i for i in indices if torch.is_tensor(i) and i.dtype in (torch.bool, torch.uint8)]


def _reads(func, args, on_device):
    "Whether an operation on tensors of the device needs a value of them on the host."
    if func in COPIES or not on_device: return False
    if func not in INDEXED: return {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}
    if not (masks := _masks(args[1])): return False
    filled = func is not aten.index.Tensor and len(masks) == 1 and args[2].numel() == 1  # torch makes it a masked_fill
    return not filled


class _Made(TorchFunctionMode):
    "What is made from values of the host; torch would ask CUDA for it before the device sees it."

    def __init__(self, device): super().__init__(); self.owner = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in (torch.tensor, torch.as_tensor) or not _on_cuda(kwargs.get("device")): return func(*args, **kwargs)
        return self.owner.send(func(*args, **{**kwargs, "device": CPU}))


def _on_cuda(device): return device is not None and torch.device(device).type == "cuda"


class FakeDevice(TorchDispatchMode):
    "The device, in force within `with`."

    def __init__(self):
        super().__init__()
        self.waits, self.stack = [], None

    def __enter__(self):
        self.stack, values = contextlib.ExitStack(), dict(_lazy_init=lambda: None, current_device=lambda: 0,
            default_generators=[torch.Generator()])
        for k, v in values.items(): self.stack.enter_context(mock.patch.object(torch.cuda, k, v))
        available = mock.patch("torch.amp.grad_scaler.torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        self.stack.enter_context(available)
        self.stack.enter_context(_Made(self))
        DeviceTensor.current = self
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.stack.close()
        DeviceTensor.current = None

    def keep(self, tensor): "For those who count memory."

    def note(self, what):
        "The host waits here."
        if where := _place(): self.waits.append(Wait(what, where))

    def read(self, what, x):
        "The values of a tensor, on the host."
        self.note(what)
        return x.detach().held

    def send(self, x):
        "A tensor of the host on the device; the host waits until it is there."
        if isinstance(x, DeviceTensor): return x
        self.note("copy from the host")
        return DeviceTensor(x)

    def put(self, x):
        "A copy on the device; what is no tensor stays as it is."
        return DeviceTensor(x.detach().clone()) if torch.is_tensor(x) and not isinstance(x, DeviceTensor) else x

    def place(self, module):
        "A module with its parameters and buffers on the device."
        placed = {id(p): torch.nn.Parameter(self.put(p), p.requires_grad) for p in module.parameters()}
        placed |= {id(b): self.put(b) for b in module.buffers()}
        for m in module.modules():
            for held in (m._parameters, m._buffers): held.update({k: placed.get(id(v)) for k, v in held.items()})
        return module

    def _copy(self, func, args, kwargs):
        "Note a copy from the host for which the host waits."
        source, there = (args[0], False) if func is aten._to_copy.default else (args[1], isinstance(args[0], DeviceTensor))
        if isinstance(source, DeviceTensor) or not (there or _on_cuda(kwargs.get("device"))): return
        if not kwargs.get("non_blocking", len(args) > 2 and args[2]): self.note("copy from the host")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        on_device = any(isinstance(a, DeviceTensor) for a in tree_flatten((args, kwargs))[0])
        if not on_device and not _on_cuda(kwargs.get("device")): return func(*args, **kwargs)
        if func in COPIES: self._copy(func, args, kwargs)
        if _reads(func, args, on_device): self.note(func.overloadpacket.__name__)
        if kwargs.get("device") is not None: kwargs["device"] = CPU
        out = func(*tree_map_only(DeviceTensor, _host, args), **tree_map_only(DeviceTensor, _host, kwargs))
        out = tree_map_only(torch.Tensor, lambda t: t if isinstance(t, DeviceTensor) else DeviceTensor(t), out)
        return return_and_correct_aliasing(func, args, kwargs, out) if on_device else out


class Event:
    "An event that is passed when it is recorded: this device has nothing in its queue."

    def __init__(self, enable_timing=False): self.at = None
    def query(self): return self.at is not None
    def synchronize(self): return None
    def elapsed_time(self, other): return (other.at - self.at) * 1e3

    def record(self, stream=None):
        self.at = time.perf_counter()
        return self


class Stream:
    "Work of the device, all of which is done at once."

    def __init__(self, device=None): self.device = device
    def wait_stream(self, stream): return None
    def wait_event(self, event): return None
    def synchronize(self): return None
    def record_event(self, event=None): return (event or Event()).record()


class Copies(DeviceCopy):
    """Copies as to a GPU, on a trainer of the CPU: there is a stream for them, so samples are sent ahead.

    `made` is the list of the steps' cases that were copied, `room` how many batches fit beside the one in use.
    """

    def __init__(self, device, report=lambda *a, **k: None):
        cuda = SimpleNamespace(Stream=Stream, current_stream=Stream, Event=Event,
            stream=lambda s: contextlib.nullcontext())
        super().__init__(CUDA, report, cuda)
        self.made, self.room = [], True

    def pinned(self, values): return values
    def move(self, values): return values.clone()

    def send(self, batch):
        if not self.room: raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.made.append(tuple(batch["case"]))
        return super().send(batch)


@contextlib.contextmanager
def copies_ahead():
    "Trainers that are made within send their samples ahead."
    with mock.patch.object(loader, "DeviceCopy", Copies), mock.patch.object(torch.Tensor, "record_stream", lambda t, s: None): yield


class _Asked(TorchFunctionMode):
    "What names the device as `cuda`, without a number, or by `.cuda()`, for which torch would look for a driver."

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda: func, kwargs = torch.Tensor.to, {**kwargs, "device": CUDA}
        if func is torch.Tensor.pin_memory: return args[0]
        if func is torch.Tensor.__format__ and isinstance(args[0], DeviceTensor): return _format(*args)
        if func in TRANSFORMS and args[0].dtype in WIDER and isinstance(args[0], DeviceTensor): return _half_transform(func, args, kwargs)
        if func is not torch.device: args, kwargs = tree_map(_numbered, (args, kwargs))
        return func(*args, **kwargs)


TRANSFORMS = {getattr(torch.fft, name) for name in ("fftn", "ifftn", "rfftn", "irfftn", "rfft2", "irfft2", "rfft", "irfft")}
WIDER = {torch.float16: torch.float32, torch.complex32: torch.complex64}
NARROWER = {v: k for k, v in WIDER.items()}


def _half_transform(func, args, kwargs):
    "cuFFT transforms halves, of which autocast knows nothing; the CPU does it in float32, and rounds."
    x, *rest = args
    with torch.autocast("cpu", enabled=False): out = func(x.to(WIDER[x.dtype]), *rest, **kwargs)
    return out.to(NARROWER[out.dtype])


def _format(x, spec):
    "A number as text, for which the host waits."
    return format(DeviceTensor.current.read("item", x).item() if not x.ndim else str(x), spec)


def _numbered(x):
    "The device with its number."
    return CUDA if isinstance(x, (str, torch.device)) and str(x) == "cuda" else x


class _Autocast(torch.autocast):
    "Autocast of the device: the CPU's, and whoever asks finds the device's on."

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        self.asked = device_type, dtype or torch.get_autocast_dtype(device_type), enabled
        kind = "cpu" if device_type == "cuda" else device_type
        super().__init__(kind, self.asked[1], enabled and (dtype is None or dtype in (torch.float16, torch.bfloat16)), cache_enabled)

    def __enter__(self):
        kind, dtype, enabled = self.asked
        self.before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        if kind == "cuda": torch.set_autocast_enabled(kind, enabled), torch.set_autocast_dtype(kind, dtype)
        return super().__enter__()

    def __exit__(self, *error):
        kind = self.asked[0]
        out = super().__exit__(*error)
        if kind == "cuda": torch.set_autocast_enabled(kind, self.before[0]), torch.set_autocast_dtype(kind, self.before[1])
        return out


class FakeCuda(FakeDevice):
    """The device with those parts of `torch.cuda` that code and notebooks name.

    In the mode "error" of `set_sync_debug_mode` a wait is an error, as on a GPU. Memory is what the device's tensors hold;
    beyond what `set_per_process_memory_fraction` allows there is none.
    """

    def __init__(self):
        super().__init__()
        self.sync_mode, self.total = "default", 80 * 10**9
        self.limit = self.total
        self.held, self.peak = {}, 0  # storages: data pointer → (bytes, how many tensors)

    def __enter__(self):
        super().__enter__()
        device, gpu = self, SimpleNamespace(name="a stand-in", total_memory=self.total, major=9, minor=0, multi_processor_count=1)
        nothing = lambda *args, **kwargs: None
        values = dict(is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda d=None: gpu.name, get_device_properties=lambda d=None: gpu,
            synchronize=nothing, empty_cache=nothing, memory_allocated=lambda d=None: device.bytes(),
            memory_reserved=lambda d=None: device.bytes(), max_memory_allocated=lambda d=None: device.peak, max_memory_reserved=lambda d=None: device.peak,
            reset_peak_memory_stats=lambda d=None: setattr(device, "peak", device.bytes()), mem_get_info=lambda d=None: (device.total - device.bytes(), device.total),
            set_sync_debug_mode=lambda mode: setattr(device, "sync_mode", mode), Stream=Stream, Event=Event, current_stream=Stream,
            set_per_process_memory_fraction=lambda share, d=None: setattr(device, "limit", share * device.total),
            stream=contextlib.nullcontext, device=contextlib.nullcontext, device_of=contextlib.nullcontext)
        for k, v in values.items(): self.stack.enter_context(mock.patch.object(torch.cuda, k, v))
        self.stack.enter_context(mock.patch.object(torch, "autocast", _Autocast))
        self.stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", nothing))
        for k in ("to", "cuda"): self.stack.enter_context(mock.patch.object(torch.nn.Module, k, self._moves(getattr(torch.nn.Module, k))))
        self.stack.enter_context(_Asked())
        return self

    def _moves(self, move):
        "`Module.to` or `Module.cuda`: to the device, where that is asked for."
        def moved(module, *args, **kwargs):
            asked = [*args, kwargs.get("device")] if move.__name__ == "to" else [CUDA]
            if not any(isinstance(a, (str, torch.device)) and _on_cuda(a) for a in asked): return move(module, *args, **kwargs)
            return self.place(module)
        return moved

    def note(self, what):
        "The host waits here, which may be forbidden."
        before = len(self.waits)
        super().note(what)
        if len(self.waits) == before or self.sync_mode == "default": return
        said = f"called a synchronizing CUDA operation: {self.waits[-1]}"
        if self.sync_mode == "error": raise RuntimeError(said)
        warnings.warn(said, stacklevel=3)

    def bytes(self):
        "Bytes of the storages that live."
        return sum(size for size, _ in self.held.values())

    def keep(self, tensor):
        "Count a tensor's storage until the tensor is gone."
        storage = tensor.held.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self.held and self.bytes() + size > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
        self.held[place] = size, self.held.get(place, (0, 0))[1] + 1
        self.peak = max(self.peak, self.bytes())
        weakref.finalize(tensor, self.leave, place)

    def leave(self, place):
        "A tensor of a storage is gone."
        size, n = self.held.pop(place)
        if n > 1: self.held[place] = size, n - 1
