// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Kernels of <pufferfish/gpu/kernels/loss/token_loss.hpp>. One block per row finds the largest logit first,
/// then computes sums relative to the largest; by then the row is in the second-level cache.
///
/// A thread adds its share of the classes in float. Shares and rows are added in double, gradients of the
/// bias in float for up to 16 rows, then in double. The order depends on the shape alone. Logits are read
/// twice, once more with label smoothing, and once more for the gradient.

#include <pufferfish/gpu/kernels/copy/rows.cuh>
#include <pufferfish/gpu/kernels/loss/token_loss.hpp>
#include <pufferfish/gpu/kernels/reduce/columns.cuh>

PUFFERFISH_KERNELS_BEGIN

/// Calls f(k) for the calling thread's share of 0 .. count - 1.
template <class F>
__device__ inline void for_each_class(index_t count, F f) {
  for (index_t k = static_cast<index_t>(threadIdx.x); k < count; k += static_cast<index_t>(blockDim.x)) f(k);
}

/// The logit of row m and class k: z_mk = scale logits_mk + bias_k.
template <class T>
__device__ inline float logit(const token_logits<T>& z, index_t m, index_t k) {
  const float value = static_cast<float>(z.logits.row(m)[k]) * z.scale;
  return z.bias == nullptr ? value : value + static_cast<float>(z.bias[k]);
}

/// The largest of value(k) for k < count; NaN if one of them is NaN. All threads of the block receive the
/// result.
template <class F>
__device__ inline float largest_of(index_t count, F value) {
  float most = -HUGE_VALF;
  for_each_class(count, [&](index_t k) { most = maximum()(most, value(k)); });
  return block_max(most, -HUGE_VALF);
}

/// The sum of f(k) for k < count: a thread's share in float, the sum of the shares in double.
template <class F>
__device__ inline double sum_over_classes(index_t count, F f) {
  float sum = 0.0F;
  for_each_class(count, [&](index_t k) { sum += f(k); });
  return block_sum(static_cast<double>(sum));
}

/// Whether the target of row m is not the padding.
template <class T>
__device__ inline bool target_counts(const token_logits<T>& z, index_t m) {
  return z.padding < 0 || z.targets[m] != z.padding;
}

/// Loss of a row: -sum_k t_k (shifted_k - log sum), where the targets t_k sum to 1 and shifted_k = z_k -
/// largest. A target of zero is not multiplied by an infinite logit.
template <class T>
__device__ inline double row_loss(const token_logits<T>& z, index_t m, double sum, double shifted,
                                  float largest) {
  const double own = static_cast<double>(logit(z, m, z.targets[m]) - largest);
  const double rest = z.wrong == 0.0 ? 0.0 : z.wrong * (shifted - own);
  return log(sum) - z.right * own - rest;
}

/// Grid: class_grid. Block b has the rows b, b + gridDim.x, ...; thread t the classes t, t + threads, ...
template <class T>
static __global__ void token_losses_kernel(grid_dependency earlier, token_logits<T> z, loss_divisor divisor,
                                           row_array<T> dlogits, double* losses, float* maxima,
                                           float* shares) {
  earlier.wait();
  for (index_t m = static_cast<index_t>(blockIdx.x); m < z.rows; m += static_cast<index_t>(gridDim.x)) {
    if (!target_counts(z, m)) {
      if (threadIdx.x == 0) {
        losses[m] = 0.0;
        if (maxima != nullptr) maxima[m] = shares[m] = 0.0F;
      }
      if (dlogits.data != nullptr) for_each_class(z.classes, [&](index_t k) { dlogits.row(m)[k] = T(0); });
      continue;
    }
    const float largest = largest_of(z.classes, [&](index_t k) { return logit(z, m, k); });
    const double sum = sum_over_classes(z.classes, [&](index_t k) { return expf(logit(z, m, k) - largest); });
    const double shifted =
        z.wrong == 0.0 ? 0.0
                       : sum_over_classes(z.classes, [&](index_t k) { return logit(z, m, k) - largest; });
    const bool known = z.targets[m] >= 0 && static_cast<index_t>(z.targets[m]) < z.classes;
    const float share = known ? static_cast<float>(1.0 / sum) : not_a_number<float>();
    if (threadIdx.x == 0) {
      losses[m] = known ? row_loss(z, m, sum, shifted, largest) : not_a_number<double>();
      if (maxima != nullptr) {
        maxima[m] = largest;
        shares[m] = share;
      }
    }
    if (dlogits.data == nullptr) continue;
    __syncthreads();  // the loss must be computed before the gradient may overwrite the logits
    const float unit = static_cast<float>(1.0 / divisor.get());
    for_each_class(z.classes, [&](index_t k) {
      const float wanted = static_cast<float>(k == z.targets[m] ? z.right : z.wrong);
      dlogits.row(m)[k] = static_cast<T>((expf(logit(z, m, k) - largest) * share - wanted) * unit);
    });
  }
}

/// Grid: one block of 256 threads.
static __global__ void sum_token_losses_kernel(grid_dependency earlier, const double* losses,
                                               const std::int32_t* targets, std::int32_t padding,
                                               index_t rows, double* sums) {
  earlier.wait();
  double loss = 0.0, tokens = 0.0;
  for_each_class(rows, [&](index_t m) {
    loss += losses[m];
    tokens += padding < 0 || targets[m] != padding ? 1.0 : 0.0;
  });
  loss = block_sum(loss);
  tokens = block_sum(tokens);
  if (threadIdx.x == 0) {
    sums[0] = loss;
    sums[1] = tokens;
  }
}

/// A task of sum_columns: replaces logits by their gradients, and sums the gradients over rows.
template <class T>
struct token_gradient_task {
  static constexpr int width = 1;
  using state = column_sum_state<1, 1>;

  token_logits<T> z;
  loss_divisor divisor;
  const float *maxima, *shares;
  T* logits;

  struct loaded {
    index_t row;
    float logit, largest, share;
    std::int32_t target;
  };
  /// Gradient of z_mk: (exp(z - largest) share - t) / divisor, 0 for padding. The stored gradient of the
  /// logit has the factor `scale`; the sum for the bias has not.
  __device__ void add(index_t k, index_t row, index_t end, index_t step, state& s) const {
    const float unit = static_cast<float>(1.0 / divisor.get());
    const auto load = [&](index_t m) {
      return loaded{m, logit(z, m, k), maxima[m], shares[m], z.targets[m]};
    };
    while (row < end) {
      float run = 0.0F;
      for_run(row, end, step, load, [&](const loaded& at) {
        const float wanted = static_cast<float>(k == at.target ? z.right : z.wrong);
        const bool padded = z.padding >= 0 && at.target == z.padding;
        const float gradient = padded ? 0.0F : (expf(at.logit - at.largest) * at.share - wanted) * unit;
        logits[at.row * z.logits.stride + k] = static_cast<T>(gradient * z.scale);
        run += gradient;
      });
      s.sums[0][0] += static_cast<double>(run);
    }
  }
};

/// Stores the sum of column k, or adds it.
template <class T>
struct bias_finish {
  accumulate_t<T>* dbias;  ///< gradient of the bias; nullptr: not computed
  bool add;
  __device__ void operator()(index_t k, const column_sum_state<1, 1>& s) const {
    if (dbias == nullptr) return;
    dbias[k] =
        static_cast<accumulate_t<T>>(add ? static_cast<double>(dbias[k]) + s.sums[0][0] : s.sums[0][0]);
  }
};

/// Grid: class_grid, as for token_losses_kernel. A row of -infinity gives -infinity.
template <class T>
static __global__ void log_sum_exp_kernel(grid_dependency earlier, row_array<const T> logits, index_t rows,
                                          index_t classes, double* result) {
  earlier.wait();
  for (index_t m = static_cast<index_t>(blockIdx.x); m < rows; m += static_cast<index_t>(gridDim.x)) {
    const T* const z = logits.row(m);
    const float largest = largest_of(classes, [&](index_t k) { return static_cast<float>(z[k]); });
    const double sum =
        sum_over_classes(classes, [&](index_t k) { return expf(static_cast<float>(z[k]) - largest); });
    if (threadIdx.x == 0) {
      result[m] =
          largest == -HUGE_VALF ? static_cast<double>(largest) : static_cast<double>(largest) + log(sum);
    }
  }
}

/// One block per row, up to 65536 blocks, which loop over further rows; 32 to 512 threads.
inline grid class_grid(index_t rows, index_t classes) {
  return {dim3(blocks_for(rows, 1)), dim3(row_threads(classes, 1, 512))};
}

template <class T>
void token_losses(cudaStream_t stream, const token_logits<T>& z, const loss_divisor& divisor,
                  row_array<T> dlogits, double* losses, float* maxima, float* shares) {
  launch(stream, class_grid(z.rows, z.classes), token_losses_kernel<T>, z, divisor, dlogits, losses, maxima,
         shares);
}

void sum_token_losses(cudaStream_t stream, const double* losses, const std::int32_t* targets,
                      std::int32_t padding, index_t rows, double* sums) {
  launch(stream, {dim3(1), dim3(256)}, sum_token_losses_kernel, losses, targets, padding, rows, sums);
}

template <class T>
void token_gradients(cudaStream_t stream, const token_logits<T>& z, const loss_divisor& divisor,
                     const float* maxima, const float* shares, T* logits, accumulate_t<T>* dbias,
                     bool add_bias, const column_workspace& work) {
  const launch_site site(stream);
  sum_columns<column_sum_state<1, 1>>(site, token_gradient_task<T>{z, divisor, maxima, shares, logits},
                                      z.rows, z.classes, work, bias_finish<T>{dbias, add_bias});
}

template <class T>
void log_sum_exp(cudaStream_t stream, row_array<const T> logits, index_t rows, index_t classes,
                 double* result) {
  launch(stream, class_grid(rows, classes), log_sum_exp_kernel<T>, logits, rows, classes, result);
}

#define PUFFERFISH_INSTANTIATE(T)                                                                           \
  template void token_losses<T>(cudaStream_t, const token_logits<T>&, const loss_divisor&, row_array<T>,    \
                                double*, float*, float*);                                                   \
  template void token_gradients<T>(cudaStream_t, const token_logits<T>&, const loss_divisor&, const float*, \
                                   const float*, T*, accumulate_t<T>*, bool, const column_workspace&);      \
  template void log_sum_exp<T>(cudaStream_t, row_array<const T>, index_t, index_t, double*);
PUFFERFISH_DEVICE_TYPES(PUFFERFISH_INSTANTIATE)
#undef PUFFERFISH_INSTANTIATE

PUFFERFISH_KERNELS_END
