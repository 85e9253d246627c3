"""Pretends that a CPU is two CUDA GPUs: python tests/fake_gpu.py train.py --max_iters=9 + sample.py --start=a

The Python half of torch.cuda runs as it is. FUNCTIONS replace its C half. The C++ code makes "cuda" a device
with the CPU's kernels, which refuses mixed devices. torch.compile only traces. A script's last line counts
waits for the GPU. Needs g++ and a CPU build of torch. Cannot see what kernels and Triton refuse or round.
"""
import ctypes
import importlib.machinery
import os
import runpy
import subprocess
import sys
import tempfile
import types
import zlib
from pathlib import Path

CPP = r'''
#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>
#include <set>
using namespace c10;
static const Device HOST(DeviceType::CPU);
static thread_local DeviceIndex current = 0;
static int n_waits = 0;
extern "C" int waits() { return n_waits; }
extern "C" int exchange(int i) {  // -1: change nothing
  auto old = current;
  if (i >= 0) current = i;
  return old;
}
static Device gpu(DeviceIndex i = -1) { return Device(DeviceType::CUDA, i < 0 ? current : i); }
static void release(void* p) { delete static_cast<Storage*>(p); }
static DataPtr memory_of(Storage s, Device to) { return {s.mutable_data(), new Storage(s), release, to}; }
static Storage moved(const Storage& s, Device to) {  // the same memory as a storage of the other device
  return Storage(Storage::use_byte_size_t(), s.nbytes(), memory_of(s, to), GetAllocator(to.type()), true);
}
struct Memory final : Allocator {
  DataPtr allocate(size_t n) override {
    return memory_of({Storage::use_byte_size_t(), n, GetCPUAllocator()}, gpu());
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
static Memory memory;
extern "C" void resize(StorageImpl* s, size_t n) {
  auto fresh = memory.allocate(n);
  std::memcpy(fresh.get(), s->data(), std::min(n, s->nbytes()));
  s->set_data_ptr_noswap(std::move(fresh));
  s->set_nbytes(n);
}
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return gpu(); }
  void setDevice(Device d) const override { exchange(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { exchange(d.index()); }
  Device exchangeDevice(Device d) const override { return gpu(exchange(d.index())); }
  Stream getStream(Device d) const noexcept override { return Stream(Stream::DEFAULT, gpu(d.index())); }
  DeviceIndex deviceCount() const noexcept override { return 2; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
struct CUDAHooks final : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 2; }
  DeviceIndex getCurrentDevice() const override { return current; }
  Allocator* getPinnedMemoryAllocator() const override { return GetCPUAllocator(); }
};
namespace at { REGISTER_CUDA_HOOKS(CUDAHooks) }
namespace c10d {
struct NoTimer final : Timer {  // for DDP
  NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, NoTimer)
}
struct Call {  // maps the tensors of one call to the CPU and back
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  std::vector<std::pair<Storage, Storage>> storages;
  bool mixed = false;
  std::optional<Device> device;
  at::Tensor other(const at::Tensor& t, Device to) {
    bool stays = !t.defined() || t.device().type() == to.type();
    if (stays) return mixed |= to == HOST && t.defined() && t.dim(), t;
    if (to == HOST) mixed |= device && *device != t.device(), device = t.device();
    for (auto& [a, b] : pairs) if (a.is_same(t) || b.is_same(t)) return a.is_same(t) ? b : a;
    Storage found;
    for (auto& [a, b] : storages)
      if (a.is_alias_of(t.storage()) || b.is_alias_of(t.storage())) found = a.device() == to ? a : b;
    if (!found) storages.emplace_back(t.storage(), found = moved(t.storage(), to));
    auto key = DispatchKeySet(to == HOST ? DispatchKey::CPU : DispatchKey::CUDA);
    auto made = at::detail::make_tensor<TensorImpl>(Storage(found), key, t.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    return pairs.emplace_back(t, made), made;
  }
  IValue other(const IValue& v, Device to) {
    if (v.isTensor()) return other(v.toTensor(), to);
    if (v.isDevice() && to == HOST) return device = v.toDevice(), to;
    if (v.isStorage() && v.toStorage().device() != to) return moved(v.toStorage(), to);
    if (v.isTensorList()) {
      auto list = v.toTensorVector();
      for (auto& t : list) t = other(t, to);
      return list;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> t : v.toOptionalTensorVector()) list.push_back(t ? other(*t, to) : t);
      return list;
    }
    if (!v.isList() || v.toListRef().empty() || !v.toListRef()[0].isTensorList()) return v;
    std::vector<std::vector<at::Tensor>> lists;
    for (const IValue& one : v.toListRef()) lists.push_back(other(one, to).toTensorVector());
    return lists;
  }
};
static const std::set<std::string> WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"};
static const std::set<std::string> MIXES = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
static void kernel(const OperatorHandle& op, torch::jit::Stack* stack) {
  Call call;
  const auto &schema = op.schema();
  n_waits += WAITS.count(schema.name());
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); i++)
    (*stack)[i] = call.other((*stack)[i], HOST);
  bool mixed = call.mixed && call.device && !MIXES.count(schema.name());
  TORCH_CHECK(!mixed, "tensors on several devices in ", schema.name());
  auto below = std::make_unique<at::AutoDispatchBelowADInplaceOrView>();
  op.callBoxed(stack);
  below.reset();
  for (auto& [own, cpu] : call.pairs) {  // what resize_ has changed
    auto* storage = own.storage().unsafeGetStorageImpl();
    if (storage->data() != cpu.storage().data()) {
      storage->set_data_ptr_noswap(memory_of(cpu.storage(), own.device()));
      storage->set_nbytes(cpu.storage().nbytes());
    }
    own.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] = call.other((*stack)[i], gpu(call.device ? call.device->index() : -1));
}
static at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  Call call;
  n_waits += to.is_cuda() != from.is_cuda() && !non_blocking;
  auto a = call.other(to, HOST), b = call.other(from, HOST);
  at::AutoDispatchBelowADInplaceOrView below;
  return a.copy_(b), to;
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", copy_);
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&kernel>());
}
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {  // gloo exchanges the host's memory
  for (auto name : {"allreduce_", "broadcast_", "allgather_", "_allgather_base_", "_reduce_scatter_base_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel>());
}
static int registered = (SetAllocator(DeviceType::CUDA, &memory), 0);
'''


class Stream:  # and Event
    __new__ = staticmethod(lambda cls, *args, **options: object.__new__(cls))
    __init__ = record = wait = synchronize = lambda self, *args, **options: None
    stream_id = device_index = device_type = cuda_stream = device = 0


def exchange(index):  # -1: change nothing
    if index > 1:
        raise RuntimeError('CUDA error: invalid device ordinal')
    return library.exchange(index)


CARD = types.SimpleNamespace(name='NVIDIA H100 80GB HBM3', major=9, minor=0, total_memory=80 << 30)
FUNCTIONS = dict(  # of torch._C
    _cuda_init=lambda: vars(sys.modules['torch.cuda']).update(  # what C adds to Python
        _get_device_properties=lambda index: CARD, default_generators=(torch.default_generator,) * 2),
    _cuda_getDeviceCount=lambda: 2, _cuda_isInBadFork=lambda: False, _has_cuda=True, _cuda_setDevice=exchange,
    _cuda_getDevice=lambda: exchange(-1), _cuda_maybeExchangeDevice=lambda index: exchange(index),
    _cuda_exchangeDevice=lambda index: exchange(index), _cuda_synchronize=lambda: None,
    _cuda_getCurrentStream=lambda index: (0, index, 1), _cuda_getCurrentRawStream=lambda index: 0,
    _cuda_setStream=lambda **stream: None, _cuda_isCurrentStreamCapturing=lambda: False,
    _cuda_getArchFlags=lambda: '', _graph_pool_handle=lambda: (0, 0), _cudart=object(), _CUDAGraph=Stream,
    _cuda_memoryStats=lambda index: {'allocated_bytes': {'all': {'peak': 0}}}, _CudaStreamBase=Stream,
    _CudaEventBase=type('Event', (Stream,), {}), _cuda_CUDAAllocator_AllocatorState=Stream)


class Finder:  # completes torch._C before torch.cuda is imported
    def find_spec(name, path=None, target=None):
        if name == 'torch.cuda':
            vars(sys.modules['torch._C']).update(FUNCTIONS)


if __name__ == '__main__':
    folder = Path(importlib.machinery.PathFinder.find_spec('torch').origin).parent
    path = Path(tempfile.gettempdir(), f'fake_gpu_{zlib.crc32(f"{folder}{__file__}{CPP}".encode())}.so')
    if not path.exists():
        path.with_suffix('').write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
        path.with_suffix('').chmod(0o755)
        new = f'{path}.{os.getpid()}'  # other processes may compile too
        subprocess.run(f"""g++ -std=c++20 -fPIC -shared -w -x c++ - -o {new} -L{folder}/lib
            -I{folder}/include -I{folder}/include/torch/csrc/api/include -ltorch -ltorch_cpu -lc10
            -Wl,-rpath,{folder}/lib""".split(), input=CPP, text=True, check=True)
        os.replace(new, path)
    sys.executable = str(path.with_suffix(''))  # for the processes that scripts start
    library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    sys.meta_path.insert(0, Finder)
    import torch
    torch.UntypedStorage.resize_ = lambda s, n: library.resize(ctypes.c_void_p(s._cdata), ctypes.c_size_t(n))
    traced = torch.compile
    torch.compile = lambda f, **options: traced(f, backend='eager')
    for command in ' '.join(sys.argv[1:]).split(' + '):
        sys.argv = command.split(' ')
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        try:
            runpy.run_path(sys.argv[0], run_name='__main__')
        except SystemExit as end:
            if end.code:
                raise
        print('waits', library.waits())
