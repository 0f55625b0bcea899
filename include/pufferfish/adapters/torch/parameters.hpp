// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: makes the trained parameters of a libtorch module parameters of a parameter_store, and runs
/// collectives on a module's tensors.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/tensor.hpp>
#include <pufferfish/core/parameter.hpp>
#include <pufferfish/core/record_line.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch::detail {

/// Returns the elements of a dense tensor of scalar T, in the order of its memory. The tensor must outlive
/// the span.
template <class T>
std::span<T> elements_of(const Tensor& t) {
  return {t.data_ptr<T>(), static_cast<std::size_t>(t.numel())};
}

/// Returns a tensor's layout for compressors: a matrix of outputs x everything else if one of these two
/// dimensions is innermost in memory, else a vector.
inline logical_layout layout_of(const Tensor& t) {
  const std::int64_t size = t.numel();
  if (t.dim() >= 2 && size > 0) {
    const std::int64_t out = t.size(0), rest = size / out;
    if (t.stride(0) == 1) return {2, {out, rest, 1, 1}, {1, out, 0, 0}};
    if (t.stride(0) == rest) return {2, {out, rest, 1, 1}, {rest, 1, 0, 0}};
  }
  return logical_layout::vector(size);
}

/// Returns a line that describes a tensor. Ranks compare these lines to find out whether their modules
/// differ.
inline std::string describe_tensor(const std::string& name, const Tensor& t) {
  std::string text =
      pufferfish::detail::quote_word(name) + " " + shape_text(t) + " " + kind_text(t) + ", strides";
  for (const std::int64_t stride : t.strides()) text.append(" ").append(std::to_string(stride));
  return text + (t.requires_grad() ? ", trained\n" : "\n");
}

/// Returns the lines of describe_tensor for all parameters, then for all buffers. If ranks have equal lines,
/// everything that follows from kinds, shapes and strides alone is the same on these ranks.
inline std::string describe_module(const torch::nn::Module& module) {
  std::string lines;
  for (const auto& p : module.named_parameters()) lines += describe_tensor(p.key(), p.value());
  for (const auto& b : module.named_buffers()) lines += describe_tensor(b.key(), b.value());
  return lines;
}

/// Whether a parameter of scalar T can refer to the tensor: dense, on the CPU, of scalar T.
template <class T>
bool can_be_shown(const Tensor& t) {
  return is_ours(t) && t.scalar_type() == scalar_of<T>() && t.is_non_overlapping_and_dense();
}

/// A trained parameter of a module. `shown`: its parameter in a store, at first at the tensor's memory.
/// `tensor` shares the module's tensor.
template <class T>
struct trained_parameter {
  std::string name;                     ///< as in named_parameters()
  Tensor tensor;                        ///< the module's tensor
  std::unique_ptr<parameter<T>> shown;  ///< its parameter in a store

  /// Makes `shown` refer to the tensor's present memory; set_data and load replace it. Throws state_error if
  /// the tensor's scalar, shape or strides have changed.
  void follow(const char* user) const {
    check_layout(user);
    if (tensor.numel() > 0) shown->relocate(tensor.data_ptr<T>(), false);
  }
  /// Throws state_error, naming the parameter, if the tensor's scalar, shape or strides have changed. `user`:
  /// for the text.
  void check_layout(const char* user) const {
    if (can_be_shown<T>(tensor) && layout_of(tensor) == shown->layout()) return;
    throw_error<state_error>({user, ": ", name, " is now ", kind_text(tensor), ", ", shape_text(tensor),
                              ": its scalar, shape or strides have changed; make a new object"});
  }
  /// Returns a tensor of the parameter's shape and strides with the memory at `place`. It shares ownership of
  /// `keep`.
  Tensor view_at(T* place, std::shared_ptr<const void> keep) const {
    return torch::from_blob(
        place, tensor.sizes(), tensor.strides(), [keep = std::move(keep)](void*) {},
        tensor.options().requires_grad(false));
  }
  /// Increments the tensor's version: autograd then refuses backward passes of graphs of older values.
  void changed() const { tensor.unsafeGetTensorImpl()->bump_version(); }
};

/// Returns the parameters that require a gradient, in the order of registration, each tensor once. The module
/// is not changed. `user`: the name of the caller for error texts. Throws value_error, naming the parameter,
/// for one that a store of T cannot refer to.
template <class T>
std::vector<trained_parameter<T>> trained_parameters(const torch::nn::Module& module, const char* user) {
  std::vector<trained_parameter<T>> found;
  std::set<const void*> seen;
  for (const auto& p : module.named_parameters()) {
    const Tensor& t = p.value();
    if (!t.requires_grad() || !seen.insert(t.unsafeGetTensorImpl()).second) continue;
    if (!can_be_shown<T>(t)) {
      throw_error<value_error>({user, ": ", p.key(), " is ", kind_text(t), ", where a dense tensor of ",
                                c10::toString(scalar_of<T>()), " on cpu is wanted"});
    }
    found.push_back(
        {p.key(), t, std::make_unique<parameter<T>>(layout_of(t), parameter_role::weight, t.data_ptr<T>())});
  }
  return found;
}

/// Overwrites `t` with rank 0's values on all ranks. Any scalar and device: through a dense copy on the CPU
/// if needed. Collective; shape and scalar must be equal on all ranks.
template <class Comm>
void broadcast_tensor(Comm& comm, const Tensor& t) {
  if (t.numel() == 0) return;
  const torch::NoGradGuard no_grad;
  Tensor dense = t.is_non_overlapping_and_dense() ? t : t.contiguous();
  if (!dense.is_cpu()) dense = dense.cpu();
  comm.broadcast_bytes({static_cast<std::byte*>(dense.data_ptr()), dense.nbytes()}, 0);
  if (dense.data_ptr() != t.data_ptr()) Tensor(t).copy_(dense);
}

/// Sends rank 0's parameters and buffers to all ranks. Collective.
template <class Comm>
void broadcast_module(Comm& comm, const torch::nn::Module& module) {
  for (const Tensor& t : module.parameters()) broadcast_tensor(comm, t);
  for (const Tensor& t : module.buffers()) broadcast_tensor(comm, t);
}

/// Replaces element i of `values` by the sum of all ranks' elements i divided by the number of ranks: the sum
/// is rounded, then the quotient. Collective.
template <class T, class Comm>
void average_values(Comm& comm, std::span<T> values) {
  comm.all_reduce_sum(values);
  for (T& value : values) value /= static_cast<T>(comm.size());
}

/// Contiguous float and double buffers on the CPU become their means over the ranks, others rank 0's.
/// Collective.
template <class Comm>
void average_buffers(Comm& comm, const torch::nn::Module& module) {
  for (const Tensor& t : module.buffers()) {
    if (!is_ours(t) || !t.is_contiguous()) {
      broadcast_tensor(comm, t);
    } else if (t.scalar_type() == torch::kFloat) {
      average_values(comm, elements_of<float>(t));
    } else {
      average_values(comm, elements_of<double>(t));
    }
  }
}

}  // namespace host_torch::detail
PUFFERFISH_NAMESPACE_END
