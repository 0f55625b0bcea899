// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `spectral_atomo_codec`: randomly drawn singular triplets of a gradient, as an unbiased code. For entries
/// instead of triplets see compress/atomo/entry_atomo.hpp.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <pufferfish/compress/atomo/atomo_passes.hpp>
#include <pufferfish/compress/atomo/spectral_atoms.hpp>
#include <pufferfish/compress/atomo/spectral_draw.hpp>
#include <pufferfish/compress/codes/two_hop_codes.hpp>
#include <pufferfish/core/number_text.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Options of spectral_atomo_codec. Codes have no fixed length, so they are always gathered
/// (code_route::gather).
struct atomo_options {
  double sparsity = 2.0;                   ///< expected number of singular triplets per tensor; positive
  std::uint64_t seed = 1;                  ///< the draws also depend on step, rank and parameter
  code_memory memory = code_memory::none;  ///< error feedback; without it codes are unbiased
};

/// The options as text: "ATOMO, singular triplets, sparsity 2, seed 1, no memory".
inline std::string describe(const atomo_options& options) {
  return detail::message({"ATOMO, singular triplets, sparsity ", detail::exact_number(options.sparsity),
                          ", seed ", options.seed, ", ", to_string(options.memory)});
}

/// Codec that keeps randomly drawn singular triplets of each tensor. Each tensor is viewed as a matrix A =
/// sum of sigma_i u_i v_i^T (detail::spectral_form): the weight matrix of a linear layer, with its smaller
/// side as columns, or two columns per tap of a kernel. Triplet i is kept with probability p_i, independently
/// of the others, and
///
///     C(A) = sum over kept i of (sigma_i / p_i) u_i v_i^T,  so that the mean of C(A) is A
///
/// p = atomo_probabilities(sigma, sparsity): `sparsity` triplets are expected, and the variance, sum of
/// sigma_i^2 (1 / p_i - 1), is minimal. With `sparsity` >= rank A, C(A) is A up to rounding.
///
/// v_i and sigma_i are computed from the Gram matrix A^T A in double, u_i = A v_i / sigma_i: about 2
/// columns^2 multiply-adds per row. Singular values below about 1e-7 of the largest are rounding errors of
/// the Gram matrix and count as zero. A tensor whose largest singular value is below 1e-30 counts as zero. A
/// tensor that is not finite decodes to NaN.
///
/// The code has for each tensor a uint32 with the number of kept triplets, then for each of them sigma / p, u
/// and v as T. Source: Wang, Sievert, Liu, Charles, Papailiopoulos and Wright, ATOMO (NeurIPS 2018); the
/// shapes of the matrices follow the paper's published program.
///
/// \code
/// const atomo_options options{.sparsity = 2.0};
/// gradient_exchange<float, mpi::communicator> exchange(net.store(), comm, {}, options);
/// \endcode
template <class T>
class spectral_atomo_codec {
 public:
  using value_type = T;
  using options_type = atomo_options;
  static constexpr bool has_fixed_length = false;

  /// `tensors`: places and sizes of the coded tensors. Throws value_error unless sparsity is positive and
  /// finite.
  explicit spectral_atomo_codec(std::vector<coded_tensor> tensors, const atomo_options& options = {})
      : tensors_(std::move(tensors)), options_(options) {
    detail::check_positive("ATOMO", "sparsity", options.sparsity);
    for (const coded_tensor& tensor : tensors_) forms_.emplace_back(tensor);
    tasks_ = detail::spectral_tasks(forms_);
    if (tasks_.empty()) return;
    const index_t last = forms_[tasks_.back().tensor].columns();
    grams_ = aligned_buffer<double>(tasks_.back().gram + last * last);
  }

  /// Largest length of a code, which keeps all triplets: min(rows, columns) triplets of 1 + rows + columns
  /// values per tensor.
  std::size_t most_bytes() const {
    std::size_t bytes = 0;
    for (const auto& form : forms_)
      bytes += sizeof(std::uint32_t) + triplet_bytes(form) * count(form.atoms());
    return bytes;
  }

  /// Expected length of a code if all tensors have full rank.
  double expected_bytes() const {
    double bytes = static_cast<double>(forms_.size() * sizeof(std::uint32_t));
    for (const auto& form : forms_) {
      const double triplets = std::min(options_.sparsity, static_cast<double>(form.atoms()));
      bytes += triplets * static_cast<double>(triplet_bytes(form));
    }
    return bytes;
  }

  /// Writes the code of D = gradients + memory to `code`, and D - C(D) to the memory (see gradient_codec).
  /// Returns the number of bytes written, which differs from step to step and between ranks.
  std::size_t encode(context<device::cpu>& ctx, const code_place& place, std::span<const T> gradients,
                     std::span<T> memory, std::span<std::byte> code) {
    const T* const values = detail::values_to_code(ctx, gradients, memory);
    multiply_grams(ctx, values);
    std::vector<std::vector<detail::kept_triplet>> kept(tensors_.size());
    ctx.parallel_for(static_cast<index_t>(tensors_.size()),
                     [&](index_t t, int) { kept[count(t)] = draw(count(t), place); });
    std::vector<std::size_t> places(tensors_.size());
    std::size_t length = 0;
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      places[t] = length;
      detail::write_at(code, length, static_cast<std::uint32_t>(kept[t].size()));
      length += sizeof(std::uint32_t);
      for (const detail::kept_triplet& triplet : kept[t]) {
        const std::size_t v = length + (1 + count(forms_[t].rows())) * sizeof(T);
        detail::write_at(code, length, static_cast<T>(triplet.value));
        for (std::size_t c = 0; c < triplet.v.size(); ++c) {
          detail::write_at(code, v + c * sizeof(T), static_cast<T>(triplet.v[c]));
        }
        length += triplet_bytes(forms_[t]);
      }
    }
    write_left_vectors(ctx, values, kept, places, code);
    if (!memory.empty()) decode(ctx, code.first(length), decode_as::subtraction, memory);
    return length;
  }

  /// Stores, adds or subtracts the decoded values; see gradient_codec. Throws value_error, with `to`
  /// unchanged, for a length that does not follow from the numbers of triplets and, naming the tensor, for
  /// more triplets than it has. The values of triplets are not checked.
  void decode(context<device::cpu>& ctx, std::span<const std::byte> code, decode_as as,
              std::span<T> to) const {
    const auto combine = PUFFERFISH_KERNEL(widest_isa(), detail::atomo_passes, combine<T>);
    const std::vector<std::size_t> places = places_of(code);
    for_each_block(ctx, [&](const block_place& at, const detail::spectral_form& form, T* block) {
      const std::size_t rows = count(at.rows), columns = count(form.columns());
      const std::size_t kept = detail::read_at<std::uint32_t>(code, places[at.tensor]);
      if (kept == 0 && as != decode_as::values) return;
      std::vector<T> left(kept * rows), right(kept * columns);
      for (std::size_t j = 0; j < kept; ++j) {
        const std::size_t u = left_vector(places[at.tensor], form, j);
        const T value = detail::read_at<T>(code, u - sizeof(T));
        std::memcpy(&left[j * rows], code.data() + u + count(at.first) * sizeof(T), rows * sizeof(T));
        const std::size_t v = u + count(form.rows()) * sizeof(T);
        std::memcpy(&right[j * columns], code.data() + v, columns * sizeof(T));
        for (std::size_t r = 0; r < rows; ++r) left[j * rows + r] *= value;
      }
      combine(left.data(), at.rows, right.data(), form.columns(), static_cast<index_t>(kept), block);
      form.store(as, block, at.first, at.rows, to.data() + tensors_[at.tensor].offset);
    });
  }

  /// Text of the options on which codes depend. In double, decoded values also depend on whether the
  /// processor fuses multiply-adds, which the text then tells.
  std::string describe() const {
    const bool fused = sizeof(T) == sizeof(double) && detail::fuses_multiply_add();
    return detail::message({"ATOMO, singular triplets, sparsity ", detail::exact_number(options_.sparsity),
                            ", seed ", options_.seed, fused ? ", fused multiply-add" : ""});
  }

 private:
  static std::size_t count(index_t i) { return static_cast<std::size_t>(i); }
  // Number of bytes of one triplet: sigma / p, u and v.
  static std::size_t triplet_bytes(const detail::spectral_form& form) {
    return count(1 + form.rows() + form.columns()) * sizeof(T);
  }

  // Byte of vector u of triplet j, for a tensor's code at byte `place`. sigma / p is before u, v after it.
  static std::size_t left_vector(std::size_t place, const detail::spectral_form& form, std::size_t j) {
    return place + sizeof(std::uint32_t) + j * triplet_bytes(form) + sizeof(T);
  }

  // Rows first .. first + rows - 1 of a tensor's matrix, and the position of their task's Gram matrix.
  struct block_place {
    std::size_t tensor = 0;
    index_t first = 0, rows = 0, gram = 0;
    bool begins_task = false;
  };

  // Calls f(place, form, block) for all rows of all matrices, in blocks that fit into a core's cache. `block`
  // points to memory for one block. Tasks run on all threads.
  template <class F>
  void for_each_block(context<device::cpu>& ctx, const F& f) const {
    ctx.parallel_for(static_cast<index_t>(tasks_.size()), [&](index_t i, int) {
      const detail::spectral_task& task = tasks_[count(i)];
      const detail::spectral_form& form = forms_[task.tensor];
      const index_t most = std::min(task.count, std::max<index_t>(16, 8192 / form.columns()));
      aligned_buffer<T> block(most * form.columns(), uninitialized);
      for (index_t row = 0; row < task.count; row += most) {
        const index_t rows = std::min(most, task.count - row);
        f({task.tensor, task.first + row, rows, task.gram, row == 0}, form, block.data());
      }
    });
  }

  // Computes A^T A for the rows of each task, in double. draw() adds the Gram matrices of a tensor.
  void multiply_grams(context<device::cpu>& ctx, const T* values) {
    constexpr index_t few_columns = 64;
    const auto add_gram = PUFFERFISH_KERNEL(widest_isa(), detail::atomo_passes, add_gram<T>);
    for_each_block(ctx, [&](const block_place& at, const detail::spectral_form& form, T* block) {
      const index_t n = form.columns();
      double* const gram = grams_.data() + at.gram;
      if (at.begins_task) std::fill_n(gram, n * n, 0.0);
      form.load(values + tensors_[at.tensor].offset, at.first, at.rows, block);
      if (n <= few_columns) return add_gram(block, at.rows, n, gram);
      const detail::product_operand a(tensor_view<const T, 2>(block, {at.rows, n}, {1, at.rows}));
      detail::add_product_tn(a, a, tensor_view<double, 2>(gram, {n, n}, {n, 1}), detail::product_part::lower);
    });
  }

  // Draws the triplets of tensor t to keep.
  std::vector<detail::kept_triplet> draw(std::size_t t, const code_place& place) const {
    const index_t n = forms_[t].columns();
    tensor<double, 2> gram({n, n});
    for (const detail::spectral_task& task : tasks_) {
      if (task.tensor != t) continue;
      for (index_t i = 0; i < n * n; ++i) gram.data()[i] += grams_.data()[task.gram + i];
    }
    return detail::draw_triplets(gram, forms_[t].atoms(), options_.sparsity,
                                 detail::code_randoms(options_.seed, "atomo", place, tensors_[t]));
  }

  // Writes u = A v / sigma of every kept triplet at its place in the code.
  void write_left_vectors(context<device::cpu>& ctx, const T* values,
                          const std::vector<std::vector<detail::kept_triplet>>& kept,
                          const std::vector<std::size_t>& places, std::span<std::byte> code) const {
    const auto project = PUFFERFISH_KERNEL(widest_isa(), detail::atomo_passes, project<T>);
    for_each_block(ctx, [&](const block_place& at, const detail::spectral_form& form, T* block) {
      if (kept[at.tensor].empty()) return;
      form.load(values + tensors_[at.tensor].offset, at.first, at.rows, block);
      std::vector<T> u(count(at.rows));
      for (std::size_t j = 0; j < kept[at.tensor].size(); ++j) {
        project(block, at.rows, form.columns(), kept[at.tensor][j].weights.data(), u.data());
        std::memcpy(code.data() + left_vector(places[at.tensor], form, j) + count(at.first) * sizeof(T),
                    u.data(), u.size() * sizeof(T));
      }
    });
  }

  // The first byte of each tensor's code. Throws value_error if the bytes are not a valid code.
  std::vector<std::size_t> places_of(std::span<const std::byte> code) const {
    std::vector<std::size_t> places;
    std::size_t next = 0;
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      places.push_back(next);
      next += sizeof(std::uint32_t);
      if (next > code.size()) detail::check_code_length("spectral_atomo_codec", code.size(), next);
      const std::size_t kept = detail::read_at<std::uint32_t>(code, places.back());
      if (kept > count(forms_[t].atoms())) {
        detail::throw_error<value_error>({"spectral_atomo_codec: a code with ", kept, " triplets of ",
                                          tensors_[t].name, ", which has ", forms_[t].atoms()});
      }
      next += kept * triplet_bytes(forms_[t]);
    }
    detail::check_code_length("spectral_atomo_codec", code.size(), next);
    return places;
  }

  std::vector<coded_tensor> tensors_;
  atomo_options options_;
  std::vector<detail::spectral_form> forms_;  // form of each tensor
  std::vector<detail::spectral_task> tasks_;
  aligned_buffer<double> grams_;  // one per task, [columns x columns]; only the lower triangle is used
};

/// ATOMO for the gradients of a store. Throws value_error unless sparsity is positive and finite.
template <class T>
any_compressor<T> new_compressor(const parameter_store<T>& store, const atomo_options& options) {
  return make_coded_compressor<spectral_atomo_codec<T>>(store, options, options.memory);
}

PUFFERFISH_NAMESPACE_END
