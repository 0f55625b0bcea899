// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: products whose 16-bit operands are copied to aligned rows where that is faster. cuBLAS's fast
/// kernels need rows that begin at multiples of 16 bytes; rows of 1500 or 375 elements do not.

#include <algorithm>
#include <cstdint>

#include <pufferfish/gpu/kernels/copy/groups.hpp>
#include <pufferfish/gpu/kernels/elementwise/elementwise.hpp>
#include <pufferfish/gpu/runtime/context.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace gpu::detail {

/// `count` products at once: operands of product i begin i a, i b and i c elements after those of the first.
/// a or b = 0: all products have the same operand.
struct product_batch {
  index_t count = 1, a = 0, b = 0, c = 0;
};

/// An operand of a batch of products as it is in memory: `groups` matrices, `group_step` elements apart, of
/// `lines` runs of `length` elements, `step` elements apart.
template <class T>
struct operand_lines {
  T* data;
  index_t groups, group_step, lines, length, step;

  /// Largest power of two up to 16 that divides the address of every line, in bytes.
  int alignment() const {
    const auto bits = reinterpret_cast<std::uintptr_t>(data) |
                      static_cast<std::uintptr_t>(step | (groups > 1 ? group_step : 0)) * sizeof(T) | 16U;
    return static_cast<int>(bits & (~bits + 1));
  }
  double bytes() const { return static_cast<double>(groups * lines * length) * sizeof(T); }

  /// The operand's place in scratch memory, with aligned lines. The lines of all groups are side by side.
  template <class U>
  operand_lines<U> aligned(scratch_frame& frame) const {
    constexpr index_t run = 16 / static_cast<index_t>(sizeof(T));
    const index_t pitch = (length + run - 1) / run * run;
    return {frame.take<U>(groups * lines * pitch), groups, pitch, lines, length, groups * pitch};
  }
};

/// Copies all lines; `bias`: groups x length elements added to each line of a group, or nullptr.
template <class T, class U>
void copy_lines(context<device::gpu>& ctx, const operand_lines<U>& from, const operand_lines<T>& to,
                const T* bias = nullptr) {
  kernels::copy_groups<T>(ctx.stream(), from.groups, from.lines, from.length, {from.data, from.step},
                          from.group_step, {to.data, to.step}, to.group_step, bias);
}

/// Operands of a batch of products.
template <class T, class C>
struct product_lines {
  operand_lines<const T> a, b;
  operand_lines<C> c;

  product_lines(const blas_product& p, const product_batch& batch)
      : a(lines_of<const T>(p.a.data, p.a.step, batch, batch.a, p.a.transposed ? p.m : p.k,
                            p.a.transposed ? p.k : p.m)),
        b(lines_of<const T>(p.b.data, p.b.step, batch, batch.b, p.b.transposed ? p.k : p.n,
                            p.b.transposed ? p.n : p.k)),
        c(lines_of<C>(p.c, p.c_step, batch, batch.c, p.n, p.m)) {}

  int alignment() const { return std::min({a.alignment(), b.alignment(), c.alignment()}); }

 private:
  template <class U, class Void>
  static operand_lines<U> lines_of(Void* data, index_t step, const product_batch& batch, index_t group_step,
                                   index_t lines, index_t length) {
    return {static_cast<U*>(data), group_step == 0 ? 1 : batch.count, group_step, lines, length, step};
  }
};

/// Whether a batch of products is faster if the operands whose lines are not aligned are copied first, by the
/// estimates of `costs`:
///
///     as it is:  operations / rate of the alignment
///     copied:    operations / rate of 16 bytes + for each such operand: launch + 2 bytes / bandwidth
///
/// A result that is added to is copied twice. The logits of 700 tokens and 33,278 words, with rows of 1500
/// elements: 582 us or 233 + 87 us; 700 x 375 times 375 x 1500 for four gates, all three operands at
/// multiples of 2 bytes: 79 us or 10 + 20 us.
template <class T, class C>
bool copies_pay(const product_costs& costs, const blas_product& p, const product_batch& batch,
                const product_lines<T, C>& operands) {
  const int alignment = operands.alignment();
  if (alignment == 16) return false;
  const double operations = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) *
                            static_cast<double>(p.k) * static_cast<double>(batch.count);
  double copied = costs.product(operations, 16);
  const auto count = [&](const auto& operand, int times) {
    if (operand.alignment() < 16) copied += times * costs.copy(operand.bytes());
  };
  count(operands.a, 1);
  count(operands.b, 1);
  count(operands.c, p.add ? 2 : 1);
  return copied < costs.product(operations, alignment);
}

/// Adds the bias to c, or writes it to c unless p.add is set; nullptr: zeros. One launch if the results are
/// side by side.
template <class C>
void fill_results(context<device::gpu>& ctx, const blas_product& p, const product_batch& batch,
                  const C* bias) {
  const bool together = batch.count == 1 || batch.c == p.m;
  const index_t columns = together ? batch.count * p.m : p.m;
  for (index_t i = 0; i < (together ? 1 : batch.count); ++i) {
    kernels::fill_rows<C>(ctx.stream(), bias == nullptr ? nullptr : bias + i * p.m,
                          static_cast<C*>(p.c) + i * batch.c, p.n, columns, p.c_step, p.add);
  }
}

/// Computes the products p, with operands of type T and results of type C. `bias`: count x m elements, or
/// nullptr; one product only has its own m elements. The bias is added in cuBLAS's epilogue if that is
/// possible, else by a kernel. Throws the errors of blas::multiply.
template <class T, class C>
void run_products(context<device::gpu>& ctx, blas_product p, product_batch batch, const C* bias = nullptr) {
  if (p.m == 0 || p.n == 0 || batch.count == 0) return;
  if (p.k == 0) {
    if (bias != nullptr || !p.add) fill_results<C>(ctx, p, batch, bias);
    return;
  }
  scratch_frame frame(ctx.scratch());
  const product_lines<T, C> given(p, batch);
  operand_lines<C> result = given.c;
  if constexpr (sizeof(T) == 2) {
    if (copies_pay(ctx.blas().costs(), p, batch, given)) {
      const auto align = [&](const operand_lines<const T>& operand, blas_matrix& matrix, index_t& step) {
        if (operand.alignment() == 16) return;
        const operand_lines<T> to = operand.template aligned<T>(frame);
        copy_lines<T>(ctx, operand, to);
        matrix.data = to.data;
        matrix.step = to.step;
        if (operand.groups > 1) step = to.group_step;
      };
      align(given.a, p.a, batch.a);
      align(given.b, p.b, batch.b);
      if (given.c.alignment() < 16) {
        result = given.c.template aligned<C>(frame);
        if (p.add) copy_lines<C>(ctx, given.c, result);
        p.c = result.data;
        p.c_step = result.step;
        batch.c = result.group_step;
      }
    }
  }
  const bool copied = result.data != given.c.data;
  bool multiplied = false;
  if (bias != nullptr && !copied) {
    if constexpr (std::is_same_v<T, C>) {
      p.bias = bias;
      multiplied = batch.count == 1 && ctx.blas().multiply_with_bias(p);
      p.bias = nullptr;
    }
    if (!multiplied) {
      fill_results<C>(ctx, p, batch, bias);
      p.add = true;
    }
  }
  if (!multiplied) {
    batch.count == 1 ? ctx.blas().multiply(p)
                     : ctx.blas().multiply_batch(p, batch.count, batch.a, batch.b, batch.c);
  }
  if (copied) copy_lines<C>(ctx, result, given.c, bias);
}

}  // namespace gpu::detail
PUFFERFISH_NAMESPACE_END
