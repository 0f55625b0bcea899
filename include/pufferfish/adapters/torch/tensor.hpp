// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// libtorch's tensors as views, and helpers of all layers of the libtorch adapter.
///
/// The namespace is `host_torch`, not `torch`: a namespace `torch` within `pufferfish` would hide libtorch's
/// from all code in `pufferfish`, and from code with `using namespace pufferfish`.

#include <torch/version.h>

#if defined(__clang__) && TORCH_VERSION_MAJOR < 2
#error "pufferfish/adapters/torch.hpp: libtorch 1 cannot be compiled by clang as C++20: use g++"
#endif

#include <torch/torch.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/message.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {

using ::torch::Tensor;

/// How often a layer had to copy tensors into the kernels' memory order. The counts stay 0 as long as
/// activations are channels last (images) or contiguous (rows, sequences).
struct layout_statistics {
  std::int64_t input_copies = 0;      ///< of inputs of forward passes
  std::int64_t gradient_copies = 0;   ///< of gradients of outputs, in backward passes
  std::int64_t parameter_copies = 0;  ///< of parameters whose strides the program has changed
};

namespace detail {

using pufferfish::detail::message;
using pufferfish::detail::throw_error;

/// Counters that a layer shares with its nodes in autograd's graph, which may outlive the layer.
struct layout_counters : torch::CustomClassHolder {
  std::atomic<std::int64_t> inputs{0}, gradients{0}, parameters{0};
  /// The counts so far.
  layout_statistics read() const { return {inputs, gradients, parameters}; }
};
using counters_ptr = c10::intrusive_ptr<layout_counters>;

/// Text of a tensor's shape for errors, such as "[2 x 3 x 8]".
inline std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (std::int64_t d = 0; d < t.dim(); ++d) text += (d > 0 ? " x " : "") + std::to_string(t.size(d));
  return text + "]";
}

/// Text of a tensor's scalar and device for errors, such as "Float on cpu".
inline std::string kind_text(const Tensor& t) {
  return std::string(c10::toString(t.scalar_type())) + " on " + t.device().str();
}

/// Returns libtorch's name of the scalar T, which is float or double.
template <class T>
constexpr auto scalar_of() {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>,
                "pufferfish: the libtorch adapter reads tensors of float and double");
  return std::is_same_v<T, float> ? torch::kFloat : torch::kDouble;
}

/// Whether this library's kernels can work on the tensor: dense, float or double, on the CPU.
inline bool is_ours(const Tensor& t) {
  return t.device().is_cpu() && t.layout() == torch::kStrided && !t.is_quantized() &&
         (t.scalar_type() == torch::kFloat || t.scalar_type() == torch::kDouble);
}

/// Throws value_error, naming `layer`, unless `t` is a dense tensor of T in the CPU's memory.
template <class T>
void check_kind(const std::string& layer, const char* what, const Tensor& t) {
  if (!t.defined()) throw_error<value_error>({layer, ": its ", what, " is an undefined tensor"});
  if (!is_ours(t) || t.scalar_type() != scalar_of<T>()) {
    const char* wanted = std::is_same_v<T, float> ? "Float" : "Double";
    throw_error<value_error>({layer, ": its ", what, " is ", kind_text(t), ", where a dense tensor of ",
                              wanted, " on cpu is wanted"});
  }
}

/// Returns a view of a tensor of N dimensions, with the tensor's strides. The tensor must have N dimensions,
/// be of scalar T and outlive the view; none of this is checked here, except the scalar by libtorch.
template <class T, std::size_t N>
tensor_view<const T, N> view_of(const Tensor& t) {
  extents<N> shape{}, strides{};
  for (std::size_t d = 0; d < N; ++d) {
    shape[d] = t.size(static_cast<std::int64_t>(d));
    strides[d] = t.stride(static_cast<std::int64_t>(d));
  }
  return {t.data_ptr<T>(), shape, strides};
}

/// Views a contiguous tensor of at least one dimension as rows. The last dimension becomes the columns, all
/// others together the rows. The tensor must outlive the view.
template <class T>
tensor_view<T, 2> rows_of(const Tensor& t) {
  const std::int64_t columns = t.size(-1);
  return {t.data_ptr<T>(), {columns == 0 ? 0 : t.numel() / columns, columns}};
}

/// Views a tensor of images as [N][H][W][C]. `t` has the shape N x C x H x W and is contiguous in
/// torch::MemoryFormat::ChannelsLast. Nothing is copied: `t` must outlive the view.
template <class T>
tensor_view<T, 4> images_of(const Tensor& t) {
  return {t.data_ptr<T>(), {t.size(0), t.size(2), t.size(3), t.size(1)}};
}

/// Returns `t` in contiguous memory of the given format: `t` itself, or a copy, which increments `copies`.
inline Tensor in_order(const Tensor& t, torch::MemoryFormat format, std::atomic<std::int64_t>& copies) {
  if (t.is_contiguous(format)) return t;
  ++copies;
  return t.contiguous(format);
}

/// Returns a parameter as a dense tensor in the kernels' memory order. Parameters are stored in this order
/// (see kernel_ordered), so nothing is copied unless the program has changed the strides.
inline Tensor stored(const Tensor& parameter, torch::IntArrayRef order, layout_counters& counters) {
  return in_order(parameter.permute(order), torch::MemoryFormat::Contiguous, counters.parameters);
}

// Orders of dimensions. The kernels keep outputs innermost: [out][in] is stored as [in][out], a kernel's
// [out][in][h][w] as [h][w][in][out]. matrix_order is its own inverse, kernel_shape that of kernel_order.
inline constexpr std::array<std::int64_t, 2> matrix_order{1, 0};
inline constexpr std::array<std::int64_t, 4> kernel_order{2, 3, 1, 0}, kernel_shape{3, 2, 0, 1};

/// Returns the permutation from a parameter's dimensions to the order of its memory.
inline torch::IntArrayRef storage_order(const Tensor& t) {
  return t.dim() == 4 ? torch::IntArrayRef(kernel_order) : torch::IntArrayRef(matrix_order);
}
/// Returns the inverse permutation of storage_order.
inline torch::IntArrayRef logical_order(const Tensor& t) {
  return t.dim() == 4 ? torch::IntArrayRef(kernel_shape) : torch::IntArrayRef(matrix_order);
}

/// Returns a tensor of the same values and shape, with strides such that memory is in the kernels' order.
/// Optimizers, `to`, `clone`, `save` and `load` keep strides.
inline Tensor kernel_ordered(const Tensor& t) {
  if (t.dim() < 2 || t.permute(storage_order(t)).is_contiguous()) return t;
  return t.permute(storage_order(t)).contiguous().permute(logical_order(t));
}

/// Makes an uninitialized parameter in the kernels' memory order. It does not require a gradient until it is
/// registered.
inline Tensor empty_parameter(torch::IntArrayRef shape, const torch::TensorOptions& options) {
  const torch::NoGradGuard no_grad;
  return kernel_ordered(torch::empty(shape, options.requires_grad(false)));
}

/// Fills a tensor with random numbers of libtorch, uniform in -bound .. bound.
inline void fill_uniform(Tensor& t, double bound) {
  const torch::NoGradGuard no_grad;
  if (t.defined()) t.uniform_(-bound, bound);
}

/// The factors of one matrix of a low-rank module: parameters, or parts of parameters. down: [rank][in] or
/// [rank][in][height][width], up: [out][rank] or [out][rank][1][1].
struct factor_tensors {
  Tensor down, up;
};

/// Splits `down` and `up` along their first dimension into `parts` equal parts, and appends the pairs of
/// parts to `to`. The parts are detached from the autograd graph and share memory with the arguments.
inline void append_factors(std::vector<factor_tensors>& to, const Tensor& down, const Tensor& up,
                           std::int64_t parts) {
  const std::vector<Tensor> downs = down.detach().tensor_split(parts), ups = up.detach().tensor_split(parts);
  for (std::size_t i = 0; i < downs.size(); ++i) to.push_back({downs[i], ups[i]});
}

/// Sets requires_grad of each parameter of a low-rank module to that of the dense tensor from which it is
/// derived. Undefined dense tensors are skipped: they have no parameter.
inline void train_as(const std::vector<Tensor>& parameters, const std::vector<Tensor>& dense) {
  std::size_t next = 0;
  for (const Tensor& t : dense) {
    if (t.defined()) parameters[next++].set_requires_grad(t.requires_grad());
  }
}

/// Returns the context of this thread (threads and scratch memory), because libtorch's layers have no context
/// argument. The context is kept between calls, so that later steps allocate no scratch; results do not
/// depend on it. The context has as many threads as libtorch (torch::set_num_threads); with -fopenmp, both
/// use the same threads. The reference is valid until the next call in this thread, which may make a new
/// context if the number of threads has changed.
inline cpu_context& thread_context() {
  thread_local std::unique_ptr<cpu_context> kept;
  const int threads = std::max(1, torch::get_num_threads());
  if (!kept || kept->threads() != threads) {
    kept.reset();
    kept = std::make_unique<cpu_context>(context_options{.threads = threads});
  }
  return *kept;
}

/// True if autograd needs a backward pass through a function of these tensors.
template <class... Tensors>
bool wants_gradient(const Tensors&... tensors) {
  return torch::GradMode::is_enabled() && ((tensors.defined() && tensors.requires_grad()) || ...);
}

/// Returns `t`, or nullopt if it is undefined, as an argument of an autograd function, which takes no
/// undefined tensors.
inline torch::optional<Tensor> if_defined(const Tensor& t) {
  return t.defined() ? torch::optional<Tensor>(t) : torch::nullopt;
}

/// Whether the gradient of input `i` of an autograd function is needed; false for undefined inputs. `inputs`:
/// the function's tensor arguments in order. libtorch counts the defined ones only.
inline bool wants_input(const torch::autograd::AutogradContext& kept,
                        const torch::autograd::variable_list& inputs, std::size_t i) {
  if (!inputs[i].defined()) return false;
  std::size_t edge = 0;
  for (std::size_t before = 0; before < i; ++before) edge += inputs[before].defined() ? 1U : 0U;
  return kept.needs_input_grad(edge);
}

/// Computes gradients with a graph of their own (create_graph), by libtorch's operations, because this
/// library's kernels record no graph. reference() computes the layer's outputs from `inputs` by those
/// operations.
template <class Reference>
torch::autograd::variable_list differentiable_backward(const torch::autograd::variable_list& inputs,
                                                       const torch::autograd::variable_list& output_gradients,
                                                       const Reference& reference) {
  torch::autograd::variable_list wanted, outputs, gradients;
  for (const Tensor& t : inputs) {
    if (t.defined() && t.requires_grad()) wanted.push_back(t);
  }
  const torch::autograd::variable_list all = reference();
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!output_gradients[i].defined()) continue;
    outputs.push_back(all[i]);
    gradients.push_back(output_gradients[i]);
  }
  const auto found = torch::autograd::grad(outputs, wanted, gradients, true, true, true);
  torch::autograd::variable_list result;
  std::size_t next = 0;
  for (const Tensor& t : inputs) {
    result.push_back(t.defined() && t.requires_grad() ? found[next++] : Tensor());
  }
  return result;
}

}  // namespace detail
}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
