// Every other operator: the host works out what the outputs look like, and the operator's CPU kernel runs later, on the
// thread of the current stream, on CPU tensors over the same device memory. See ../README.md.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "device.h"

namespace simulated {

void with_kernel_state(const std::function<void()>& loop) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  loop();
}

void use_kernel_threads(int count) {
  static thread_local int used = 0;
  if (count > 0 && count != used) at::set_num_threads(count);
  used = count;
}

namespace {

using Stack = torch::jit::Stack;

// What an argument is replaced by, tensor by tensor.
using Replace = std::function<at::Tensor(const at::Tensor&, bool write)>;

// Operators whose outputs depend on values: the host waits for them.
const std::unordered_set<std::string>& synchronous() {
  static const std::unordered_set<std::string> names{
      "aten::nonzero",     "aten::masked_select", "aten::equal",              "aten::_unique",  "aten::_unique2",
      "aten::unique_dim",  "aten::is_nonzero",    "aten::unique_consecutive", "aten::bincount", "aten::is_set_to",
      "aten::repeat_interleave", "aten::unique_dim_consecutive"};
  return names;
}

// Overloads that turned out to have no rule for their outputs, so that the next call need not try.
std::unordered_set<std::string> without_rule;
std::mutex without_rule_mutex;

// Operators that take CPU tensors beside device tensors as indices.
bool takes_host_indices(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" ||
         name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put";
}

c10::IValue map_tensors(const c10::IValue& value, bool write, const Replace& replace) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(replace(value.toTensor(), write)) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& each : value.toTensorVector()) out.push_back(each.defined() ? replace(each, write) : each);
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
      out.push_back(each && each->defined() ? std::optional<at::Tensor>(replace(*each, write)) : std::nullopt);
    }
    return out;
  }
  return value;
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

at::Tensor meta_of(const at::Tensor& tensor) {
  at::Tensor meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// One call of an operator on its way to a device thread.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {
    const size_t count = schema_.arguments().size();
    arguments_.assign(stack->end() - count, stack->end());
    find_device();
  }

  void run() {
    const c10::DeviceGuard guard(c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device_)));
    check_views();
    TORCH_CHECK_NOT_IMPLEMENTED(op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), name(),
                                " has no kernel of the CPU, so the simulated accelerator has none");
    bool asynchronous = !known_synchronous();
    if (asynchronous) asynchronous = only_aliases() ? fit_outputs() : make_outputs();
    translate();
    if (asynchronous) {
      submit();
    } else {
      run_now();
    }
    torch::jit::drop(*stack_, arguments_.size());
    for (auto& each : outputs_) stack_->push_back(std::move(each));
  }

 private:
  const std::string& name() const { return schema_.name(); }

  void find_device() {
    device_ = -1;
    for (size_t at = 0; at < arguments_.size(); ++at) {
      map_tensors(arguments_[at], false, [&](const at::Tensor& tensor, bool) {
        if (tensor.is_privateuseone()) {
          const int index = tensor.device().index();
          TORCH_CHECK(device_ == -1 || device_ == index, name(), ": expected all tensors to be on the same device, ",
                      "found simulated:", device_, " and simulated:", index);
          device_ = index;
        }
        return tensor;
      });
    }
    for (const auto& each : arguments_) {
      if (device_ == -1 && each.isDevice() && each.toDevice().has_index()) device_ = each.toDevice().index();
    }
    if (device_ == -1) device_ = current_device();
  }

  void check_views() const {
    for (const auto& each : schema_.returns()) {
      TORCH_CHECK_NOT_IMPLEMENTED(!each.alias_info() || each.alias_info()->isWrite(), name(),
                                  " makes a view, which the simulated accelerator has not");
    }
  }

  bool known_synchronous() const {
    for (const auto& each : schema_.returns()) {
      const auto kind = each.type()->kind();
      const bool tensors = kind == c10::TypeKind::TensorType ||
                           (kind == c10::TypeKind::ListType &&
                            each.type()->containedType(0)->kind() == c10::TypeKind::TensorType);
      if (!tensors) return true;
    }
    if (synchronous().count(name()) > 0) return true;
    std::lock_guard<std::mutex> lock(without_rule_mutex);
    return without_rule.count(toString(op_.operator_name())) > 0;
  }

  bool only_aliases() const {
    return std::all_of(schema_.returns().begin(), schema_.returns().end(),
                       [](const c10::Argument& each) { return each.alias_info() != nullptr; });
  }

  // The argument that a return is.
  size_t aliased(const c10::Argument& output) const {
    for (size_t at = 0; at < arguments_.size(); ++at) {
      const auto* alias = schema_.arguments()[at].alias_info();
      if (alias && alias->beforeSets() == output.alias_info()->beforeSets()) return at;
    }
    TORCH_INTERNAL_ASSERT(false, name(), " returns an alias of nothing");
  }

  // Run the operator on tensors without data. False if it has no rule for that.
  bool infer(Stack* metas, std::unordered_map<c10::TensorImpl*, at::Tensor>* made) const {
    for (size_t at = 0; at < arguments_.size(); ++at) {
      const auto& value = arguments_[at];
      if (value.isDevice()) {
        metas->emplace_back(c10::Device(c10::DeviceType::Meta));
      } else if (value.isGenerator()) {
        metas->emplace_back();
      } else {
        metas->push_back(map_tensors(value, false, [&](const at::Tensor& tensor, bool) {
          auto& meta = (*made)[tensor.unsafeGetTensorImpl()];
          if (!meta.defined()) meta = meta_of(tensor);
          return meta;
        }));
      }
    }
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    try {
      op_.callBoxed(*metas);
      return true;
    } catch (const std::exception&) {
      // Either no rule, or wrong arguments, which the CPU kernel reports.
      return false;
    }
  }

  // Outputs that the caller gave: resized if they are empty and the operator wants them larger.
  bool fit_outputs() {
    bool empty = false;
    for (size_t at = 0; at < arguments_.size(); ++at) {
      if (!writes(schema_.arguments()[at]) || !schema_.arguments()[at].kwarg_only()) continue;
      map_tensors(arguments_[at], true, [&](const at::Tensor& tensor, bool) {
        empty = empty || tensor.numel() == 0;
        return tensor;
      });
    }
    if (empty) {
      Stack metas;
      std::unordered_map<c10::TensorImpl*, at::Tensor> made;
      if (!infer(&metas, &made)) return false;
      for (size_t at = 0; at < arguments_.size(); ++at) {
        if (!writes(schema_.arguments()[at])) continue;
        map_tensors(arguments_[at], true, [&](const at::Tensor& tensor, bool) {
          const at::Tensor& meta = made[tensor.unsafeGetTensorImpl()];
          if (meta.defined() && meta.sizes() != tensor.sizes()) tensor.resize_(meta.sizes());
          return tensor;
        });
      }
    }
    for (const auto& each : schema_.returns()) outputs_.push_back(arguments_[aliased(each)]);
    return true;
  }

  bool make_outputs() {
    Stack metas;
    std::unordered_map<c10::TensorImpl*, at::Tensor> made;
    if (!infer(&metas, &made)) return false;
    TORCH_INTERNAL_ASSERT(metas.size() == schema_.returns().size(), name());
    use_statistics_of_the_cpu(&metas);
    for (size_t at = 0; at < metas.size(); ++at) {
      if (schema_.returns()[at].alias_info()) {
        outputs_.push_back(arguments_[aliased(schema_.returns()[at])]);
      } else {
        outputs_.push_back(map_tensors(metas[at], true, [&](const at::Tensor& meta, bool) { return on_device(meta); }));
      }
    }
    return true;
  }

  // The rule says float32 for the mean and deviation of a norm, as CUDA has them; the CPU's kernel has the input's dtype
  // unless the weight is float32.
  void use_statistics_of_the_cpu(Stack* metas) const {
    if (name() != "aten::native_layer_norm" && name() != "aten::native_group_norm") return;
    const at::Tensor input = arguments_[0].toTensor();
    const size_t weight = name() == "aten::native_layer_norm" ? 2 : 1;
    const bool wide = arguments_[weight].isTensor() && arguments_[weight].toTensor().defined() &&
                      arguments_[weight].toTensor().scalar_type() == at::kFloat;
    for (size_t at = 1; at < 3; ++at) {
      (*metas)[at] = (*metas)[at].toTensor().to(wide ? at::kFloat : input.scalar_type());
    }
  }

  at::Tensor on_device(const at::Tensor& like) const {
    const c10::Device device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device_));
    return at::empty_strided(like.sizes(), like.strides(), like.options().device(device));
  }

  // The CPU tensor over a device tensor's memory; tensors that share memory share it there too.
  at::Tensor thread_side(const at::Tensor& tensor, bool write) {
    if (!tensor.is_privateuseone()) {
      TORCH_CHECK(tensor.dim() == 0 || takes_host_indices(name()), name(),
                  ": expected all tensors to be on the same device, found one on ", tensor.device(),
                  " beside simulated:", device_);
      at::Tensor copy = tensor.clone();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    }
    add_accesses(tensor, write, &accesses_);
    nbytes_ += tensor.nbytes();
    at::Tensor& view = views_[tensor.unsafeGetTensorImpl()];
    if (!view.defined()) {
      c10::Storage& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
      if (!storage) storage = thread_storage(tensor);
      view = thread_view(tensor, storage);
    }
    return view;
  }

  void translate() {
    for (size_t at = 0; at < arguments_.size(); ++at) {
      const auto& value = arguments_[at];
      const auto& argument = schema_.arguments()[at];
      const auto type = argument.type()->kind() == c10::TypeKind::OptionalType ? argument.type()->containedType(0)
                                                                                : argument.type();
      if (value.isDevice()) {
        there_.emplace_back(c10::Device(c10::DeviceType::CPU));
      } else if (type->kind() == c10::TypeKind::GeneratorType) {
        const at::Generator generator = value.isGenerator() ? value.toGenerator() : default_generator(device_);
        there_.emplace_back(at::detail::createCPUGenerator(draw_seed(generator)));
      } else {
        there_.push_back(map_tensors(value, writes(argument),
                                     [&](const at::Tensor& tensor, bool write) { return thread_side(tensor, write); }));
      }
    }
  }

  void submit() {
    // Pairs of a fresh output's CPU side and its place in the results.
    std::vector<std::pair<size_t, c10::IValue>> fresh;
    for (size_t at = 0; at < outputs_.size(); ++at) {
      if (schema_.returns()[at].alias_info()) continue;
      fresh.emplace_back(at, map_tensors(outputs_[at], true, [&](const at::Tensor& tensor, bool write) {
                           return thread_side(tensor, write);
                         }));
    }
    Runtime::get().submit(current_stream(device_), Kind::Operator, name(), nbytes_, accesses_,
                          [op = op_, there = std::move(there_), fresh = std::move(fresh)]() mutable {
                            op.callBoxed(there);
                            for (auto& [at, target] : fresh) copy_results(there[at], target);
                          });
  }

  static void copy_result(const at::Tensor& result, const at::Tensor& target) {
    if (!target.defined() || !result.defined()) return;
    TORCH_CHECK(result.sizes() == target.sizes() && result.scalar_type() == target.scalar_type(),
                "the host foresaw ", target.scalar_type(), target.sizes(), ", the kernel gave ", result.scalar_type(),
                result.sizes());
    target.copy_(result);
  }

  static void copy_results(const c10::IValue& result, const c10::IValue& target) {
    if (result.isTensor()) {
      if (target.isTensor()) copy_result(result.toTensor(), target.toTensor());
      return;
    }
    const auto from = result.toTensorVector(), to = target.toTensorVector();
    for (size_t each = 0; each < to.size(); ++each) copy_result(from[each], to[each]);
  }

  // The host waits for the operator, sees its outputs and brings them to the device.
  void run_now() {
    auto results = std::make_shared<Stack>(std::move(there_));
    Stream* stream = current_stream(device_);
    Runtime& runtime = Runtime::get();
    auto error = std::make_shared<std::exception_ptr>();
    runtime.submit(stream, Kind::Operator, name(), nbytes_, accesses_, [op = op_, results, error] {
      try {
        op.callBoxed(*results);
      } catch (...) {
        *error = std::current_exception();
      }
    });
    runtime.synchronize(stream, name());
    if (*error) std::rethrow_exception(*error);
    {
      std::lock_guard<std::mutex> lock(without_rule_mutex);
      without_rule.insert(toString(op_.operator_name()));
    }
    for (size_t at = 0; at < results->size(); ++at) {
      if (schema_.returns()[at].alias_info()) {
        outputs_.push_back(arguments_[aliased(schema_.returns()[at])]);
        continue;
      }
      outputs_.push_back(map_tensors((*results)[at], true, [&](const at::Tensor& result, bool) {
        at::Tensor output = on_device(result);
        std::vector<Access> accesses;
        add_accesses(output, true, &accesses);
        const at::Tensor there = thread_view(output, thread_storage(output));
        runtime.submit(stream, Kind::Operator, name(), output.nbytes(), accesses, [=] { there.copy_(result); });
        return output;
      }));
    }
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  std::vector<c10::IValue> arguments_;
  int device_;
  Stack there_;
  std::vector<c10::IValue> outputs_;
  std::vector<Access> accesses_;
  uint64_t nbytes_ = 0;
  std::unordered_map<c10::TensorImpl*, at::Tensor> views_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// torch asks other devices for convolution by operators of their own, which are the CPU's but for one argument.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  fallback(op, stack);
}

void convolution_backward(const c10::OperatorHandle& given, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const size_t first = stack->size() - given.schema().arguments().size();
  const at::Tensor weight = (*stack)[first + 2].toTensor();
  const bool transposed = (*stack)[first + 6].toBool();
  const int64_t groups = (*stack)[first + 8].toInt();
  const std::vector<int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
  stack->insert(stack->begin() + static_cast<int64_t>(first) + 3, c10::IValue(bias));
  fallback(op, stack);
}

}  // namespace

// Operators that torch would decompose for a device without a kernel, to other bits than the CPU's kernel gives.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward", "addr"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace simulated
