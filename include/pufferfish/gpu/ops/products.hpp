// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Matrix products, and the operations of ops/linear/, on a device. cuBLAS multiplies views whose rows or
/// columns are contiguous, transposed or not. Operands of 16 bits whose rows begin at no multiple of 16 bytes
/// are copied to aligned rows first if that is estimated to be faster (gpu/ops/aligned_product.hpp). The
/// copies are in scratch memory.
///
/// All operands are views of memory of the context's device. Calls enqueue their work in the context's stream
/// and return before it has finished. Products may be captured into graphs.

#include <optional>
#include <span>

#include <pufferfish/core/message.hpp>
#include <pufferfish/gpu/kernels/reduce/reductions.hpp>
#include <pufferfish/gpu/kernels/step.hpp>
#include <pufferfish/gpu/ops/aligned_product.hpp>
#include <pufferfish/gpu/ops/arguments.hpp>
#include <pufferfish/gpu/runtime/context.hpp>
#include <pufferfish/ops/linear/column_blocks.hpp>
#include <pufferfish/ops/linear/column_sums.hpp>
#include <pufferfish/ops/linear/linear.hpp>
#include <pufferfish/ops/linear/linear_maps.hpp>
#include <pufferfish/ops/linear/relu_bias.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu {
namespace detail {

/// Describes a view with contiguous rows or columns as the column-major matrix that is the transpose of the
/// view. Nothing is copied. Throws shape_error, with a text that begins with `what`, for other strides.
template <class T>
blas_matrix blas_view(const char* what, const tensor_view<const T, 2>& view) {
  // The stride of an extent of at most one is never used, but cuBLAS checks it.
  const index_t rows = view.extent(0), columns = view.extent(1);
  if (view.stride(1) == 1 || columns <= 1) {
    return {view.data(), std::max({rows <= 1 ? columns : view.stride(0), columns, index_t{1}}), false};
  }
  if (view.stride(0) == 1 || rows <= 1)
    return {view.data(), std::max({view.stride(1), rows, index_t{1}}), true};
  pufferfish::detail::throw_error<shape_error>(
      {what, ": an operand ", view.shape(), " has rows or columns that are dense; this one's strides are ",
       view.strides()});
}

/// Describes c = a b, or c += a b, as a column-major product: its transpose c^T = b^T a^T, so b is cuBLAS's
/// first operand. Throws shape_error if the shapes do not fit or rows of c are not dense. In math_mode::tf32
/// products of floats are computed in TF32.
template <class T, class C>
blas_product product_of(context<device::gpu>& ctx, const tensor_view<const T, 2>& a,
                        const tensor_view<const T, 2>& b, const tensor_view<C, 2>& c, bool add) {
  if (a.extent(1) != b.extent(0) || c.extent(0) != a.extent(0) || c.extent(1) != b.extent(1)) {
    pufferfish::detail::throw_error<shape_error>(
        {"gpu::multiply: ", a.shape(), " times ", b.shape(), " does not fit ", c.shape()});
  }
  blas_product p;
  p.m = c.extent(1);
  p.n = c.extent(0);
  p.k = a.extent(1);
  p.a = blas_view<T>("gpu::multiply", b);
  p.b = blas_view<T>("gpu::multiply", a);
  const blas_matrix result = blas_view<C>("gpu::multiply", c);
  if (result.transposed) {
    pufferfish::detail::throw_error<shape_error>(
        {"gpu::multiply: rows of the result ", c.shape(), " are dense"});
  }
  p.c = c.data();
  p.c_step = result.step;
  p.add = add;
  p.type = element<T>::type;
  p.c_type = element<C>::type;
  p.compute = element<T>::compute;
  if (p.type == CUDA_R_32F && ctx.math() == math_mode::tf32) p.compute = CUBLAS_COMPUTE_32F_FAST_TF32;
  return p;
}

/// The product c = a b + bias, or with `add` c += a b + bias, of a list of products.
template <class T, class C>
struct listed_product {
  tensor_view<const T, 2> a, b;
  tensor_view<C, 2> c;
  bool add = false;
  const T* bias = nullptr;
};

/// Distance from a view to another view of the same shape and strides, in elements; nothing if the shapes or
/// strides differ or the second view does not begin after the first one, or is the same with `same`.
template <class T>
std::optional<index_t> distance(const tensor_view<T, 2>& from, const tensor_view<T, 2>& to, bool same) {
  const auto begin = reinterpret_cast<std::uintptr_t>(from.data()),
             end = reinterpret_cast<std::uintptr_t>(to.data());
  if (from.shape() != to.shape() || from.strides() != to.strides() || end < begin ||
      (end == begin && !same) || (end - begin) % sizeof(T) != 0) {
    return std::nullopt;
  }
  return static_cast<index_t>((end - begin) / sizeof(T));
}

/// The batch of products at(first), at(first + 1), ... of a list of `count` products that are computed in one
/// launch: as many as possible that have one shape and operands at equal distances, and no bias. At least
/// one.
template <class At>
product_batch batch_from(index_t first, index_t count, const At& at) {
  product_batch batch;
  for (index_t i = first + 1; i < count; ++i) {
    const auto last = at(i - 1), next = at(i);
    const auto a = distance(last.a, next.a, true), b = distance(last.b, next.b, true),
               c = distance(last.c, next.c, false);
    if (!a || !b || !c || last.bias != nullptr || next.bias != nullptr || last.add != next.add) break;
    // cuBLAS's first operand is b (product_of).
    if (batch.count > 1 && (*b != batch.a || *a != batch.b || *c != batch.c)) break;
    batch = {batch.count + 1, *b, *a, *c};
  }
  return batch;
}

/// Computes the products at(0) .. at(count - 1), in batches as large as possible. No result overlaps an
/// operand of another product.
template <class T, class C, class At>
void run_list(context<device::gpu>& ctx, index_t count, const At& at) {
  for (index_t first = 0; first < count;) {
    const listed_product<T, C> p = at(first);
    const product_batch batch = batch_from(first, count, at);
    const C* bias = nullptr;
    if constexpr (std::is_same_v<T, C>) bias = p.bias;
    run_products<T, C>(ctx, product_of<T, C>(ctx, p.a, p.b, p.c, p.add), batch, bias);
    first += batch.count;
  }
}

/// Whether the sum of `count` products with results of `bytes` bytes is computed as one batch and a sum of
/// its results, instead of `count` products that add to one result. By the estimates of `costs` this saves
/// count - 2 launches, and reads and writes 2 bytes more.
inline bool sum_in_batch(const product_costs& costs, index_t count, double bytes) {
  return static_cast<double>(count - 2) * costs.launch > 2 * bytes / costs.bandwidth;
}

}  // namespace detail

/// c = a b + bias, or c += a b + bias with `add`. `bias` has one element per column of c, which is added to
/// every row; nullptr: no bias. a: M x K, b: K x N, each with dense rows or dense columns (such as transposed
/// views); c: M x N, with dense rows; c overlaps no operand. K = 0 is an empty sum. Sums are in float (in
/// double for double). Factors of float have 24 or 11 bits, depending on context_options::math. Throws
/// shape_error for shapes or strides that do not fit, and backend_error if a call of CUDA fails.
///
/// The bias is added in the product's epilogue if cublasLt supports the shape and the bias is aligned to 16
/// bytes. Otherwise a kernel writes the bias to c, or adds it, before the product; elements of 16 bits are
/// then rounded twice.
///
///     memory_block<float> a(gpu::device_memory(), 6 * 4), b(gpu::device_memory(), 4 * 5);
///     memory_block<float> c(gpu::device_memory(), 6 * 5);
///     gpu::multiply<float>(ctx, {a.data(), {6, 4}}, {b.data(), {4, 5}}, {c.data(), {6, 5}});
template <class T>
void multiply(context<device::gpu>& ctx, const tensor_view<const T, 2>& a, const tensor_view<const T, 2>& b,
              const tensor_view<T, 2>& c, bool add = false, const T* bias = nullptr) {
  detail::run_products<T, T>(ctx, detail::product_of<T, T>(ctx, a, b, c, add), {}, bias);
}

/// c = a b, or with `add` c += a b, where c has the type of parameters (float for 16-bit factors). Gradients
/// of weights use this form: sums of 16-bit factors are not rounded to 16 bits. Shapes, strides and errors
/// are those of multiply; there is no bias.
template <class T>
void multiply_wide(context<device::gpu>& ctx, const tensor_view<const T, 2>& a,
                   const tensor_view<const T, 2>& b, const tensor_view<parameter_t<T>, 2>& c, bool add) {
  using C = parameter_t<T>;
  detail::run_products<T, C>(ctx, detail::product_of<T, C>(ctx, a, b, c, add), {});
}

/// Computes `count` products c = a b, or with `add` c += a b: the operands of product i begin i a_step, i
/// b_step and i c_step elements after a, b and c. A step of 0 for a or b uses the same operand in all
/// products. The results of different products must not overlap. C: T, or the type of parameters. `bias`: N
/// elements for each product, one after the other, which are added to every row of its result; nullptr: no
/// bias. Shapes and strides are those of multiply. Throws the errors of multiply, and shape_error for more
/// than 2^31 - 1 products.
template <class T, class C = T>
void multiply_batch(context<device::gpu>& ctx, index_t count, const tensor_view<const T, 2>& a,
                    index_t a_step, const tensor_view<const T, 2>& b, index_t b_step,
                    const tensor_view<C, 2>& c, index_t c_step, bool add = false, const C* bias = nullptr) {
  detail::run_products<T, C>(ctx, detail::product_of<T, C>(ctx, a, b, c, add),
                             {count, b_step, a_step, c_step}, bias);
}

}  // namespace gpu

namespace ops {

/// Device implementation of the functions of ops/linear/, where shapes and errors are described.
template <>
struct linear_ops<device::gpu> {
  /// sums_c = sum over rows of x, or with `add` sums_c += that sum; summed in double. Scratch:
  /// column_scratch() doubles.
  template <class T>
  static void column_sums(context<device::gpu>& ctx, const tensor_view<const T, 2>& x, parameter_t<T>* sums,
                          bool add) {
    const index_t rows = x.extent(0), columns = x.extent(1);
    scratch_frame frame(ctx.scratch());
    gpu::kernels::column_sums<T>(ctx.stream(), x.data(), x.stride(0), rows, columns, add,
                                 gpu::detail::column_workspace_of(ctx, frame, rows, columns, 1), sums);
  }

  /// Computes relu_bias_gradient in one launch. Scratch: column_scratch() doubles.
  template <class T>
  static void relu_bias_gradient(context<device::gpu>& ctx, const tensor_view<const T, 2>& y,
                                 const tensor_view<const T, 2>& dy, const tensor_view<T, 2>& dz,
                                 parameter_t<T>* db, bool accumulate) {
    const index_t rows = y.extent(0), columns = y.extent(1);
    scratch_frame frame(ctx.scratch());
    gpu::kernels::relu_column_sums<T>(ctx.stream(), y.data(), dy.data(), dz.data(), rows, columns, accumulate,
                                      gpu::detail::column_workspace_of(ctx, frame, rows, columns, 1), db);
  }

  /// c = a b + bias, or with `add` c += a b + bias. All layers with a weight matrix use this product. Throws
  /// the errors of multiply.
  template <class T>
  static void product(context<device::gpu>& ctx, const tensor_view<const T, 2>& a,
                      const tensor_view<const T, 2>& b, const tensor_view<T, 2>& c, bool add, const T* bias) {
    gpu::multiply<T>(ctx, a, b, c, add, bias);
  }

  /// The products c_g = a_g b_g + bias_g of all groups g. Throws the errors of multiply_batch.
  template <class T>
  static void products(context<device::gpu>& ctx, index_t groups, const column_blocks<const T>& a,
                       const column_blocks<const T>& b, const column_blocks<T>& c, const T* bias) {
    gpu::multiply_batch<T>(ctx, groups, a.first, a.step, b.first, b.step, c.first, c.step, false, bias);
  }
  /// The gradients dw_g = x_g^T dy_g of all groups g, or with `accumulate` dw_g += x_g^T dy_g.
  template <class T>
  static void weight_gradients(context<device::gpu>& ctx, index_t groups, const column_blocks<const T>& x,
                               const column_blocks<const T>& dy, const column_blocks<parameter_t<T>>& dw,
                               bool accumulate) {
    gpu::multiply_batch<T, parameter_t<T>>(ctx, groups, transpose(x.first), x.step, dy.first, dy.step,
                                           dw.first, dw.step, accumulate);
  }

  /// Gradient of a weight: dw = x^T dy, or with `accumulate` dw += x^T dy. Throws the errors of multiply.
  template <class T>
  static void weight_gradient(context<device::gpu>& ctx, const tensor_view<const T, 2>& x,
                              const tensor_view<const T, 2>& dy, const tensor_view<parameter_t<T>, 2>& dw,
                              bool accumulate) {
    gpu::multiply_wide<T>(ctx, transpose(x), dy, dw, accumulate);
  }

  /// Computes linear_maps_forward.
  template <class T>
  static void forward_maps(context<device::gpu>& ctx, std::span<const linear_map<T>> maps) {
    gpu::detail::run_list<T, T>(ctx, static_cast<index_t>(maps.size()), [&](index_t i) {
      const linear_map<T>& m = maps[static_cast<std::size_t>(i)];
      return gpu::detail::listed_product<T, T>{m.x, m.w, m.y, false, m.bias};
    });
  }
  /// Computes linear_maps_backward_weight.
  template <class T>
  static void weight_gradient_maps(context<device::gpu>& ctx, std::span<const weight_gradient_map<T>> maps) {
    using C = parameter_t<T>;
    gpu::detail::run_list<T, C>(ctx, static_cast<index_t>(maps.size()), [&](index_t i) {
      const weight_gradient_map<T>& m = maps[static_cast<std::size_t>(i)];
      return gpu::detail::listed_product<T, C>{transpose(m.x), m.dy, m.dw, m.accumulate};
    });
  }
  /// Computes linear_maps_backward_input.
  template <class T>
  static void input_gradient_maps(context<device::gpu>& ctx, std::span<const input_gradient_map<T>> maps) {
    gpu::detail::run_list<T, T>(ctx, static_cast<index_t>(maps.size()), [&](index_t i) {
      const input_gradient_map<T>& m = maps[static_cast<std::size_t>(i)];
      return gpu::detail::listed_product<T, T>{m.dy, transpose(m.w), m.dx};
    });
  }
  /// Computes linear_maps_backward_sum: by one product after another that adds to dx, or, if sum_in_batch()
  /// holds and the operands allow it, by one batch and a sum of its results.
  template <class T>
  static void input_gradient_sum(context<device::gpu>& ctx, std::span<const input_gradient_map<T>> maps,
                                 const tensor_view<T, 2>& dx, bool add) {
    const auto count = static_cast<index_t>(maps.size());
    if (dx.empty() || count == 0) return;
    if (gpu::detail::sum_in_batch(ctx.blas().costs(), count, static_cast<double>(dx.size()) * sizeof(T))) {
      constexpr index_t run = 16 / static_cast<index_t>(sizeof(T));
      const index_t step = (dx.size() + run - 1) / run * run;
      scratch_frame frame(ctx.scratch());
      T* const terms = frame.take<T>(count * step);
      const auto term = [&](index_t i) {
        const input_gradient_map<T>& m = maps[static_cast<std::size_t>(i)];
        return gpu::detail::listed_product<T, T>{m.dy, transpose(m.w), {terms + i * step, dx.shape()}};
      };
      if (gpu::detail::batch_from(0, count, term).count == count) {
        gpu::detail::run_list<T, T>(ctx, count, term);
        return gpu::kernels::add_terms<T>(ctx.stream(), terms, step, static_cast<int>(count), dx.data(),
                                          dx.size(), add);
      }
    }
    for (const auto& m : maps) {
      product<T>(ctx, m.dy, transpose(m.w), dx, add, nullptr);
      add = true;
    }
  }
};

}  // namespace ops
PUFFERFISH_NAMESPACE_END
